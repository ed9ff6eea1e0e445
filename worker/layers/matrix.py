"""A weight matrix that is packed for its product once it is loaded.

On a CPU, products in bfloat16 read a matrix in tiles. If it is not packed, oneDNN rearranges it in
every call, which for the few rows of a decode step costs as much as the product itself.
"""

from typing import Protocol

import torch
from torch import Tensor

from longshore.worker.kernels import linear, one_row
from longshore.worker.layers.placement import Placement


class _Packed(Protocol):
    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor: ...


class _PackedForOneDNN:
    """The fastest form on processors with AMX tiles, and where our kernels are not available."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self._packed, bias, "none", [], ""
        )
        return y


class Matrix:
    """weight: (rows, columns), filled by the loader. If it is packed after loading, this object
    releases it; the embeddings still hold the weight of a tied head.
    """

    def __init__(self, weight: Tensor, placement: Placement) -> None:
        self._stored: Tensor | None = weight
        self._packed: _Packed | None = None
        placement.when_loaded(self._pack)

    @property
    def stored(self) -> Tensor:
        """The memory to fill."""
        assert self._stored is not None, "the matrix has already been packed"
        return self._stored

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: (n, columns); bias: (rows,) -> x M^T + bias, (n, rows)."""
        if self._packed is None:
            return one_row.linear(x, self.stored, bias)
        return self._packed.product(x, bias)

    def _pack(self) -> None:
        weight = self.stored
        if linear.supports(weight):
            self._packed = linear.PackedMatrix(weight)
        elif _is_for_onednn(weight):
            self._packed = _PackedForOneDNN(weight)
        else:
            return
        self._stored = None


def _is_for_onednn(weight: Tensor) -> bool:
    # Only bfloat16: MKL is faster in float32.
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
