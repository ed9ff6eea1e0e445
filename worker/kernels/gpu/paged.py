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
def load_tile(pointers, is_read, DTYPE: tl.constexpr, IS_FP8: tl.constexpr):
    """A tile of keys, values or queries in DTYPE, 0 where it is not read."""
    if IS_FP8:
        bits = tl.load(pointers, mask=is_read, other=0)
        tile = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(DTYPE)
    else:
        tile = tl.load(pointers, mask=is_read, other=0.0)
    return tile


@triton.jit
def key_offsets(
    table_ptr,
    positions,
    is_key,
    block_stride,
    token_stride,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Offsets in the cache of the keys at `positions`, which are TILE neighbours from a multiple
    of TILE on. table_ptr: the sequence's line of the block table."""
    if BLOCK_SIZE % TILE == 0:  # all in one block
        first = tl.min(positions, axis=0)
        blocks = tl.load(table_ptr + first // BLOCK_SIZE).to(tl.int64)
    else:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    return blocks * block_stride + (positions % BLOCK_SIZE).to(tl.int64) * token_stride


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap), which is softcap from 20 on."""
    ratio = tl.minimum(tl.maximum(scores / softcap, -20.0), 20.0)
    return softcap * (1.0 - 2.0 / (tl.exp(2.0 * ratio) + 1.0))
