"""Linear maps. Projections of the same input are one matrix, so that one product computes them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """y = x W^T + b.

    weight: (out_features, in_features); bias: (out_features,) or None. Uninitialised until loaded.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def checkpoint_tensors(self, name: str) -> dict[str, Tensor]:
        """Where each tensor of the checkpoint's layer `name` goes."""
        tensors = {f"{name}.weight": self.weight}
        if self.bias is not None:
            tensors[f"{name}.bias"] = self.bias
        return tensors


class FusedLinear(Linear):
    """Several linear maps of one input, stacked; the checkpoint holds them apart."""

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, sum(out_features), bias=bias, dtype=dtype, device=device)
        self.out_features = tuple(out_features)

    def parts(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Where each tensor of the checkpoint's layers `names` goes: views into the stack."""
        tensors = {}
        for name, weight in zip(names, self.weight.split(self.out_features), strict=True):
            tensors[f"{name}.weight"] = weight
        if self.bias is not None:
            for name, bias in zip(names, self.bias.split(self.out_features), strict=True):
                tensors[f"{name}.bias"] = bias
        return tensors
