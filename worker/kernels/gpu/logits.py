"""Logits in float32, scaled and capped, one program per line and span of the vocabulary. See
`worker/kernels/logits.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator

BLOCK = 2048


@triton.jit
def _kernel(x_ptr, out_ptr, size, stride, scale, cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < size
    x = tl.load(x_ptr + row * stride + columns, mask=is_inside, other=0.0).to(tl.float32) * scale
    if HAS_CAP:
        small = tl.exp(-2.0 * tl.abs(x / cap))  # never infinite; NaN stays
        tanh = (1.0 - small) / (1.0 + small)
        x = tl.where(x < 0, -cap, cap) * tanh
    tl.store(out_ptr + row * size + columns, x, mask=is_inside)


def _fake(x: Tensor, size: int, scale: float, cap: float | None) -> Tensor:
    return torch.empty((len(x), size), dtype=torch.float32, device=x.device)


@operator("logits(Tensor x, int size, float scale, float? cap) -> Tensor", fake=_fake)
def logits(x: Tensor, size: int, scale: float, cap: float | None) -> Tensor:
    """x: (n, at least size), each line contiguous -> (n, size) float32."""
    out = _fake(x, size, scale, cap)
    if len(x) == 0:
        return out
    _kernel[(len(x), triton.cdiv(size, BLOCK))](
        x,
        out,
        size,
        x.stride(0),
        scale,
        cap or 1.0,
        HAS_CAP=cap is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return out
