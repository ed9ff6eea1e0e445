"""Rotary positions, the norms of heads and the KV write: one program per token and tile of heads.
See `worker/kernels/write_kv.py` and `rotary.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.gpu.paged import as_bytes
from longshore.worker.kernels.gpu.rotary import (
    head_tiles,
    load_heads,
    rotate_in_place,
    store_heads,
)
from longshore.worker.kernels.operators import operator

FP8_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def _fp8_bits(x, scale):
    """scale: the inverse of the layer's."""
    x = x * scale
    # The comparisons keep NaN.
    x = tl.where(x > FP8_MAX, FP8_MAX, tl.where(x < -FP8_MAX, -FP8_MAX, x))
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    positions_ptr,
    table_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_stride,
    k_stride,
    v_stride,
    k_head_stride,
    v_head_stride,
    keys_block_stride,
    keys_head_stride,
    keys_token_stride,
    values_block_stride,
    values_head_stride,
    values_token_stride,
    key_scale,
    value_scale,
    eps,
    num_heads,
    num_kv_heads,
    SIZE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles_ptr = table_ptr
    if NUM_PAIRS > 0:
        angles_ptr += tl.load(positions_ptr + token) * (2 * NUM_PAIRS)
    if HAS_Q:
        num_q_tiles = tl.cdiv(num_heads, HEADS)
        if tile < num_q_tiles:
            rotate_in_place(
                q_ptr + token * q_stride,
                tile,
                num_heads,
                q_norm_ptr,
                angles_ptr,
                eps,
                SIZE,
                NUM_PAIRS,
                HEADS,
                BLOCK_P,
                BLOCK_R,
                HAS_Q_NORM,
            )
            return
        tile -= num_q_tiles
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    heads = tile * HEADS + tl.arange(0, HEADS)[:, None]
    is_head = heads < num_kv_heads
    first, second, rest = load_heads(
        k_ptr + token * k_stride + heads * k_head_stride,
        is_head,
        k_norm_ptr,
        angles_ptr,
        eps,
        SIZE,
        NUM_PAIRS,
        HEADS,
        BLOCK_P,
        BLOCK_R,
        HAS_K_NORM,
    )
    columns = tl.arange(0, BLOCK_V)[None, :]
    is_value = is_head & (columns < SIZE)
    v_lines = v_ptr + token * v_stride + heads * v_head_stride
    v = tl.load(v_lines + columns, mask=is_value, other=0.0)
    if IS_FP8:
        first, second = _fp8_bits(first, key_scale), _fp8_bits(second, key_scale)
        rest = _fp8_bits(rest, key_scale)
        v = _fp8_bits(v.to(tl.float32), value_scale)
    lines = keys_ptr + block * keys_block_stride + offset * keys_token_stride
    lines += heads * keys_head_stride
    store_heads(lines, is_head, first, second, rest, SIZE, NUM_PAIRS, BLOCK_P, BLOCK_R)
    lines = values_ptr + block * values_block_stride + offset * values_token_stride
    tl.store(lines + heads * values_head_stride + columns, v, mask=is_value)


def _fake(*_: object) -> None:
    return None


@operator(
    "write_kv(Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor slots, "
    "float key_scale, float value_scale, Tensor(c!)? q, Tensor? positions, Tensor? table, "
    "Tensor? q_norm, Tensor? k_norm, float eps) -> ()",
    fake=_fake,
)
def write_kv(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    key_scale: float,
    value_scale: float,
    q: Tensor | None,
    positions: Tensor | None,
    table: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    """See the wrapper; here k is always unchanged. If q is None, nothing is rotated."""
    num_tokens, num_kv_heads, size = k.shape
    if num_tokens == 0:
        return
    num_heads = 0 if q is None else q.shape[1]
    num_pairs = 0 if table is None else table.shape[2]
    is_fp8 = keys.dtype == torch.float8_e4m3fn
    block_size, strides = keys.shape[2], (*keys.stride()[:3], *values.stride()[:3])
    tiles = head_tiles(max(num_heads, num_kv_heads), size, num_pairs)
    num_tiles = triton.cdiv(num_heads, tiles.heads) + triton.cdiv(num_kv_heads, tiles.heads)
    _kernel[(num_tokens, num_tiles)](
        q,
        k,
        v,
        as_bytes(keys),
        as_bytes(values),
        slots,
        positions,
        table,
        q_norm,
        k_norm,
        0 if q is None else q.stride(0),
        k.stride(0),
        v.stride(0),
        k.stride(1),
        v.stride(1),
        *strides,
        1.0 / key_scale,
        1.0 / value_scale,
        eps,
        num_heads,
        num_kv_heads,
        SIZE=size,
        NUM_PAIRS=num_pairs,
        HEADS=tiles.heads,
        BLOCK_P=tiles.first,
        BLOCK_R=tiles.rest,
        BLOCK_V=triton.next_power_of_2(size),
        BLOCK_SIZE=block_size,
        HAS_Q=q is not None,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        IS_FP8=is_fp8,
        num_warps=tiles.num_warps,
    )
