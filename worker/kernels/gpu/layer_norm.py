"""Layer normalisation, one program per line. See `worker/kernels/layer_norm.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.gpu.rms_norm import num_warps
from longshore.worker.kernels.operators import operator


@triton.jit
def _kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
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
    dtype = x.dtype
    places = line * size + columns
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + places, mask=is_inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(residual_ptr + places, x, mask=is_inside)
    wide = x.to(tl.float32)
    centred = tl.where(is_inside, wide - tl.sum(wide, axis=0) / size, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, (centred * scale * weight + bias).to(dtype), mask=is_inside)


def _fake(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator(
    "layer_norm(Tensor x, Tensor(a!)? residual, Tensor weight, Tensor bias, float eps) -> Tensor",
    fake=_fake,
)
def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
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
        bias,
        out,
        size,
        x.stride(0),
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=num_warps(block),
    )
    return out
