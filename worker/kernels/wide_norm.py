"""Root mean square normalisation over all query heads, and over all key heads, of a token."""

from typing import NamedTuple

import torch
from torch import Tensor

from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.rms_norm import rms_norm


class WholeHeads(NamedTuple):
    """What a part of the heads of a token is normalised by.

    squares: (n, 2) float32, the sums of squares of queries and of keys over all ranks; may be
             overwritten. q_size, k_size: of how many elements.
    """

    squares: Tensor
    q_size: int
    k_size: int


def wide_norm(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    whole: WholeHeads | None = None,
) -> tuple[Tensor, Tensor]:
    """q, k: (n, width of all heads), each line contiguous; may be overwritten.
    q_weight, k_weight: (width,), in the dtype of the heads.
    whole: of which q and k are parts; None: they are all heads.

    Returns both, normalised. Each normalised value is rounded before it is multiplied by the
    weight.
    """
    if uses_triton(q):
        from longshore.worker.kernels.gpu import wide_norm as gpu

        squares, q_size, k_size = whole or (None, q.shape[1], k.shape[1])
        gpu.wide_norm(q, k, q_weight, k_weight, squares, q_size, k_size, eps)
        return q, k
    if whole is None:
        return rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q_mean, k_mean = (
        part.div_(size) for part, size in zip(whole.squares.split(1, dim=1), whole[1:], strict=True)
    )
    return (
        (q.float() * torch.rsqrt(q_mean.add_(eps))).to(q.dtype) * q_weight,
        (k.float() * torch.rsqrt(k_mean.add_(eps))).to(k.dtype) * k_weight,
    )


def sums_of_squares(q: Tensor, k: Tensor) -> Tensor:
    """q, k: as in `wide_norm` -> (n, 2) float32, to be summed over the ranks."""
    if uses_triton(q):
        from longshore.worker.kernels.gpu import wide_norm as gpu

        squares: Tensor = gpu.sums_of_squares(q, k)
        return squares
    return torch.stack([part.float().square().sum(1) for part in (q, k)], dim=1)
