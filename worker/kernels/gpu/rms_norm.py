"""Root mean square normalisation, one program per line. See `worker/kernels/rms_norm.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator


@triton.jit
def _kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    size,
    x_stride,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < size
    x = tl.load(x_ptr + line * x_stride + columns, mask=is_inside, other=0.0)
    if HAS_RESIDUAL:
        places = residual_ptr + line * size + columns
        residual = tl.load(places, mask=is_inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(places, x, mask=is_inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0)
    normal = (wide * scale).to(weight.dtype).to(tl.float32)
    out = (normal * weight.to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + line * size + columns, out, mask=is_inside)


def _fake(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator(
    "rms_norm(Tensor x, Tensor(a!)? residual, Tensor weight, float eps) -> Tensor", fake=_fake
)
def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """x: (n, size), each line contiguous; residual: (n, size), contiguous. Returns (n, size)."""
    num_lines, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_lines == 0:
        return out
    block = triton.next_power_of_2(size)
    _kernel[(num_lines,)](
        x,
        residual,
        weight,
        out,
        size,
        x.stride(0),
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out
