"""Root mean square normalisation (Zhang and Sennrich, 2019), computed in float32."""

from torch import Tensor

from longshore.worker.kernels.rms_norm import add_rms_norm, rms_norm
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors, whole


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

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {f"{name}.weight": whole(self.weight)}


class OffsetRMSNorm(RMSNorm):
    """The checkpoint has weights less one, as Gemma was trained.

    Once loaded, `weight` is whole and float32, since no half precision holds the sums; the product
    with it is rounded to the model's dtype only then.
    """

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__(size, eps, placement)
        placement.when_loaded(self._add_one)

    def _add_one(self) -> None:
        self.weight = self.weight.float() + 1.0
