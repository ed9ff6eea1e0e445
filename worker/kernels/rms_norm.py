"""Root mean square normalisation (Zhang and Sennrich, 2019), alone or of a residual stream.

The normalised value is rounded to the weight's dtype before it: to the model's, as Llama was
trained, or not at all, as Gemma was.
"""

import torch
from torch import Tensor

from longshore.worker.kernels.native import RMS_NORM, empty, kernels_for, num_threads


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """x: (..., size), each vector's elements adjacent -> the same shape.

    weight: (size,), of x's dtype or float32, on its device.
    out:    contiguous, of x's shape; may be x itself. None makes a new tensor.
    Raises ValueError for what does not fit.
    """
    return _normalise(x, None, weight, eps, out)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
) -> Tensor:
    """residual += x, in place; returns the new residual, normalised.

    x, residual, weight, out: as in `rms_norm`; residual is contiguous and like x.
    """
    if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous():
        raise ValueError(
            f"the residual, {residual.dtype} {tuple(residual.shape)} with strides "
            f"{residual.stride()}, must be contiguous and like x, {x.dtype} {tuple(x.shape)}"
        )
    return _normalise(x, residual, weight, eps, out)


def _normalise(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None
) -> Tensor:
    size = x.shape[-1]
    if weight.shape != (size,) or weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(
            f"the weight is {weight.dtype} {tuple(weight.shape)}, but x, {x.dtype} "
            f"{tuple(x.shape)}, needs one of {x.dtype} ({size},), or of float32"
        )
    kernels = kernels_for(x)
    if out is None:
        out = torch.empty_like(x) if kernels is None else empty(x.shape, x.dtype)
    elif out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {x.dtype} {tuple(x.shape)}")
    if kernels is None:
        return reference(x, residual, weight, eps, out)
    lines = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, size)
    num_rows = len(lines)
    kernels.run(
        "rms_norm",
        x.dtype,
        RMS_NORM.pack(
            lines.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            num_rows,
            size,
            lines.stride(0),
            size,
            size,
            eps,
            weight.dtype == torch.float32,
            num_threads(num_rows * size * x.element_size()),
        ),
    )
    return out


def reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor
) -> Tensor:
    """The same in plain torch."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return out.copy_(weight * (wide * scale).to(weight.dtype))
