"""Draws from settings as a request has them."""

import torch
from torch import Tensor

from longshore.worker.kernels.draw_tokens import FRACTION_BITS
from longshore.worker.sampling.sampler import Draws


def make_draws(
    u: Tensor,
    *,
    rows: Tensor | None = None,
    temperature: Tensor | float = 1.0,
    top_k: Tensor | int = 0,
    top_p: Tensor | float = 1.0,
    min_p: Tensor | float = 0.0,
) -> Draws:
    """u: (n,) in [0, 1). A number is that of all n rows."""

    def column(values: Tensor | float, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=dtype).expand(len(u)).contiguous()

    def fractions(values: Tensor | float) -> Tensor:
        return (column(values, torch.float64) * 2.0**FRACTION_BITS).long()

    return Draws(
        rows=torch.arange(len(u)) if rows is None else rows,
        top_k=column(top_k, torch.int64),
        top_p=fractions(top_p),
        u=fractions(u),
        temperature=column(temperature, torch.float32),
        min_p=column(min_p, torch.float32),
        has_min_p=bool((column(min_p, torch.float32) > 0).any()),
    )
