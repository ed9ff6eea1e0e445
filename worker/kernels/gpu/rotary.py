"""Rotary positions and the norms of heads, in place: one program per token and tile of heads. See
`worker/kernels/rotary.py`. The KV write does the same before it stores (`write_kv.py`).

A head is three parts: the first elements of its pairs, the second ones, and the rest, which is not
rotated. So each element is read once, and neighbouring threads read neighbouring elements.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator

MAX_TILE_HEADS = 4


class HeadTiles(NamedTuple):
    """How heads are divided among programs. heads: of one program. first, rest: elements read of
    the first (and of the second) parts and of the rests, powers of two."""

    heads: int
    first: int
    rest: int
    num_warps: int


def head_tiles(num_heads: int, size: int, num_pairs: int) -> HeadTiles:
    """Tiles for up to `num_heads` heads of `size` elements, of which 2 * num_pairs are rotated."""
    heads = min(MAX_TILE_HEADS, triton.next_power_of_2(num_heads))
    return HeadTiles(
        heads,
        triton.next_power_of_2(max(num_pairs, 1)),
        triton.next_power_of_2(max(size - 2 * num_pairs, 1)),
        min(triton.next_power_of_2(max(heads * size // 256, 1)), 8),
    )


@triton.jit
def _normal(x, scale, weight_ptr, columns, is_column, DTYPE: tl.constexpr):
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    x = (x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def load_heads(
    lines,
    is_head,
    norm_ptr,
    angles_ptr,
    eps,
    SIZE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """The three parts of a tile of heads in float32, normalised and rotated.

    lines, is_head: (HEADS, 1), where heads begin and whether they exist. angles_ptr: the token's
    line of the table; not read if NUM_PAIRS is 0.
    """
    dtype: tl.constexpr = lines.dtype.element_ty
    pairs, others = tl.arange(0, BLOCK_P)[None, :], tl.arange(0, BLOCK_R)[None, :]
    is_pair, is_other = pairs < NUM_PAIRS, others < SIZE - 2 * NUM_PAIRS
    if NUM_PAIRS > 0:
        first = tl.load(lines + pairs, mask=is_head & is_pair, other=0.0).to(tl.float32)
        second = tl.load(lines + NUM_PAIRS + pairs, mask=is_head & is_pair, other=0.0)
        second = second.to(tl.float32)
    else:
        first = tl.zeros((HEADS, BLOCK_P), tl.float32)
        second = first
    if SIZE > 2 * NUM_PAIRS:
        places = lines + 2 * NUM_PAIRS + others
        rest = tl.load(places, mask=is_head & is_other, other=0.0).to(tl.float32)
    else:
        rest = tl.zeros((HEADS, BLOCK_R), tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, axis=1) + tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / SIZE + eps)[:, None]
        first = _normal(first, scale, norm_ptr, pairs, is_pair, dtype)
        second = _normal(second, scale, norm_ptr + NUM_PAIRS, pairs, is_pair, dtype)
        rest = _normal(rest, scale, norm_ptr + 2 * NUM_PAIRS, others, is_other, dtype)
    if NUM_PAIRS > 0:
        cos = tl.load(angles_ptr + pairs, mask=is_pair, other=1.0)
        sin = tl.load(angles_ptr + NUM_PAIRS + pairs, mask=is_pair, other=0.0)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    return first, second, rest


@triton.jit
def store_heads(
    lines,
    is_head,
    first,
    second,
    rest,
    SIZE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Store the three parts of a tile of heads."""
    dtype = lines.dtype.element_ty
    pairs, others = tl.arange(0, BLOCK_P)[None, :], tl.arange(0, BLOCK_R)[None, :]
    if NUM_PAIRS > 0:
        is_stored = is_head & (pairs < NUM_PAIRS)
        tl.store(lines + pairs, first.to(dtype), mask=is_stored)
        tl.store(lines + NUM_PAIRS + pairs, second.to(dtype), mask=is_stored)
    if SIZE > 2 * NUM_PAIRS:
        is_stored = is_head & (others < SIZE - 2 * NUM_PAIRS)
        tl.store(lines + 2 * NUM_PAIRS + others, rest.to(dtype), mask=is_stored)


@triton.jit
def rotate_in_place(
    heads_ptr,
    tile,
    num_heads,
    norm_ptr,
    angles_ptr,
    eps,
    SIZE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """A tile of the heads of one token, which are contiguous."""
    heads = tile * HEADS + tl.arange(0, HEADS)[:, None]
    lines, is_head = heads_ptr + heads * SIZE, heads < num_heads
    first, second, rest = load_heads(
        lines,
        is_head,
        norm_ptr,
        angles_ptr,
        eps,
        SIZE,
        NUM_PAIRS,
        HEADS,
        BLOCK_P,
        BLOCK_R,
        HAS_NORM,
    )
    tl.debug_barrier()  # where threads share an element, all have read it
    # Without a norm, the rest is unchanged.
    END: tl.constexpr = SIZE if HAS_NORM else 2 * NUM_PAIRS
    store_heads(lines, is_head, first, second, rest, END, NUM_PAIRS, BLOCK_P, BLOCK_R)


@triton.jit
def _kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    table_ptr,
    q_norm_ptr,
    k_norm_ptr,
    num_heads,
    num_kv_heads,
    q_stride,
    k_stride,
    eps,
    SIZE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
):
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles_ptr = table_ptr + tl.load(positions_ptr + token) * (2 * NUM_PAIRS)
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
    else:
        rotate_in_place(
            k_ptr + token * k_stride,
            tile - num_q_tiles,
            num_kv_heads,
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


def _fake(*_: object) -> None:
    return None


@operator(
    "rotary(Tensor(a!) q, Tensor(b!) k, Tensor positions, Tensor table, Tensor? q_norm, "
    "Tensor? k_norm, float eps) -> ()",
    fake=_fake,
)
def rotary(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    table: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    """See `rotary_`."""
    num_tokens, num_heads, size = q.shape
    num_kv_heads, num_pairs = k.shape[1], table.shape[2]
    if num_tokens == 0:
        return
    tiles = head_tiles(max(num_heads, num_kv_heads), size, num_pairs)
    num_tiles = triton.cdiv(num_heads, tiles.heads) + triton.cdiv(num_kv_heads, tiles.heads)
    _kernel[(num_tokens, num_tiles)](
        q,
        k,
        positions,
        table,
        q_norm,
        k_norm,
        num_heads,
        num_kv_heads,
        q.stride(0),
        k.stride(0),
        eps,
        SIZE=size,
        NUM_PAIRS=num_pairs,
        HEADS=tiles.heads,
        BLOCK_P=tiles.first,
        BLOCK_R=tiles.rest,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        num_warps=tiles.num_warps,
    )
