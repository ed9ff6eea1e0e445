"""Root mean square normalisation (Zhang and Sennrich, 2019), computed in float32."""

import torch
from torch import Tensor


class RMSNorm:
    """weight: (size,)."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x: (..., size). Rounded to the model's dtype before the weight, as Llama was trained."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self.eps))
        return self.weight * (wide * scale).to(x.dtype)
