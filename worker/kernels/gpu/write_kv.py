"""Rotary positions, the norms of heads and the KV write: one program per token and head. See
`worker/kernels/write_kv.py` and `worker/kernels/rotary.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.gpu.paged import readable
from longshore.worker.kernels.operators import operator

FP8_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def _rotated(
    head_ptr,
    norm_ptr,
    table_ptr,
    columns,
    is_column,
    eps,
    SIZE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROTATES: tl.constexpr,
):
    """A head in float32, normalised and rotated. Elements i and i + NUM_PAIRS are a pair."""
    dtype = head_ptr.dtype.element_ty
    x = tl.load(head_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
        weight = tl.load(norm_ptr + columns, mask=is_column, other=0.0)
        x = ((x * factor).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)
        x = x.to(tl.float32)
    if ROTATES:
        is_rotated = columns < 2 * NUM_PAIRS
        is_first = columns < NUM_PAIRS
        partner = tl.where(is_first, columns + NUM_PAIRS, columns - NUM_PAIRS)
        pair = tl.where(is_first, columns, columns - NUM_PAIRS)
        other = tl.load(head_ptr + partner, mask=is_rotated, other=0.0).to(tl.float32)
        if HAS_NORM:
            weight = tl.load(norm_ptr + partner, mask=is_rotated, other=0.0)
            other = (other * factor).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
            other = other.to(dtype).to(tl.float32)
        cos = tl.load(table_ptr + pair, mask=is_rotated, other=1.0)
        sin = tl.load(table_ptr + NUM_PAIRS + pair, mask=is_rotated, other=0.0)
        x = tl.where(is_rotated, x * cos + tl.where(is_first, -other, other) * sin, x)
    return x


@triton.jit
def _store(place_ptr, x, scale, columns, is_stored, IS_FP8: tl.constexpr):
    """Store a head, in float32, in the cache. scale: the inverse of the layer's."""
    if IS_FP8:
        x = x * scale
        # The comparisons keep NaN.
        x = tl.where(x > FP8_MAX, FP8_MAX, tl.where(x < -FP8_MAX, -FP8_MAX, x))
        bits = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(place_ptr + columns, bits, is_stored)
    else:
        tl.store(place_ptr + columns, x.to(place_ptr.dtype.element_ty), is_stored)


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
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    ROTATES: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_SHARED: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    line_ptr = table_ptr
    if ROTATES:
        line_ptr += tl.load(positions_ptr + token) * 2 * NUM_PAIRS
    if HAS_Q:  # noqa: SIM102  # without queries, the rest is not compiled
        if head < num_heads:
            head_ptr = q_ptr + token * q_stride + head * SIZE
            x = _rotated(
                head_ptr,
                q_norm_ptr,
                line_ptr,
                columns,
                is_column,
                eps,
                SIZE,
                NUM_PAIRS,
                HAS_Q_NORM,
                ROTATES,
            )
            tl.debug_barrier()  # elements are read by the threads of their partners
            tl.store(head_ptr + columns, x.to(q_ptr.dtype.element_ty), is_column)
            return
    head -= num_heads
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k = _rotated(
        k_ptr + token * k_stride + head * k_head_stride,
        k_norm_ptr,
        line_ptr,
        columns,
        is_column,
        eps,
        SIZE,
        NUM_PAIRS,
        HAS_K_NORM,
        ROTATES,
    )
    if not IS_FP8:
        k = k.to(k_ptr.dtype.element_ty).to(tl.float32)
    place_ptr = keys_ptr + block * keys_block_stride + head * keys_head_stride
    _store(place_ptr + offset * keys_token_stride, k, key_scale, columns, is_column, IS_FP8)
    if not IS_SHARED:
        v_places = v_ptr + token * v_stride + head * v_head_stride + columns
        v = tl.load(v_places, mask=is_column, other=0.0).to(tl.float32)
        place_ptr = values_ptr + block * values_block_stride + head * values_head_stride
        _store(place_ptr + offset * values_token_stride, v, value_scale, columns, is_column, IS_FP8)


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
    """See the wrapper; here k is always unchanged."""
    num_tokens, num_kv_heads, size = k.shape
    if num_tokens == 0:
        return
    num_heads = 0 if q is None else q.shape[1]
    is_fp8 = keys.dtype == torch.float8_e4m3fn
    is_shared = keys.data_ptr() == values.data_ptr()
    block_size, strides = keys.shape[2], (*keys.stride()[:3], *values.stride()[:3])
    keys, values = readable(keys), readable(values)
    _kernel[(num_tokens, num_heads + num_kv_heads)](
        q,
        k,
        v,
        keys,
        values,
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
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        BLOCK_SIZE=block_size,
        NUM_PAIRS=1 if table is None else table.shape[2],
        HAS_Q=q is not None,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        ROTATES=table is not None,
        IS_FP8=is_fp8,
        IS_SHARED=is_shared,
        num_warps=1 if size <= 256 else 2,
    )
