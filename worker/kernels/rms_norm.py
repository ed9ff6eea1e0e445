"""Root mean square normalisation (Zhang and Sennrich, 2019), optionally after adding to a residual.

The normalised value is rounded to the weight's dtype before it is multiplied by the weight: to the
model's dtype, as in Llama, or not at all, as in Gemma.
"""

import torch
from torch import Tensor

from longshore.worker.kernels.native import RMS_NORM, empty, kernels_for, num_threads
from longshore.worker.kernels.operators import uses_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, added: Tensor | None = None) -> Tensor:
    """x: (..., size), each vector contiguous -> a new tensor of the same shape.

    weight: (size,), of x's dtype or float32, on its device.
    added:  contiguous, with x's shape and dtype; added to the result.
    Raises ValueError for arguments of a wrong shape or dtype.
    """
    _check(x, weight, added)
    if uses_triton(x):
        return _in_triton(x, None, weight, eps, None, added)
    normal = _normalise(x, None, weight, eps)
    return normal if added is None else normal.add_(added)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, first_weight: Tensor | None = None
) -> Tensor:
    """residual += x, in place; returns the new residual, normalised.

    x, weight: as in `rms_norm`; residual: contiguous, with x's shape and dtype.
    first_weight: like weight; x is normalised with it before it is added.
    """
    _check(x, weight, residual)
    if first_weight is not None:
        _check(x, first_weight, None)
    if uses_triton(x):
        return _in_triton(x, residual, weight, eps, first_weight, None)
    if first_weight is not None:
        x = _normalise(x, None, first_weight, eps)
    return _normalise(x, residual, weight, eps)


def _check(x: Tensor, weight: Tensor, other: Tensor | None) -> None:
    """other: the residual, or what is added."""
    size = x.shape[-1]
    if other is not None and (
        other.shape != x.shape or other.dtype != x.dtype or not other.is_contiguous()
    ):
        raise ValueError(
            f"the residual, {other.dtype} {tuple(other.shape)} with strides "
            f"{other.stride()}, must be contiguous {x.dtype} {tuple(x.shape)}, like x"
        )
    if weight.shape != (size,) or weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(
            f"the weight is {weight.dtype} {tuple(weight.shape)}, but x is {x.dtype} "
            f"{tuple(x.shape)}; the weight must be {x.dtype} or torch.float32 ({size},)"
        )


def _lines(x: Tensor) -> Tensor:
    return x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1])


def _in_triton(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    first_weight: Tensor | None,
    added: Tensor | None,
) -> Tensor:
    from longshore.worker.kernels.gpu import rms_norm as gpu

    normal: Tensor = gpu.rms_norm(_lines(x), residual, weight, eps, first_weight, added)
    return normal.view(x.shape)


def _normalise(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    kernels = kernels_for(x)
    if kernels is None:
        return reference(x, residual, weight, eps, torch.empty_like(x))
    lines, size = _lines(x), x.shape[-1]
    out = empty(x.shape, x.dtype)
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
    """Compute the same in plain torch, written to `out`, which may be x."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return out.copy_(weight * (wide * scale).to(weight.dtype))
