"""The same product for every expert: rows that are sorted by expert, each with its expert's matrix.

Only matrices of experts that have rows are read, so a decode step of few rows costs what these
experts weigh. There is no padding: nobody waits for the expert with most rows.
"""

from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.layers.placement import Placement

_MIN_PACKED: Final = 1 << 18
"""Elements of a matrix for which oneDNN's tiles are worth a call of their own per expert."""


class ExpertMatrices:
    """num_experts matrices of (rows, columns), filled by the loader.

    On a CPU, big ones are laid out in oneDNN's tiles once they are loaded: an expert gets few rows
    even of a long prefill, and for few rows it is the reading of the matrix that takes the time.
    """

    def __init__(self, num_experts: int, rows: int, columns: int, placement: Placement) -> None:
        self._stored: Tensor | None = placement.empty(num_experts, rows, columns)
        self._packed: list[Tensor] = []
        self._is_grouped = _can_group(self._stored)

    @property
    def all_stored(self) -> Tensor:
        """(num_experts, rows, columns): the memory to fill."""
        assert self._stored is not None, "the matrices have been filled"
        return self._stored

    def stored(self, expert: int) -> Tensor:
        """(rows, columns) of one of them."""
        return self.all_stored[expert]

    def pack(self) -> None:
        """All are filled: lay them out, where that is better."""
        if _can_pack(self.all_stored):
            linear = torch.ops.mkldnn._reorder_linear_weight
            self._packed = [linear(matrix) for matrix in self.all_stored]
            self._stored = None

    def let_go(self) -> None:
        """All are filled, and copied elsewhere."""
        self._stored = None

    def product(self, x: Tensor, ends: Tensor) -> Tensor:
        """x: (n, columns), sorted by expert; ends: (num_experts,) int32, where each one's rows end.
        Returns (n, rows): each row times the transposed matrix of its expert."""
        if self._packed:
            pieces = _pieces(x, ends)
            linear = torch.ops.mkldnn._linear_pointwise.default
            return torch.cat(
                [linear(rows, self._packed[i], None, "none", [], "") for i, rows in pieces]
            )
        if self._is_grouped:
            return F.grouped_mm(x, self.all_stored.transpose(1, 2), offs=ends)
        return torch.cat([F.linear(rows, self.stored(i)) for i, rows in _pieces(x, ends)])


def _pieces(x: Tensor, ends: Tensor) -> list[tuple[int, Tensor]]:
    """(expert, its rows) of each that has any."""
    bounds = [0, *ends.tolist()]
    return [
        (expert, x[start:end])
        for expert, (start, end) in enumerate(pairwise(bounds))
        if start < end
    ]


def _can_group(matrices: Tensor) -> bool:
    """torch's grouped product wants lines of whole 16 bytes."""
    return (
        matrices.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and matrices.shape[2] * matrices.element_size() % 16 == 0
    )


def _can_pack(matrices: Tensor) -> bool:
    if matrices.device.type != "cpu" or matrices[0].numel() < _MIN_PACKED:
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    return matrices.dtype == torch.float32 or (
        matrices.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
