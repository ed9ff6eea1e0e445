"""Attention of chunks of prompts over a paged cache (FlashAttention-2: Dao, 2023). See
`worker/kernels/prefill_attention.py`.

A program computes a tile of a chunk's tokens for one query head. It visits only tiles of keys that
one of its tokens attends to, and compares positions only in those that another one does not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.gpu.paged import (
    LOG2_E,
    Parts,
    load_queries,
    parts_of,
    readable,
    store_sums,
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
    chunks_ptr,
    seen_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    q_token_stride,
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
    value_scale,
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
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_LATENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The last tiles of a chunk attend to the most keys, and are computed first.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_Q
    head = tl.program_id(1)
    chunk_ptr = chunks_ptr + 4 * tl.program_id(2)
    num_tokens = tl.load(chunk_ptr + 2).to(tl.int32)
    if first_query >= num_tokens:
        return
    row, first_token = tl.load(chunk_ptr), tl.load(chunk_ptr + 1)
    length = tl.load(chunk_ptr + 3).to(tl.int32)
    num_earlier = length - num_tokens
    kv_head = head // GROUP

    within = first_query + tl.arange(0, TILE_Q)
    is_query = within < num_tokens
    tokens = first_token + within
    q_places = q_ptr + tokens[:, None] * q_token_stride + head * q_head_stride
    q, q_2, limits = load_queries(q_places, is_query, SIZE, FIRST, SECOND, IS_FP8)

    # `queries`: the last key of each token; `first_end`: how many keys the tile's first one has.
    if HAS_SEEN:
        queries = tl.load(seen_ptr + tokens, mask=is_query, other=0).to(tl.int32) - 1
        tile_seen_ptr = seen_ptr + first_token + first_query
        first_end = tl.load(tile_seen_ptr).to(tl.int32)
        num_queries = tl.minimum(num_tokens - first_query, TILE_Q)
        last = tl.load(tile_seen_ptr + num_queries - 1).to(tl.int32) - 1
    else:
        queries = num_earlier + within
        first_end = num_earlier + first_query + 1
        last = tl.minimum(num_earlier + first_query + TILE_Q, length) - 1
    first_seen, first_of_last = 0, 0  # first keys that the first and the last query attend to
    if WINDOW > 0:
        first_seen = tl.maximum(num_earlier + first_query - WINDOW + 1, 0)
        first_of_last = tl.maximum(last - WINDOW + 1, 0)
    if CHUNK > 0:
        first_seen = (num_earlier + first_query) // CHUNK * CHUNK
        first_of_last = last // CHUNK * CHUNK
    # Tiles: some queries begin, all queries attend to all keys, some queries end.
    first_tile, end_tile = first_seen // TILE, tl.cdiv(last + 1, TILE)
    end_full = tl.maximum(first_end // TILE, first_tile)
    first_full = tl.minimum(tl.cdiv(first_of_last, TILE), end_full)

    best = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    sums = tl.zeros([TILE_Q, V_FIRST], tl.float32)
    sums_2 = tl.zeros([TILE_Q, V_SECOND], tl.float32)
    table_row = table_ptr + row * table_stride
    k_head_ptr, v_head_ptr = k_ptr + kv_head * head_stride, v_ptr + kv_head * v_head_stride
    for part in tl.static_range(3):
        if part == 0:
            begin, end = first_tile, first_full
        elif part == 1:
            begin, end = first_full, end_full
        else:
            begin, end = end_full, end_tile
        if part != 0 or WINDOW > 0 or CHUNK > 0:
            best, total, sums, sums_2 = visit(
                q,
                q_2,
                limits,
                best,
                total,
                sums,
                sums_2,
                queries,
                begin,
                end,
                first_seen,
                last + 1,
                table_row,
                k_head_ptr,
                v_head_ptr,
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
                part != 1,
                PRECISION,
            )

    best = best / LOG2_E
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head)
        with_sink = tl.maximum(best, sink)
        decay = tl.exp(best - with_sink)
        total = total * decay + tl.exp(sink - with_sink)
        best = with_sink
        sums, sums_2 = sums * decay[:, None], sums_2 * decay[:, None]
    total = tl.where(total > 0, total, 1.0)  # lines beyond the chunk, which are not stored
    factor = (value_scale / total)[:, None]
    line = tokens * num_heads + head
    store_sums(
        out_ptr + line[:, None] * V_SIZE,
        is_query,
        sums * factor,
        sums_2 * factor,
        V_SIZE,
        V_FIRST,
        V_SECOND,
        IS_FP8,
    )
    tl.store(lse_ptr + line, best + tl.log(total), is_query)


def tiles(
    parts: Parts, v_parts: Parts, num_tokens: int, dtype: torch.dtype
) -> tuple[int, int, int, int]:
    """(queries, keys, warps, stages) of a program. The fastest on an H200 for heads of 128."""
    first_part, most = parts.first, triton.next_power_of_2(max(num_tokens, 16))
    if dtype == torch.float32:
        return min(32, most), 32 if first_part <= 128 else 16, 8, 1
    if most >= 128 and max(parts.size, v_parts.size) <= 128 and parts.size == first_part:
        return 128, 128, 8, 3
    if first_part <= 128:
        return min(128, most), 64, 8, 3
    if first_part <= 256:
        return min(128, most), 32, 8, 3
    return min(32, most), 32, 8, 2


def _fake(q: Tensor, keys: Tensor, values: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads = q.shape[:2]
    out = torch.empty((num_tokens, num_heads, values.shape[3]), dtype=q.dtype, device=q.device)
    return out, torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device)


@operator(
    "prefill_attention(Tensor q, Tensor keys, Tensor values, Tensor block_table, Tensor chunks, "
    "Tensor? seen, Tensor? sinks, int max_tokens, float scale, int window, int chunk, "
    "float softcap, float key_scale, float value_scale, bool is_latent) -> (Tensor, Tensor)",
    fake=_fake,
)
def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    chunks: Tensor,
    seen: Tensor | None,
    sinks: Tensor | None,
    max_tokens: int,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    key_scale: float,
    value_scale: float,
    is_latent: bool,
) -> tuple[Tensor, Tensor]:
    """See the wrapper. window, chunk, softcap: 0 is none. is_latent: as in `decode_attention`."""
    out, lse = _fake(q, keys, values)
    num_heads = q.shape[1]
    num_kv_heads, block_size = keys.shape[1:3]
    parts, v_parts = parts_of(q.shape[2]), value_parts_of(values)
    tile_q, tile, num_warps, num_stages = tiles(parts, v_parts, max_tokens, q.dtype)
    is_fp8 = keys.dtype == torch.float8_e4m3fn
    keys, values = readable(keys, values)
    _attend[(triton.cdiv(max_tokens, tile_q), num_heads, len(chunks))](
        q,
        keys,
        values,
        block_table,
        chunks,
        seen,
        sinks,
        out,
        lse,
        q.stride(0),
        q.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        block_table.stride(0),
        scale * key_scale,
        softcap,
        value_scale,
        num_heads,
        GROUP=num_heads // num_kv_heads,
        SIZE=parts.size,
        FIRST=parts.first,
        SECOND=parts.second,
        V_SIZE=v_parts.size,
        V_FIRST=v_parts.first,
        V_SECOND=v_parts.second,
        BLOCK_SIZE=block_size,
        TILE_Q=tile_q,
        TILE=tile,
        WINDOW=window,
        CHUNK=chunk,
        HAS_SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
        HAS_SEEN=seen is not None,
        IS_FP8=is_fp8,
        IS_LATENT=is_latent,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out, lse
