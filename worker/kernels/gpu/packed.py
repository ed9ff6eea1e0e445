"""Tiles of weights from matrices in the formats of quantised files, in registers. See
`worker/kernels/device_matrix.py`, also for the arguments.

A run is 16 inputs whose codes are adjacent in memory and that have one scale. Codes of four bits
are two runs in one run of bytes, which a product takes one after the other: its parts.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

RUN: Final = tl.constexpr(16)


def inputs_of_tile(most: int, span: int) -> int:
    """Of a tile of a product of FP8 with FP8, which has one scale per line: a power of two."""
    return min(most, span & -span)


def constants_of(
    matrix: Tensor, scales: Tensor | None, bits: int, coding: int, size: int
) -> tuple[int, int, int, int]:
    """PARTS, SPAN (inputs with one scale), MIDDLE (the middle code) and CODING.

    matrix: floats, with coding -1, or the codes of a DeviceMatrix; size: inputs of a row.
    """
    if scales is None:
        return 1, size, 0, -1
    return size // matrix.shape[1], size // scales.shape[1], 1 << bits - 1, coding


@triton.jit
def columns_of(first, part, PARTS: tl.constexpr, COUNT: tl.constexpr):
    """The inputs of a part of a tile: (COUNT,)."""
    inputs = tl.arange(0, COUNT)
    if PARTS == 1:
        return first + inputs
    return first + inputs // RUN * (RUN * PARTS) + part * RUN + inputs % RUN


@triton.jit
def codes_of(
    codes_ptr, lines, first, size, PARTS: tl.constexpr, COUNT: tl.constexpr, HAS_TAIL: tl.constexpr
):
    """The bytes with the codes of COUNT inputs per part, of rows: (runs, RUN, outputs)."""
    runs = first // (RUN * PARTS) + tl.arange(0, COUNT // RUN)
    at = runs[:, None, None] * RUN + tl.arange(0, RUN)[None, :, None]
    places = codes_ptr + lines.to(tl.int64)[None, None, :] * (size // PARTS) + at
    if HAS_TAIL:
        is_code = runs[:, None, None] * (RUN * PARTS) < size
        return tl.load(places, mask=is_code, other=0).to(tl.int32)
    return tl.load(places).to(tl.int32)


@triton.jit
def weights_of(
    codes,
    part,
    scales_ptr,
    offsets_ptr,
    lines,
    first,
    size,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    MIDDLE: tl.constexpr,
    CODING: tl.constexpr,
    COUNT: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):
    """The weights of a part of a tile: (COUNT, outputs), float32. codes: of `codes_of`."""
    begins = first + tl.arange(0, COUNT // RUN) * (RUN * PARTS) + part * RUN
    if HAS_TAIL:
        begins = tl.where(begins < size, begins, 0)
    groups = lines.to(tl.int64)[None, :] * (size // SPAN) + (begins // SPAN)[:, None]
    scales = tl.load(scales_ptr + groups).to(tl.float32)[:, None, :]
    if PARTS == 2:
        codes = (codes >> (part * 4)) & 15
    if CODING == 0:
        values = (codes - MIDDLE).to(tl.float32) * scales
    elif CODING == 1:
        zeros = tl.load(offsets_ptr + groups).to(tl.int32)[:, None, :]
        values = (codes - zeros).to(tl.float32) * scales
    elif CODING == 2:
        offsets = tl.load(offsets_ptr + groups).to(tl.float32)[:, None, :]
        values = codes.to(tl.float32) * scales + offsets
    elif CODING == 3:
        # E2M1: two exponent bits and one of the fraction, in halves.
        magnitude = codes & 7
        shifted = (2 + (magnitude & 1)) << tl.maximum((magnitude >> 1) - 1, 0)
        halves = tl.where(magnitude < 2, magnitude, shifted)
        values = tl.where(codes > 7, -halves, halves).to(tl.float32) * (0.5 * scales)
    else:
        # E4M3: the bits of a float32, whose exponent has another bias, or a subnormal number.
        magnitude = codes & 127
        normal = ((magnitude + (120 << 3)) << 20).to(tl.float32, bitcast=True)
        numbers = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        numbers = tl.where(magnitude == 127, float("nan"), numbers)
        values = tl.where(codes > 127, -numbers, numbers) * scales
    return tl.reshape(values, (COUNT, lines.shape[0]))


@triton.jit
def add_product_of_fp8(
    total,
    x_lines,
    x_scale_lines,
    codes_ptr,
    scales_ptr,
    lines,
    first,
    size,
    SPAN: tl.constexpr,
    COUNT: tl.constexpr,
):
    """total + the product of COUNT inputs of rows, of which both sides are FP8. COUNT divides SPAN.

    x_lines: (rows, 1), to codes of `round_rows`; x_scale_lines: (rows,). So few inputs are added in
    the tensor cores, where sums of FP8 have less bits than a float32.
    """
    at = first + tl.arange(0, COUNT)
    x = tl.load(x_lines + at[None, :]).to(tl.float8e4nv, bitcast=True)
    codes = tl.load(codes_ptr + lines.to(tl.int64)[None, :] * size + at[:, None])
    product = tl.dot(x, codes.to(tl.float8e4nv, bitcast=True))
    group = first // SPAN
    scales = tl.load(scales_ptr + lines.to(tl.int64) * (size // SPAN) + group)
    return total + product * tl.load(x_scale_lines + group)[:, None] * scales[None, :]
