"""RMS normalisation of the groups of a layer with states, before or after they are multiplied by
silu(gate), in float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels.operators import uses_triton


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    num_groups: int,
    eps: float,
    *,
    is_norm_first: bool = False,
) -> Tensor:
    """x:    (n, size) float32, contiguous; overwritten.
    gate:   (n, size), contiguous within a token.
    weight: (size,) float32, or (size / num_groups,), which all groups share.
    num_groups: equal parts of `size` that are normalised separately.
    is_norm_first: whether x is normalised before it is gated.
    Returns (n, size) in gate's dtype.
    """
    if uses_triton(x):
        from longshore.worker.kernels.gpu import gated_norm as gpu

        normal: Tensor = gpu.gated_norm(x, gate, weight, num_groups, eps, is_norm_first)
        return normal
    return reference(x, gate, weight, num_groups, eps, is_norm_first)


def reference(
    x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float, is_norm_first: bool
) -> Tensor:
    """Compute the same in plain torch."""
    factor = F.silu(gate.to(x.dtype))
    if not is_norm_first:
        x.mul_(factor)
    groups = x.unflatten(1, (num_groups, -1))
    squares = groups.square().mean(2, keepdim=True)
    groups.mul_(torch.rsqrt(squares.add_(eps)))
    groups.mul_(weight.view(-1, groups.shape[2]))
    if is_norm_first:
        x.mul_(factor)
    return x.to(gate.dtype)
