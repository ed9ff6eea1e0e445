"""Grouped matrix products: rows sorted by expert, each multiplied by its expert's matrix.

Only matrices of experts with rows are read, so the cost of a decode step of few rows is that of
these experts. Rows are not padded to the expert with the most rows.
"""

from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.config import ON_GPU
from longshore.worker.kernels.device_matrix import DeviceMatrix
from longshore.worker.kernels.linear import PackedMatrix
from longshore.worker.layers.matrix_memory import ReadRows
from longshore.worker.layers.placement import Placement

_MIN_PACKED: Final = 1 << 18
"""Minimum elements of a matrix for which packing for oneDNN, with one call per expert, pays."""


class ExpertMatrices:
    """num_experts matrices of (rows, columns), filled by the loader.

    On a CPU, large ones are packed in oneDNN's tiles after loading: an expert gets few rows even in
    a long prefill, and for few rows reading the matrix takes most of the time.
    """

    def __init__(
        self,
        num_experts: int,
        rows: int,
        columns: int,
        placement: Placement,
        order: Tensor | None = None,
    ) -> None:
        """order: of an expert's rows, if they may stay quantised, see `PackedExperts`; a negative
        one is padding. On a GPU, they keep their order."""
        if placement.products in ON_GPU and order is not None:
            order = torch.arange(rows)
        self._shape = num_experts, rows, columns
        self._order = order
        read = None if order is None else self._read
        self._memory = placement.matrix(num_experts * rows, columns, read)
        self.quantised: PackedMatrix | DeviceMatrix | None = None
        self._packed: list[Tensor] = []
        self._is_grouped = _can_group(self._memory.tensor.view(self._shape))

    @property
    def all_stored(self) -> Tensor:
        """(num_experts, rows, columns): the memory to fill."""
        return self._memory.tensor.view(self._shape)

    @property
    def weights(self) -> Tensor:
        """The same, once it is filled with floats."""
        return self._memory.floats().view(self._shape)

    @property
    def on_device(self) -> Tensor | DeviceMatrix:
        """As the kernels of a GPU take them."""
        if isinstance(self.quantised, DeviceMatrix):
            return self.quantised
        return self.weights

    def stored(self, expert: int) -> Tensor:
        """(rows, columns) of one of them, to fill."""
        return self.all_stored[expert]

    def _read(self, read: ReadRows) -> None:
        """Pack matrices that are quantised, all in the same format, below each other."""
        assert self._order is not None
        num_experts, rows, _ = self._shape
        firsts = rows * torch.arange(num_experts).view(-1, 1)
        order = torch.where(self._order < 0, -1, firsts + self._order).flatten()
        segments = self._memory.segments(order)
        if len(segments) > 1:
            self._memory.dequantise(read)
            return
        self.quantised = self._memory.pack(read, segments[0], order)
        self._memory.release()

    def dequantise(self) -> None:
        """Turn quantised matrices into floats."""
        if self.quantised is not None:
            assert self._order is not None
            num_experts, rows, _ = self._shape
            firsts = len(self._order) * torch.arange(num_experts).view(-1, 1)
            places = torch.empty(rows, dtype=torch.int64)
            kept = (self._order >= 0).nonzero().flatten()
            places[self._order[kept]] = kept
            found = self.quantised.rows((firsts + places).flatten())
            self._memory.floats().copy_(found)
            self.quantised = None

    def pack(self) -> None:
        """Pack the matrices if that is faster. Called once all are filled."""
        if _can_pack(self.weights):
            linear = torch.ops.mkldnn._reorder_linear_weight
            self._packed = [linear(matrix) for matrix in self.weights]
            self.release()

    def release(self) -> None:
        """Free the stored matrices, which the caller has packed elsewhere."""
        self._memory.release()

    def product(self, x: Tensor, ends: Tensor) -> Tensor:
        """x: (n, columns), sorted by expert; ends: (num_experts,) int32, end of each expert's rows.
        Returns (n, rows): each row times the transposed matrix of its expert."""
        if self._packed:
            pieces = _pieces(x, ends)
            linear = torch.ops.mkldnn._linear_pointwise.default
            return torch.cat(
                [linear(rows, self._packed[i], None, "none", [], "") for i, rows in pieces]
            )
        if self._is_grouped:
            return F.grouped_mm(x, self.weights.transpose(1, 2), offs=ends)
        return torch.cat([F.linear(rows, self.weights[i]) for i, rows in _pieces(x, ends)])


def _pieces(x: Tensor, ends: Tensor) -> list[tuple[int, Tensor]]:
    """(expert, its rows) for each expert with rows."""
    bounds = [0, *ends.tolist()]
    return [
        (expert, x[start:end])
        for expert, (start, end) in enumerate(pairwise(bounds))
        if start < end
    ]


def _can_group(matrices: Tensor) -> bool:
    """Whether torch's grouped product supports them: it needs lines of a multiple of 16 bytes."""
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
