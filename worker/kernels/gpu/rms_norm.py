"""Root mean square normalisation, one program per line. See `worker/kernels/rms_norm.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator


@triton.jit
def normal(x, scale, weight_ptr, columns, is_inside):
    """x * scale, rounded to the weight's dtype, times the weight; float32."""
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0)
    return (x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def _kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    first_weight_ptr,
    added_ptr,
    out_ptr,
    size,
    x_stride,
    eps,
    HAS_FIRST: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < size
    x = tl.load(x_ptr + line * x_stride + columns, mask=is_inside, other=0.0)
    dtype = x.dtype
    places = line * size + columns
    if HAS_FIRST:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
        x = normal(wide, scale, first_weight_ptr, columns, is_inside).to(dtype)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + places, mask=is_inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(residual_ptr + places, x, mask=is_inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    out = normal(wide, scale, weight_ptr, columns, is_inside).to(dtype)
    if HAS_ADDED:
        added = tl.load(added_ptr + places, mask=is_inside, other=0.0)
        out = (out.to(tl.float32) + added.to(tl.float32)).to(dtype)
    tl.store(out_ptr + places, out, mask=is_inside)


def _fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    first_weight: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator(
    "rms_norm(Tensor x, Tensor(a!)? residual, Tensor weight, float eps, "
    "Tensor? first_weight=None, Tensor? added=None) -> Tensor",
    fake=_fake,
)
def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    first_weight: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """x: (n, size), each line contiguous; residual, added: (n, size), contiguous.

    Returns (n, size): x is normalised with first_weight and added to the residual, the sum is
    normalised, and `added` is added. What is None is left out.
    """
    num_lines, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_lines == 0:
        return out
    block = triton.next_power_of_2(size)
    _kernel[(num_lines,)](
        x,
        residual,
        weight,
        first_weight,
        added,
        out,
        size,
        x.stride(0),
        eps,
        HAS_FIRST=first_weight is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_ADDED=added is not None,
        BLOCK=block,
        num_warps=num_warps(block),
    )
    return out


def num_warps(block: int) -> int:
    """Number of warps of a program that reads a line of `block` elements."""
    return min(max(block // 512, 1), 16)
