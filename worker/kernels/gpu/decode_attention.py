"""Attention of one new token per sequence over a paged cache, divided along the context
(flash-decoding: Dao et al., 2023). See `worker/kernels/decode_attention.py`.

A program computes all query heads of a KV head, as the rows of one product, over one split of the
context; so keys and values are read once. A second kernel adds up the splits. What a program reads
follows from the length in device memory, so the launch can be part of a graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.gpu.paged import (
    load_queries,
    parts_of,
    readable,
    store_part,
    value_parts_of,
    visit,
)
from longshore.worker.kernels.operators import operator


@triton.jit
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    rows_ptr,
    lens_ptr,
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
    factor,
    num_heads,
    GROUP: tl.constexpr,
    TILE_H: tl.constexpr,
    SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    V_SIZE: tl.constexpr,
    V_FIRST: tl.constexpr,
    V_SECOND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_LATENT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """factor: on the result. HAS_SHARED: the tokens before `shared` are computed elsewhere, as
    parts after NUM_SPLITS."""
    index = tl.program_id(0).to(tl.int64)
    tiles_of_heads: tl.constexpr = (GROUP + TILE_H - 1) // TILE_H
    kv_head = tl.program_id(1) // tiles_of_heads
    split = tl.program_id(2)
    within = (tl.program_id(1) % tiles_of_heads) * TILE_H + tl.arange(0, TILE_H)
    is_head = within < GROUP
    heads = kv_head * GROUP + within
    length = tl.load(lens_ptr + index).to(tl.int32)
    row = tl.load(rows_ptr + index)

    q_places = q_ptr + index * q_row_stride + heads[:, None] * q_head_stride
    q, q_2, limits = load_queries(q_places, is_head, SIZE, FIRST, SECOND, IS_FP8)

    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(length - WINDOW, 0)
    if CHUNK > 0:
        first_key = tl.maximum(length - 1, 0) // CHUNK * CHUNK
    if HAS_SHARED:
        first_key = tl.minimum(tl.load(shared_ptr).to(tl.int32), length)
    first_tile, end_tile = first_key // TILE, tl.cdiv(length, TILE)
    tiles_per_split = tl.cdiv(end_tile - first_tile, NUM_SPLITS)
    first_tile += split * tiles_per_split
    end_tile = tl.minimum(end_tile, first_tile + tiles_per_split)

    best, total, sums, sums_2 = visit(
        q,
        q_2,
        limits,
        tl.full([TILE_H], float("-inf"), tl.float32),
        tl.zeros([TILE_H], tl.float32),
        tl.zeros([TILE_H, V_FIRST], tl.float32),
        tl.zeros([TILE_H, V_SECOND], tl.float32),
        tl.full([TILE_H], 0, tl.int32) + (length - 1),
        first_tile,
        end_tile,
        first_key,
        length,
        table_ptr + row * table_stride,
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
        WINDOW,
        CHUNK,
        HAS_SOFTCAP,
        IS_FP8,
        IS_LATENT,
        True,
        PRECISION,
    )

    lines = (index * num_heads + heads) * NUM_PARTS + split
    store_part(
        out_ptr,
        lse_ptr,
        lines,
        is_head,
        best,
        total,
        sums,
        sums_2,
        V_SIZE,
        V_FIRST,
        V_SECOND,
        IS_FP8,
        factor,
    )


@triton.jit
def _add_splits(
    parts_ptr,
    part_lse_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    value_scale,
    num_heads,
    V_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    splits, columns = tl.arange(0, SPLITS), tl.arange(0, BLOCK)
    is_split = splits < NUM_SPLITS
    part_lse = tl.load(
        part_lse_ptr + line * NUM_SPLITS + splits, mask=is_split, other=float("-inf")
    )
    best = tl.max(part_lse, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + line % num_heads)
        best = tl.maximum(best, sink)
    base = tl.where(best > float("-inf"), best, 0.0)
    weights = tl.exp(part_lse - base)
    total = tl.sum(weights, axis=0)
    if HAS_SINKS:
        total += tl.exp(sink - base)
    places = (line * NUM_SPLITS + splits[:, None]) * V_SIZE + columns[None, :]
    parts = tl.load(
        parts_ptr + places, mask=is_split[:, None] & (columns < V_SIZE)[None, :], other=0.0
    )
    out = tl.sum(parts * weights[:, None], axis=0)
    divisor = tl.where(total > 0, total, 1.0)
    out = out * (value_scale / divisor)
    tl.store(out_ptr + line * V_SIZE + columns, out.to(out_ptr.dtype.element_ty), columns < V_SIZE)
    tl.store(lse_ptr + line, tl.where(total > 0, base + tl.log(divisor), float("-inf")))


def _tiles(
    first_part: int, group: int, dtype: torch.dtype, is_fp8: bool
) -> tuple[int, int, int, int]:
    """(heads, keys, warps, stages) of a program. The fastest on an H200 for heads of 128."""
    tile_h = min(max(16, triton.next_power_of_2(group)), 64)
    if first_part > 128:
        return tile_h, 32, 8, 2
    if dtype == torch.float32:
        return tile_h, 32, 8, 2
    return tile_h, 64, 2 if is_fp8 and tile_h == 16 else 4, 4


def _fake(q: Tensor, keys: Tensor, values: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    num_rows, num_heads = q.shape[:2]
    out = torch.empty((num_rows, num_heads, values.shape[3]), dtype=q.dtype, device=q.device)
    return out, torch.empty((num_rows, num_heads), dtype=torch.float32, device=q.device)


@operator(
    "decode_attention(Tensor q, Tensor keys, Tensor values, Tensor block_table, Tensor rows, "
    "Tensor lens, Tensor? sinks, float scale, int window, int chunk, float softcap, "
    "float key_scale, float value_scale, int num_splits, bool is_latent) -> (Tensor, Tensor)",
    fake=_fake,
    launches=2,
)
def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    key_scale: float,
    value_scale: float,
    num_splits: int,
    is_latent: bool,
) -> tuple[Tensor, Tensor]:
    """See the wrapper. window, chunk, softcap: 0 is none. is_latent: `values` are the first
    elements of `keys`, the same memory, and their size is a power of two."""
    out, lse = _fake(q, keys, values)
    if len(q) == 0:
        return out, lse
    is_whole = num_splits == 1 and sinks is None
    parts = out[:, :, None], lse[:, :, None]
    if not is_whole:
        parts = new_parts(q, values.shape[3], num_splits)
    attend_to_own(
        q,
        keys,
        values,
        block_table,
        rows,
        lens,
        None,
        parts,
        scale=scale * key_scale,
        window=window,
        chunk=chunk,
        softcap=softcap,
        num_splits=num_splits,
        is_latent=is_latent,
        factor=value_scale if is_whole else 1.0,
    )
    if not is_whole:
        add_splits(parts, sinks, value_scale, out, lse)
    return out, lse


def new_parts(q: Tensor, value_dim: int, num_parts: int) -> tuple[Tensor, Tensor]:
    """Memory for the parts of a result: (n, num_heads, num_parts, value_dim) and (n, num_heads,
    num_parts), float32."""
    shape = (*q.shape[:2], num_parts)
    return (
        torch.empty((*shape, value_dim), dtype=torch.float32, device=q.device),
        torch.empty(shape, dtype=torch.float32, device=q.device),
    )


def attend_to_own(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    shared: Tensor | None,
    parts: tuple[Tensor, Tensor],
    *,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    num_splits: int,
    is_latent: bool,
    factor: float = 1.0,
) -> None:
    """Compute the first `num_splits` of `parts`, times `factor`: each sequence from the first
    `shared` tokens on, (1,) int64; None: from the first token on."""
    num_rows, num_heads, size = q.shape
    num_kv_heads, block_size = keys.shape[1:3]
    group = num_heads // num_kv_heads
    k_parts, v_parts = parts_of(size), value_parts_of(values)
    is_fp8 = keys.dtype == torch.float8_e4m3fn
    tile_h, tile, num_warps, num_stages = _tiles(k_parts.first, group, q.dtype, is_fp8)
    keys, values = readable(keys, values)
    _attend[(num_rows, num_kv_heads * triton.cdiv(group, tile_h), num_splits)](
        q,
        keys,
        values,
        block_table,
        rows,
        lens,
        shared,
        *parts,
        q.stride(0),
        q.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        block_table.stride(0),
        scale,
        softcap,
        factor,
        num_heads,
        GROUP=group,
        TILE_H=tile_h,
        SIZE=k_parts.size,
        FIRST=k_parts.first,
        SECOND=k_parts.second,
        V_SIZE=v_parts.size,
        V_FIRST=v_parts.first,
        V_SECOND=v_parts.second,
        BLOCK_SIZE=block_size,
        TILE=tile,
        WINDOW=window,
        CHUNK=chunk,
        HAS_SOFTCAP=softcap > 0,
        IS_FP8=is_fp8,
        IS_LATENT=is_latent,
        NUM_SPLITS=num_splits,
        NUM_PARTS=parts[1].shape[2],
        HAS_SHARED=shared is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=num_warps,
        num_stages=num_stages,
    )


def add_splits(
    parts: tuple[Tensor, Tensor],
    sinks: Tensor | None,
    value_scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Merge all `parts` into `out` and `lse`."""
    num_rows, num_heads, num_parts, value_dim = parts[0].shape
    _add_splits[(num_rows * num_heads,)](
        *parts,
        sinks,
        out,
        lse,
        value_scale,
        num_heads,
        V_SIZE=value_dim,
        BLOCK=triton.next_power_of_2(value_dim),
        NUM_SPLITS=num_parts,
        SPLITS=triton.next_power_of_2(num_parts),
        HAS_SINKS=sinks is not None,
        num_warps=4,
    )


def are_latents(keys: Tensor, values: Tensor) -> bool:
    """Whether `values` are a part of `keys` that is loaded as one part anyway. Values in fp8 are
    loaded otherwise than keys."""
    is_same = keys.stride() == values.stride() and keys.storage_offset() == values.storage_offset()
    is_same = is_same and keys.untyped_storage()._cdata == values.untyped_storage()._cdata
    is_same = is_same and keys.dtype != torch.float8_e4m3fn
    return is_same and values.shape[3] == parts_of(keys.shape[3]).first
