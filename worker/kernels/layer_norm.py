"""Layer normalisation (Ba et al., 2016) after adding to a residual."""

import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels.operators import uses_triton


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """residual += x, in place; returns the new residual, normalised, in float32 and rounded once.

    x: (n, size), each line contiguous; residual: the same, contiguous; weight, bias: (size,).
    """
    if uses_triton(x):
        from longshore.worker.kernels.gpu import layer_norm as gpu

        normal: Tensor = gpu.layer_norm(x, residual, weight, bias, eps)
        return normal
    return F.layer_norm(residual.add_(x), weight.shape, weight, bias, eps)
