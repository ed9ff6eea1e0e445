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


def value_parts_of(values: Tensor) -> Parts:
    """The parts in which `visit` returns sums of values: of fp8, those of even and of odd elements,
    otherwise as of keys."""
    size = values.shape[3]
    if values.dtype != torch.float8_e4m3fn:
        return parts_of(size)
    half = max(MIN_PART, triton.next_power_of_2(size // 2))
    return Parts(size, half, half)


def as_bytes(cache: Tensor) -> Tensor:
    """fp8 as bytes, which kernels convert themselves: not all of Triton's versions read a masked
    fp8 tensor."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def readable(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """What `visit` reads. Values in fp8 are read in pairs, because an operand that is multiplied
    along its lines has no fast way through shared memory if its elements are bytes."""
    is_fp8 = values.dtype == torch.float8_e4m3fn
    return as_bytes(keys), values.view(torch.int16) if is_fp8 else values


@triton.jit
def load_tile(
    pointers,
    is_row,
    columns,
    SIZE: tl.constexpr,
    END: tl.constexpr,
    IS_FP8: tl.constexpr,
    ALL_ROWS: tl.constexpr = False,
):
    """A tile of keys, values or queries, or of integers if IS_FP8, 0 where it is not read: in rows
    that are not `is_row`, unless ALL_ROWS, and in columns from SIZE on, if END, their end, exceeds
    it."""
    if ALL_ROWS and END <= SIZE:
        tile = tl.load(pointers)
    else:
        is_read = (columns < SIZE)[None, :]
        if not ALL_ROWS:
            is_read = is_row[:, None] & is_read
        tile = tl.load(pointers, mask=is_read, other=0 if IS_FP8 else 0.0)
    return tile


@triton.jit
def from_fp8(tile, DTYPE: tl.constexpr):
    """Integers whose lowest bytes are fp8, as float16 or float32, which hold every such number."""
    return tile.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)


@triton.jit
def load_queries(
    places,
    is_query,
    SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """The two parts of queries that begin at `places`, (lines, 1), and by what `visit` multiplies
    their scores. Over keys in fp8, bfloat16 queries become float16 of at most 1: the GPU converts
    a pair of fp8 numbers to float16 in one instruction, and to bfloat16 in four."""
    columns, columns_2 = tl.arange(0, FIRST), FIRST + tl.arange(0, SECOND)
    q = load_tile(places + columns, is_query, columns, SIZE, FIRST, False)
    q_2 = q
    if SIZE > FIRST:
        end: tl.constexpr = FIRST + SECOND
        q_2 = load_tile(places + columns_2, is_query, columns_2, SIZE, end, False)
    limits = tl.full(is_query.shape, 1.0, tl.float32)
    if IS_FP8 and places.dtype.element_ty == tl.bfloat16:
        q, q_2 = q.to(tl.float32), q_2.to(tl.float32)
        limits = tl.max(tl.abs(q), axis=1)
        if SIZE > FIRST:
            limits = tl.maximum(limits, tl.max(tl.abs(q_2), axis=1))
        limits = tl.where(limits > 0, limits, 1.0)
        q, q_2 = (q / limits[:, None]).to(tl.float16), (q_2 / limits[:, None]).to(tl.float16)
    return q, q_2, limits


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap), which is softcap from 20 on."""
    ratio = tl.minimum(tl.maximum(scores / softcap, -20.0), 20.0)
    return softcap * (1.0 - 2.0 / (tl.exp(2.0 * ratio) + 1.0))


@triton.jit
def visit(
    q,
    q_2,
    limits,
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
    v_block_stride,
    v_token_stride,
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
    limits:    factors on the scores of each query, if the keys are in fp8.
    v_block_stride, v_token_stride: of values in fp8; others have those of keys.
    best:      the highest score of each query so far, in powers of two.
    total, sums, sums_2: the sums of weights and of weighted values, relative to `best`. The two
               parts of values are those of `value_parts_of`.
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
        k = load_tile(k_places + columns, is_key, columns, SIZE, FIRST, IS_FP8, not IS_MASKED)
        if IS_FP8:
            k = from_fp8(k, dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SIZE > FIRST:
            k_2 = load_tile(
                k_places + columns_2,
                is_key,
                columns_2,
                SIZE,
                FIRST + SECOND,
                IS_FP8,
                not IS_MASKED,
            )
            if IS_FP8:
                k_2 = from_fp8(k_2, dtype)
            scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision=PRECISION)
        if IS_FP8:
            scores *= limits[:, None]
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
            if IS_FP8:
                offsets = blocks.to(tl.int64) * v_block_stride
                offsets += positions % BLOCK_SIZE * v_token_stride
            v_places = v_ptr + offsets[:, None]
            v_size: tl.constexpr = V_SIZE // 2 if IS_FP8 else V_SIZE
            v = load_tile(
                v_places + v_columns,
                is_key,
                v_columns,
                v_size,
                V_FIRST,
                IS_FP8,
                not IS_MASKED,
            )
        if IS_FP8:  # pairs
            v_2 = from_fp8(v >> 8, dtype)
            v = from_fp8(v, dtype)
        elif V_SIZE > V_FIRST:
            v_2 = load_tile(
                v_places + v_columns_2,
                is_key,
                v_columns_2,
                V_SIZE,
                V_FIRST + V_SECOND,
                False,
                not IS_MASKED,
            )
        sums = tl.dot(weights, v, sums * decay[:, None], input_precision=PRECISION)
        if IS_FP8 or V_SIZE > V_FIRST:
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
    IS_FP8: tl.constexpr,
    factor=1.0,
):
    """Store the result of `visit` times `factor`, as one of the parts that `add_splits` adds up, or
    if there are no others, as the whole. A part without keys has the weight 0.
    lines: of each query, in parts of (..., V_SIZE)."""
    has_keys = total > 0
    inverse = tl.where(has_keys, factor / tl.where(has_keys, total, 1.0), 0.0)
    store_sums(
        out_ptr + lines[:, None] * V_SIZE,
        is_line,
        sums * inverse[:, None],
        sums_2 * inverse[:, None],
        V_SIZE,
        V_FIRST,
        V_SECOND,
        IS_FP8,
    )
    log_total = tl.log2(tl.where(has_keys, total, 1.0))
    lse = tl.where(has_keys, (best + log_total) / LOG2_E, float("-inf"))
    tl.store(lse_ptr + lines, lse, is_line)


@triton.jit
def store_sums(
    places,
    is_line,
    sums,
    sums_2,
    V_SIZE: tl.constexpr,
    V_FIRST: tl.constexpr,
    V_SECOND: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Store both parts of sums of values, as whole heads that begin at `places`, (lines, 1)."""
    dtype = places.dtype.element_ty
    if IS_FP8:
        sums = tl.interleave(sums, sums_2)
    end: tl.constexpr = 2 * V_FIRST if IS_FP8 else V_FIRST
    columns = tl.arange(0, end)
    tl.store(places + columns, sums.to(dtype), is_line[:, None] & (columns < V_SIZE)[None, :])
    if end < V_SIZE:
        columns_2 = V_FIRST + tl.arange(0, V_SECOND)
        is_stored = is_line[:, None] & (columns_2 < V_SIZE)[None, :]
        tl.store(places + columns_2, sums_2.to(dtype), is_stored)
