"""Rows rounded to FP8 for products with matrices in FP8. See `worker/kernels/device_matrix.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator

FP8_MAX: tl.constexpr = tl.constexpr(448.0)
SPANS: tl.constexpr = tl.constexpr(8)


@triton.jit
def _kernel(
    x_ptr, codes_ptr, scales_ptr, num_spans, stride, SPAN: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    spans = tl.program_id(1) * SPANS + tl.arange(0, SPANS)
    inputs = tl.arange(0, BLOCK)
    at = spans[:, None] * SPAN + inputs[None, :]
    is_input = (spans[:, None] < num_spans) & (inputs[None, :] < SPAN)
    x = tl.load(x_ptr + row * stride + at, mask=is_input, other=0.0).to(tl.float32)
    scales = tl.max(tl.abs(x), axis=1) / FP8_MAX
    scales = tl.where(scales == 0.0, 1.0, scales)
    # The quotient may be a little more than the largest number. The comparisons keep NaN.
    x = x / scales[:, None]
    x = tl.where(x > FP8_MAX, FP8_MAX, tl.where(x < -FP8_MAX, -FP8_MAX, x))
    codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes_ptr + row * (num_spans * SPAN) + at, codes, mask=is_input)
    tl.store(scales_ptr + row * num_spans + spans, scales, mask=spans < num_spans)


def _fake(x: Tensor, span: int) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    return (
        torch.empty(rows, size, dtype=torch.uint8, device=x.device),
        torch.empty(rows, size // span, dtype=torch.float32, device=x.device),
    )


def launch(x: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """See `round_rows`."""
    codes, scales = _fake(x, span)
    num_rows, num_spans = scales.shape
    if num_rows > 0:
        _kernel[(num_rows, triton.cdiv(num_spans, SPANS.value))](
            x,
            codes,
            scales,
            num_spans,
            x.stride(0),
            SPAN=span,
            BLOCK=triton.next_power_of_2(span),
            num_warps=4,
        )
    return codes, scales


@operator("round_rows(Tensor x, int span) -> (Tensor, Tensor)", fake=_fake)
def round_rows(x: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """x: (n, size), each line contiguous. Returns codes (n, size), uint8, as float8_e4m3fn, and
    scales (n, size / span), float32: x is about code * scale."""
    return launch(x, span)
