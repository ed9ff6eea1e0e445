"""A weight matrix, laid out for its product once it is loaded.

On a CPU, oneDNN reads a matrix in tiles. Given one as it is stored, it rearranges it in every call,
which for the few rows of a decode step costs as much as the product itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.layers.placement import Placement


class Matrix:
    """weight: (rows, columns), filled by the loader. Where it can be laid out better, it is let go
    as soon as all is loaded: that of a tied head, which the embeddings need too, stays with them.
    """

    def __init__(self, weight: Tensor, placement: Placement) -> None:
        self._stored: Tensor | None = weight
        self._packed: Tensor | None = None
        if _can_pack(weight):
            placement.when_loaded(self._pack)

    @property
    def stored(self) -> Tensor:
        """The memory to fill."""
        assert self._stored is not None, "the matrix has been filled"
        return self._stored

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: (n, columns); bias: (rows,) -> x M^T + bias, (n, rows)."""
        if self._packed is None:
            return F.linear(x, self.stored, bias)
        return torch.ops.mkldnn._linear_pointwise.default(x, self._packed, bias, "none", [], "")

    def _pack(self) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.stored)
        self._stored = None


def _can_pack(weight: Tensor) -> bool:
    # Only bfloat16: products in float32 are MKL's, which are the faster ones there.
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
