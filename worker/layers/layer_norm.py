"""Layer normalisation (Ba et al., 2016), with a bias."""

import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels.layer_norm import add_layer_norm
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors, whole


class LayerNorm:
    """weight, bias: (size,)."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        self.weight = placement.empty(size)
        self.bias = placement.empty(size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x: (n, size) -> the same shape."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def after_add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See RMSNorm.after_add."""
        if residual is None:
            return self(x), x
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps), residual

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {f"{name}.weight": whole(self.weight), f"{name}.bias": whole(self.bias)}
