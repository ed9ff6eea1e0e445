"""Root mean square normalisation (Zhang and Sennrich, 2019), computed in float32."""

from torch import Tensor

from longshore.worker.kernels.rms_norm import add_rms_norm, rms_norm
from longshore.worker.layers.placement import Placement


class RMSNorm:
    """weight: (size,)."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        self.weight = placement.empty(size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x: (n, size) -> the same shape."""
        return rms_norm(x, self.weight, self.eps)

    def after_add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual). The sum is written to `residual`; None stands for
        zeros, and the sum is then `x` itself. Both (n, size)."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps), residual
