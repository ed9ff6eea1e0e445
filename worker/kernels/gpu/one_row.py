"""The product of one row with a matrix, of which every program reads some lines. See
`worker/kernels/one_row.py`."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator

LINES: Final = 4
MAX_BLOCK: Final = 1024
"""The best of ten settings for matrices of 4 to 200 MiB on an H200."""


@triton.jit
def _kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    weight_stride,
    num_lines,
    size,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):
    lines = tl.program_id(0) * LINES + tl.arange(0, LINES)
    is_line = lines < num_lines
    weight_lines = weight_ptr + tl.where(is_line, lines, 0).to(tl.int64)[:, None] * weight_stride
    sums = tl.zeros((LINES, BLOCK), tl.float32)
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        # The row is read once per line, from the cache: then each thread has what it multiplies.
        places = tl.zeros((LINES, BLOCK), tl.int32) + at[None, :]
        if HAS_TAIL:
            is_inside = (at < size)[None, :]
            weight = tl.load(weight_lines + places, mask=is_inside, other=0.0)
            x = tl.load(x_ptr + places, mask=is_inside, other=0.0)
        else:
            weight = tl.load(weight_lines + places)
            x = tl.load(x_ptr + places)
        sums += x.to(tl.float32) * weight.to(tl.float32)
    out = tl.sum(sums, axis=1)
    if HAS_BIAS:
        out += tl.load(bias_ptr + lines, mask=is_line, other=0.0).to(tl.float32)
    tl.store(out_ptr + lines, out.to(out_ptr.dtype.element_ty), is_line)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty((1, len(weight)), dtype=x.dtype, device=x.device)


@operator("one_row(Tensor x, Tensor weight, Tensor? bias) -> Tensor", fake=_fake)
def one_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See the wrapper. x: (1, columns). Both are contiguous within a line."""
    out, size = _fake(x, weight, bias), x.shape[1]
    block = min(triton.next_power_of_2(size), MAX_BLOCK)
    _kernel[(triton.cdiv(len(weight), LINES),)](
        x,
        weight,
        bias,
        out,
        weight.stride(0),
        len(weight),
        size,
        LINES=LINES,
        BLOCK=block,
        HAS_BIAS=bias is not None,
        HAS_TAIL=size % block != 0,
        num_warps=4,
    )
    return out
