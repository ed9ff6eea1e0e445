"""Attention of one new token per sequence, of which all sequences begin with the same blocks
(cascade attention, as in FlashInfer: Ye et al., 2024). See `worker/kernels/cascade_attention.py`.

The queries of all sequences are the rows of one product over the shared blocks, divided along the
context. Each sequence's own tokens are a decode, and one kernel adds up the parts of both. The
number of shared tokens is read on the device, so the launches can be part of a graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.gpu.decode_attention import add_splits, attend_to_own, new_parts
from longshore.worker.kernels.gpu.paged import (
    load_queries,
    parts_of,
    readable,
    store_part,
    value_parts_of,
    visit,
)
from longshore.worker.kernels.gpu.prefill_attention import tiles
from longshore.worker.kernels.operators import operator


@triton.jit
def _attend_to_shared(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    rows_ptr,
    shared_ptr,
    out_ptr,
    lse_ptr,
    q_row_stride,
    q_head_stride,
    block_stride,
    head_stride,
    token_stride,
    v_block_stride,
    v_head_stride,
    v_token_stride,
    table_stride,
    scale,
    softcap,
    num_rows,
    num_heads,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    V_SIZE: tl.constexpr,
    V_FIRST: tl.constexpr,
    V_SECOND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_LATENT: tl.constexpr,
    FIRST_PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head, split = tl.program_id(1), tl.program_id(2)
    packed = tl.program_id(0) * TILE_Q + tl.arange(0, TILE_Q)  # sequence, then head of the group
    is_query = packed < num_rows * GROUP
    indices, heads = (packed // GROUP).to(tl.int64), kv_head * GROUP + packed % GROUP
    q_places = q_ptr + indices[:, None] * q_row_stride + heads[:, None] * q_head_stride
    q, q_2, limits = load_queries(q_places, is_query, SIZE, FIRST, SECOND, IS_FP8)

    shared = tl.load(shared_ptr).to(tl.int32)
    table_row = table_ptr + tl.load(rows_ptr) * table_stride  # of the first sequence
    num_tiles = tl.cdiv(shared, TILE)
    tiles_per_split = tl.cdiv(num_tiles, NUM_PARTS - FIRST_PART)
    first_tile = split * tiles_per_split
    end_tile = tl.minimum(num_tiles, first_tile + tiles_per_split)
    end_full = tl.maximum(tl.minimum(end_tile, shared // TILE), first_tile)

    best = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    sums = tl.zeros([TILE_Q, V_FIRST], tl.float32)
    sums_2 = tl.zeros([TILE_Q, V_SECOND], tl.float32)
    for part in tl.static_range(2):  # the full tiles, and one that is not
        if part == 0:
            begin, end = first_tile, end_full
        else:
            begin, end = end_full, end_tile
        best, total, sums, sums_2 = visit(
            q,
            q_2,
            limits,
            best,
            total,
            sums,
            sums_2,
            tl.full([TILE_Q], 0, tl.int32) + (shared - 1),
            begin,
            end,
            0,
            shared,
            table_row,
            k_ptr + kv_head * head_stride,
            v_ptr + kv_head * v_head_stride,
            block_stride,
            token_stride,
            v_block_stride,
            v_token_stride,
            scale,
            softcap,
            SIZE,
            FIRST,
            SECOND,
            V_SIZE,
            V_FIRST,
            V_SECOND,
            BLOCK_SIZE,
            TILE,
            0,
            0,
            HAS_SOFTCAP,
            IS_FP8,
            IS_LATENT,
            part == 1,
            PRECISION,
        )
    lines = (indices * num_heads + heads) * NUM_PARTS + FIRST_PART + split
    store_part(
        out_ptr,
        lse_ptr,
        lines,
        is_query,
        best,
        total,
        sums,
        sums_2,
        V_SIZE,
        V_FIRST,
        V_SECOND,
        IS_FP8,
    )


def _fake(q: Tensor, keys: Tensor, values: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    num_rows, num_heads = q.shape[:2]
    out = torch.empty((num_rows, num_heads, values.shape[3]), dtype=q.dtype, device=q.device)
    return out, torch.empty((num_rows, num_heads), dtype=torch.float32, device=q.device)


@operator(
    "cascade_attention(Tensor q, Tensor keys, Tensor values, Tensor block_table, Tensor rows, "
    "Tensor lens, Tensor shared, Tensor? sinks, float scale, float softcap, float key_scale, "
    "float value_scale, int num_splits, int num_shared_splits, bool is_latent) -> (Tensor, Tensor)",
    fake=_fake,
    launches=3,
)
def cascade_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    shared: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    key_scale: float,
    value_scale: float,
    num_splits: int,
    num_shared_splits: int,
    is_latent: bool,
) -> tuple[Tensor, Tensor]:
    """See the wrapper. softcap, is_latent: as in `decode_attention`."""
    out, lse = _fake(q, keys, values)
    num_rows, num_heads, size = q.shape
    if num_rows == 0:
        return out, lse
    num_kv_heads, block_size = keys.shape[1:3]
    group = num_heads // num_kv_heads
    parts = new_parts(q, values.shape[3], num_splits + num_shared_splits)
    attend_to_own(
        q,
        keys,
        values,
        block_table,
        rows,
        lens,
        shared,
        parts,
        scale=scale * key_scale,
        window=0,
        chunk=0,
        softcap=softcap,
        num_splits=num_splits,
        is_latent=is_latent,
    )
    k_parts, v_parts = parts_of(size), value_parts_of(values)
    tile_q, tile, num_warps, num_stages = tiles(k_parts, v_parts, num_rows * group, q.dtype)
    is_fp8 = keys.dtype == torch.float8_e4m3fn
    keys, values = readable(keys, values)
    _attend_to_shared[(triton.cdiv(num_rows * group, tile_q), num_kv_heads, num_shared_splits)](
        q,
        keys,
        values,
        block_table,
        rows,
        shared,
        *parts,
        q.stride(0),
        q.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        block_table.stride(0),
        scale * key_scale,
        softcap,
        num_rows,
        num_heads,
        GROUP=group,
        SIZE=k_parts.size,
        FIRST=k_parts.first,
        SECOND=k_parts.second,
        V_SIZE=v_parts.size,
        V_FIRST=v_parts.first,
        V_SECOND=v_parts.second,
        BLOCK_SIZE=block_size,
        TILE_Q=tile_q,
        TILE=tile,
        HAS_SOFTCAP=softcap > 0,
        IS_FP8=is_fp8,
        IS_LATENT=is_latent,
        FIRST_PART=num_splits,
        NUM_PARTS=num_splits + num_shared_splits,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=num_warps,
        num_stages=num_stages,
    )
    add_splits(parts, sinks, value_scale, out, lse)
    return out, lse
