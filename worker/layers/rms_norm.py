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

    def __call__(self, x: Tensor, *, added: Tensor | None = None) -> Tensor:
        """x: (n, size) -> the same shape, plus `added`."""
        return rms_norm(x, self.weight, self.eps, added=added)

    def after_norm_and_add(
        self, norm: "RMSNorm", x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`self.after_add(norm(x), residual)` in one pass. Both norms have one epsilon."""
        normal = add_rms_norm(x, residual, self.weight, self.eps, first_weight=norm.weight)
        return normal, residual

    def after_add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns (norm(x + residual), x + residual), both (n, size). The sum is written to
        `residual`. None means zeros; the sum is then `x` itself."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps), residual

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {f"{name}.weight": whole(self.weight)}


class OffsetRMSNorm(RMSNorm):
    """RMSNorm whose checkpoint stores weight - 1, as in Gemma.

    After loading, `weight` includes the 1 and is float32, because half precision cannot represent
    the sum; only the product is rounded to the model's dtype.
    """

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__(size, eps, placement)
        placement.when_loaded(self._add_one)

    def _add_one(self) -> None:
        self.weight = self.weight.float() + 1.0
