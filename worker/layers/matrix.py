"""A weight matrix, which is packed for its product once it is loaded.

Matrices of quantised checkpoints keep their format. Others are packed in tiles on a CPU if they are
in bfloat16: otherwise, oneDNN rearranges a matrix in every call, which for the few rows of a decode
step costs as much as the product itself.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from longshore.worker.kernels import linear, one_row
from longshore.worker.kernels.device_matrix import DeviceMatrix
from longshore.worker.kernels.linear import PackedMatrix
from longshore.worker.kernels.native import empty
from longshore.worker.layers.matrix_memory import ReadRows
from longshore.worker.layers.placement import Placement


class _Packed(Protocol):
    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor: ...


class _PackedForOneDNN:
    """The form where our kernels have no products of bfloat16."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self._packed, bias, "none", [], ""
        )
        return y


class _Segments:
    """Matrices below each other, in different formats."""

    def __init__(self, matrices: Sequence[PackedMatrix | DeviceMatrix]) -> None:
        self._matrices = matrices
        self._num_rows = [matrix.num_rows for matrix in matrices]

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        shape = len(x), sum(self._num_rows)
        out = empty(shape, x.dtype) if x.device.type == "cpu" else x.new_empty(shape)
        biases = [None] * len(self._num_rows) if bias is None else bias.split(self._num_rows)
        parts = zip(self._matrices, biases, out.split(self._num_rows, dim=1), strict=True)
        for matrix, part, target in parts:
            matrix.product(x, part, out=target)
        return out


class Matrix:
    """weight: (rows, columns), filled by the loader, then packed for what is done with it.

    is_table:      whether rows are looked up, as embeddings.
    is_multiplied: whether `product` is called.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        placement: Placement,
        *,
        is_table: bool = False,
        is_multiplied: bool = True,
    ) -> None:
        self._memory = placement.matrix(rows, columns, self._read)
        self._weight: Tensor | None = None
        self._packed: _Packed | None = None
        self._order: Tensor | None = None
        self._is_table = is_table
        self.is_multiplied = is_multiplied
        placement.when_loaded(self._pack)

    @property
    def stored(self) -> Tensor:
        """The memory to fill, of which the loader gets views."""
        return self._memory.tensor

    @property
    def weight(self) -> Tensor:
        """The floats, unless there is only a packed form."""
        if self._weight is None:
            assert self._packed is None, "the matrix has only a packed form"
            return self._memory.floats()
        return self._weight

    @property
    def table(self) -> Tensor | PackedMatrix | DeviceMatrix:
        """For `look_up`."""
        if self._weight is None and isinstance(self._packed, PackedMatrix | DeviceMatrix):
            return self._packed
        return self.weight

    def reorder(self, order: Tensor) -> None:
        """Row i is row order[i] of what is stored. order: (rows,) int64."""
        self._order = order

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: (n, columns); bias: (rows,) -> x M^T + bias, (n, rows)."""
        if self._packed is None:
            return one_row.linear(x, self.weight, bias)
        return self._packed.product(x, bias)

    def _read(self, read: ReadRows) -> None:
        """Pack rows that are quantised."""
        memory, order = self._memory, self._order
        segments = memory.segments(order)
        has_floats = any(segment.packing is None for segment in segments)
        if len(segments) > 1 and (self._is_table or (has_floats and memory.is_on_gpu)):
            memory.dequantise(read)
            return
        matrices = [memory.pack(read, segment, order) for segment in segments]
        self._packed = matrices[0] if len(matrices) == 1 else _Segments(matrices)
        memory.release()

    def _pack(self) -> None:
        if self._packed is not None:
            return
        weight = self._memory.floats()
        if self._order is not None:
            weight.copy_(weight[self._order.to(weight.device)])
        if self.is_multiplied:
            if linear.supports(weight):
                self._packed = PackedMatrix.plain(weight)
            elif _is_for_onednn(weight):
                self._packed = _PackedForOneDNN(weight)
        if self._packed is None or self._is_table:
            self._weight = weight
        self._memory.release()


def _is_for_onednn(weight: Tensor) -> bool:
    # Only bfloat16: MKL is faster in float32.
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
