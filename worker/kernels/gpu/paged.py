"""What the attention kernels share: sizes that Triton can multiply, and reads through block tables.

A head of any size is read as two parts whose sizes are powers of two, because `tl.arange` has no
other sizes: 576 elements are 512 and 64, 80 are 64 and 16.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_PART: Final = 16
"""The shortest operand of `tl.dot`."""

LOG2_E: Final = tl.constexpr(1.4426950408889634)


class Parts(NamedTuple):
    """size: elements of a head. first, second: elements read for its parts, powers of two; there
    is a second part only if the size exceeds `first`."""

    size: int
    first: int
    second: int


def parts_of(size: int) -> Parts:
    """The two parts of a head of `size` elements."""
    first = max(MIN_PART, 1 << (size.bit_length() - 1))
    return Parts(size, first, max(MIN_PART, triton.next_power_of_2(max(size - first, 1))))


def readable(cache: Tensor) -> Tensor:
    """fp8 as bytes, which kernels convert themselves: not all of Triton's versions read a masked
    fp8 tensor."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@triton.jit
def load_tile(
    pointers,
    is_row,
    columns,
    SIZE: tl.constexpr,
    END: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_FP8: tl.constexpr,
    ALL_ROWS: tl.constexpr = False,
):
    """A tile of keys, values or queries in DTYPE, 0 where it is not read: in rows that are not
    `is_row`, unless ALL_ROWS, and in columns from SIZE on, if END, their end, exceeds it."""
    if ALL_ROWS and END <= SIZE:
        tile = tl.load(pointers)
    else:
        is_read = (columns < SIZE)[None, :]
        if not ALL_ROWS:
            is_read = is_row[:, None] & is_read
        tile = tl.load(pointers, mask=is_read, other=0 if IS_FP8 else 0.0)
    if IS_FP8:
        tile = tile.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(DTYPE)
    return tile


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap), which is softcap from 20 on."""
    ratio = tl.minimum(tl.maximum(scores / softcap, -20.0), 20.0)
    return softcap * (1.0 - 2.0 / (tl.exp(2.0 * ratio) + 1.0))


@triton.jit
def visit(
    q,
    q_2,
    best,
    total,
    sums,
    sums_2,
    queries,
    first_tile,
    end_tile,
    first_key,
    end_key,
    table_row,
    k_ptr,
    v_ptr,
    block_stride,
    token_stride,
    scale,
    softcap,
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
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to the tiles of keys from `first_tile` to `end_tile`. A query attends to the keys up
    to its number in `queries`, within WINDOW or CHUNK; without IS_MASKED, to all. Keys before
    `first_key` and from `end_key` on are not read: they may belong to other sequences.

    q, q_2:    the two parts of the queries. table_row: the sequence's line of the block table.
    best:      the highest score of each query so far, in powers of two.
    total, sums, sums_2: the sums of weights and of weighted values, relative to `best`.
    Returns the last four.
    """
    columns, columns_2 = tl.arange(0, FIRST), FIRST + tl.arange(0, SECOND)
    v_columns, v_columns_2 = tl.arange(0, V_FIRST), V_FIRST + tl.arange(0, V_SECOND)
    dtype = q.dtype
    for tile in range(first_tile, end_tile):
        positions = tile * TILE + tl.arange(0, TILE)
        is_key = (positions >= first_key) & (positions < end_key)
        if BLOCK_SIZE % TILE == 0:  # all in one block
            blocks = tl.load(table_row + tile * TILE // BLOCK_SIZE)
        elif IS_MASKED:
            blocks = tl.load(table_row + positions // BLOCK_SIZE, mask=is_key, other=0)
        else:
            blocks = tl.load(table_row + positions // BLOCK_SIZE)
        offsets = blocks.to(tl.int64) * block_stride + positions % BLOCK_SIZE * token_stride
        k_places = k_ptr + offsets[:, None]
        k = load_tile(
            k_places + columns, is_key, columns, SIZE, FIRST, dtype, IS_FP8, not IS_MASKED
        )
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SIZE > FIRST:
            k_2 = load_tile(
                k_places + columns_2,
                is_key,
                columns_2,
                SIZE,
                FIRST + SECOND,
                dtype,
                IS_FP8,
                not IS_MASKED,
            )
            scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision=PRECISION)
        factor = scale * LOG2_E
        if HAS_SOFTCAP:
            scores = capped(scores * scale, softcap)
            factor = LOG2_E
        if IS_MASKED:
            is_seen = is_key[None, :] & (positions[None, :] <= queries[:, None])
            if WINDOW > 0:
                is_seen &= positions[None, :] > queries[:, None] - WINDOW
            if CHUNK > 0:
                is_seen &= positions[None, :] >= queries[:, None] // CHUNK * CHUNK
            scores = tl.where(is_seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1) * factor)
        base = new_best
        if IS_MASKED:  # a query may attend to no key of its first tiles
            base = tl.where(new_best > float("-inf"), new_best, 0.0)
        decay = tl.exp2(best - base)
        weights = tl.exp2(scores * factor - base[:, None])  # one instruction before the power
        total = total * decay + tl.sum(weights, axis=1)
        best = new_best
        weights = weights.to(dtype)
        if IS_LATENT:
            v = k
        else:
            v_places = v_ptr + offsets[:, None]
            v = load_tile(
                v_places + v_columns,
                is_key,
                v_columns,
                V_SIZE,
                V_FIRST,
                dtype,
                IS_FP8,
                not IS_MASKED,
            )
        sums = tl.dot(weights, v, sums * decay[:, None], input_precision=PRECISION)
        if V_SIZE > V_FIRST:
            v_2 = load_tile(
                v_places + v_columns_2,
                is_key,
                v_columns_2,
                V_SIZE,
                V_FIRST + V_SECOND,
                dtype,
                IS_FP8,
                not IS_MASKED,
            )
            sums_2 = tl.dot(weights, v_2, sums_2 * decay[:, None], input_precision=PRECISION)
    return best, total, sums, sums_2


@triton.jit
def store_part(
    out_ptr,
    lse_ptr,
    lines,
    is_line,
    best,
    total,
    sums,
    sums_2,
    V_SIZE: tl.constexpr,
    V_FIRST: tl.constexpr,
    V_SECOND: tl.constexpr,
):
    """Store the result of `visit` as one of the parts that `add_splits` adds up. A part without
    keys has the weight 0. lines: of each query, in parts of (..., V_SIZE) float32."""
    has_keys = total > 0
    inverse = tl.where(has_keys, 1.0 / tl.where(has_keys, total, 1.0), 0.0)
    places = out_ptr + lines[:, None] * V_SIZE
    columns, columns_2 = tl.arange(0, V_FIRST), V_FIRST + tl.arange(0, V_SECOND)
    is_stored = is_line[:, None] & (columns < V_SIZE)[None, :]
    tl.store(places + columns, sums * inverse[:, None], is_stored)
    if V_SIZE > V_FIRST:
        is_stored = is_line[:, None] & (columns_2 < V_SIZE)[None, :]
        tl.store(places + columns_2, sums_2 * inverse[:, None], is_stored)
    log_total = tl.log2(tl.where(has_keys, total, 1.0))
    lse = tl.where(has_keys, (best + log_total) / LOG2_E, float("-inf"))
    tl.store(lse_ptr + lines, lse, is_line)
