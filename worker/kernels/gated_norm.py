"""RMS normalisation of x * silu(gate) over each group of a Mamba layer, in float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels.operators import uses_triton


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float) -> Tensor:
    """x:    (n, size) float32, contiguous; overwritten.
    gate:   (n, size), contiguous within a token.
    weight: (size,) float32.
    num_groups: equal parts of `size` that are normalised separately.
    Returns (n, size) in gate's dtype.
    """
    if uses_triton(x):
        from longshore.worker.kernels.gpu import gated_norm as gpu

        normal: Tensor = gpu.gated_norm(x, gate, weight, num_groups, eps)
        return normal
    return reference(x, gate, weight, num_groups, eps)


def reference(x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float) -> Tensor:
    """Compute the same in plain torch."""
    groups = x.mul_(F.silu(gate.to(x.dtype))).unflatten(1, (num_groups, -1))
    squares = groups.square().mean(2, keepdim=True)
    groups.mul_(torch.rsqrt(squares.add_(eps)))
    return groups.flatten(1).mul_(weight).to(gate.dtype)
