"""The product of rows with a matrix whose codes become values in registers. See
`worker/kernels/device_matrix.py`, also for the arguments."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.gpu.packed import (
    add_product_of_fp8,
    codes_of,
    columns_of,
    constants_of,
    inputs_of_tile,
    weights_of,
)
from longshore.worker.kernels.operators import operator


# Numbers of rows are not specialised: a multiple of 16 would be compiled anew.
@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    size,
    x_stride,
    out_stride,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    MIDDLE: tl.constexpr,
    CODING: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Neighbouring programs compute rows with the same outputs, whose codes are in the L2 cache.
    program, num_tiles = tl.program_id(0), tl.cdiv(num_rows, BLOCK_M)
    num_columns = tl.cdiv(num_outputs, BLOCK_N)
    group = program // (GROUP * num_columns)
    height = tl.minimum(num_tiles - group * GROUP, GROUP)
    place = program - group * GROUP * num_columns
    rows = (group * GROUP + place % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = place // height * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    # Rows and outputs beyond the end compute something valid, which is not stored.
    lines = tl.where(is_output, outputs, 0)
    x_rows = tl.where(is_row, rows, 0).to(tl.int64)
    x_lines = x_ptr + x_rows[:, None] * x_stride
    COUNT: tl.constexpr = BLOCK_K // PARTS
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, size, BLOCK_K):
        if IS_ROUNDED:
            x_scale_lines = x_scales_ptr + x_rows * (size // SPAN)
            total = add_product_of_fp8(
                total, x_lines, x_scale_lines, codes_ptr, scales_ptr, lines, first, size,
                SPAN, COUNT,
            )  # fmt: skip
        else:
            codes = codes_of(codes_ptr, lines, first, size, PARTS, COUNT, HAS_TAIL)
            for part in tl.static_range(PARTS):
                weights = weights_of(
                    codes, part, scales_ptr, offsets_ptr, lines, first, size,
                    PARTS, SPAN, MIDDLE, CODING, COUNT, HAS_TAIL,
                )  # fmt: skip
                columns = columns_of(first, part, PARTS, COUNT)[None, :]
                if HAS_TAIL:
                    x = tl.load(x_lines + columns, mask=columns < size, other=0.0)
                else:
                    x = tl.load(x_lines + columns)
                total = tl.dot(x, weights.to(x.dtype), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias_ptr + lines).to(tl.float32)[None, :]
    places = rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    is_inside = is_row[:, None] & is_output[None, :]
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=is_inside)


class _Tiling(NamedTuple):
    """Rows, outputs and inputs of a tile, and how it is computed."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def _tiling(num_rows: int, dtype: torch.dtype) -> _Tiling:
    rows = min(max(triton.next_power_of_2(num_rows), 16), 128)
    if dtype == torch.float32:  # without tensor cores: registers and shared memory limit the tile
        return _Tiling(min(rows, 64), 32, 32, 4, 2)
    match rows:
        case 16:  # narrow, so that a few outputs occupy all multiprocessors
            return _Tiling(16, 32, 128, 4, 4)
        case 32:
            return _Tiling(32, 64, 128, 4, 3)
        case 64:
            return _Tiling(64, 64, 64, 4, 3)
        case _:
            return _Tiling(128, 128, 64, 8, 3)


def _fake(
    x: Tensor,
    x_scales: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    bits: int,
    coding: int,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    pass


@operator(
    "packed_linear(Tensor x, Tensor? x_scales, Tensor codes, Tensor scales, Tensor? offsets, "
    "int bits, int coding, Tensor? bias, Tensor(a!) out) -> ()",
    fake=_fake,
)
def packed_linear(
    x: Tensor,
    x_scales: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    bits: int,
    coding: int,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """out = x M^T + bias. x: (n, inputs), out: (n, outputs), each line contiguous; or x and
    x_scales as `round_rows` makes them, with the span of a matrix in FP8."""
    (num_rows, size), num_outputs = x.shape, len(codes)
    if num_rows == 0:
        return
    tiling, constants = _tiling(num_rows, x.dtype), constants_of(codes, scales, bits, coding, size)
    inputs = tiling.inputs if x_scales is None else inputs_of_tile(tiling.inputs, constants[1])
    num_tiles = triton.cdiv(num_rows, tiling.rows) * triton.cdiv(num_outputs, tiling.outputs)
    _kernel[(num_tiles,)](
        x,
        x_scales,
        codes,
        scales,
        offsets,
        bias,
        out,
        num_rows,
        num_outputs,
        size,
        x.stride(0),
        out.stride(0),
        *constants,
        IS_ROUNDED=x_scales is not None,
        HAS_BIAS=bias is not None,
        HAS_TAIL=size % inputs != 0,
        GROUP=8,
        BLOCK_M=tiling.rows,
        BLOCK_N=tiling.outputs,
        BLOCK_K=inputs,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
