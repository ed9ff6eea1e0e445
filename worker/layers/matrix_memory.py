"""The memory of a matrix until it is packed for its products.

With `Placement.products`, a matrix stays in the format of a quantised checkpoint if the kernels
have it. Which format that is, only the loader knows. So the memory that layers divide into the
targets of stored tensors is on torch's device `meta`: a view of it says which rows of the matrix it
is (`rows_of`). What is not quantised gets real memory once it is read (`floats`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from longshore.worker.config import ON_GPU, QuantisedProducts
from longshore.worker.kernels.device_matrix import DeviceMatrix, line_bytes
from longshore.worker.kernels.linear import PackedMatrix
from longshore.worker.kernels.native import PANEL
from longshore.worker.kernels.packing import Packing, QuantisedRows, values_of

_CHUNK: Final = 1 << 16  # codes that are in memory with a byte for each

ReadRows = Callable[[str, Tensor, slice], QuantisedRows]
"""Reads rows of a stored tensor, counted through all its matrices, and some of their columns."""


class Source(NamedTuple):
    """Rows of a matrix, and where they are stored.

    rows:        in the matrix; stored_rows: in the stored tensor, one for each.
    columns:     of the stored tensor.
    """

    packing: Packing
    name: str
    rows: Tensor
    stored_rows: Tensor
    columns: slice


@dataclass(frozen=True)
class RowSegment:
    """Adjacent rows in one format. packing: None: floats."""

    rows: slice
    packing: Packing | None


class MatrixMemory:
    """(rows, columns), or several matrices of the same width below each other.

    tensor: what layers take views of.
    is_on_gpu: whether quantised rows become a DeviceMatrix. Then floats are not packed.
    read:   packs rows that stay quantised, while the files are open.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        read: Callable[[ReadRows], None] | None,
        *,
        products: QuantisedProducts | None = None,
    ) -> None:
        """read: None: all rows become floats. products: of the packed matrices."""
        self.shape = rows, columns
        self.dtype = dtype
        self.read = read
        self._rounds_inputs = products in ("int8", "fp8 on a GPU")
        self.is_on_gpu = products in ON_GPU
        self._device = device
        self._floats: Tensor | None = None
        self._sources: list[Source] = []
        if read is None:
            self.tensor = self._floats = torch.empty(rows, columns, dtype=dtype, device=device)
        else:
            self.tensor = torch.empty(rows, columns, dtype=dtype, device="meta")

    @property
    def is_quantised(self) -> bool:
        return bool(self._sources)

    def floats(self) -> Tensor:
        """The real memory. Before it is written, it is zero."""
        if self._floats is None:
            self._floats = torch.zeros(self.shape, dtype=self.dtype, device=self._device)
        return self._floats

    def release(self) -> None:
        """Free the memory: the matrix has been packed."""
        self._floats = None
        self._sources.clear()
        self.tensor = self.tensor.new_zeros(1).expand(self.shape)  # only its shape is used

    def target(self, view: Tensor) -> Tensor:
        """The real memory of a view of `tensor`."""
        return self.floats().as_strided(view.shape, view.stride(), view.storage_offset())

    def rows_of(self, view: Tensor, column_dim: int) -> Tensor | None:
        """The rows of the matrix of which a view of `tensor` consists, in the view's shape without
        the dimension of its columns; None: it does not have all columns along that dimension."""
        num_rows, num_columns = self.shape
        shape, strides = list(view.shape), list(view.stride())
        if shape.pop(column_dim) != num_columns or strides.pop(column_dim) != 1:
            return None
        if any(
            stride % num_columns for size, stride in zip(shape, strides, strict=True) if size > 1
        ):
            return None
        steps = [stride // num_columns for stride in strides]
        return torch.arange(num_rows).as_strided(shape, steps, view.storage_offset() // num_columns)

    def add(self, source: Source) -> None:
        self._sources.append(source)

    def segments(self, order: Tensor | None = None) -> list[RowSegment]:
        """order: the row for each row of the result; a negative one is padding, which belongs to
        the segment of those before it, as do rows that are not stored at all."""
        known: list[Packing | None] = list(
            dict.fromkeys(source.packing for source in self._sources)
        )
        number_of = torch.tensor([*(known.index(each.packing) for each in self._sources), -1])
        kinds = number_of[self._places()[0]]
        if order is not None:
            kinds = torch.where(order < 0, -1, kinds[order.clamp(min=0)])
        if self._floats is None:
            last = torch.where(kinds < 0, -1, torch.arange(len(kinds))).cummax(0).values
            kinds = kinds[last.clamp(min=0)].clamp(min=0)
        ends = [*(kinds.diff().nonzero().flatten() + 1).tolist(), len(kinds)]
        known.append(None)
        return [
            RowSegment(slice(begin, end), known[int(kinds[begin])])
            for begin, end in pairwise([0, *ends])
        ]

    def num_bytes(self, source: Source) -> int:
        """Of what is packed, without the padding of panels."""
        num_columns = source.columns.stop - source.columns.start
        if self.is_on_gpu:
            return source.rows.numel() * line_bytes(source.packing, num_columns)
        records = num_columns // source.packing.span
        return source.rows.numel() * records * source.packing.record_bytes

    def pack(
        self, read: ReadRows, segment: RowSegment, order: Tensor | None = None
    ) -> PackedMatrix | DeviceMatrix:
        """The rows of a segment. order: as for `segments`."""
        rows = torch.arange(self.shape[0]) if order is None else order
        rows = rows[segment.rows]
        if segment.packing is None:
            return PackedMatrix.plain(self.floats()[rows])
        of = segment.packing, len(rows), self.shape[1], self.dtype
        rounds_inputs = self._rounds_inputs
        matrix = (
            DeviceMatrix(*of, self._device, rounds_inputs=rounds_inputs)
            if self.is_on_gpu
            else PackedMatrix.quantised(*of, rounds_inputs=rounds_inputs)
        )
        owners, stored = self._places()
        step = max(1, _CHUNK // (PANEL * self.shape[1])) * PANEL
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            found = QuantisedRows.zeros(segment.packing, len(part), self.shape[1])
            of_part = torch.where(part < 0, -1, owners[part.clamp(min=0)])
            for owner in of_part.unique().tolist():
                if owner >= 0:
                    places = (of_part == owner).nonzero().flatten()
                    source = self._sources[owner]
                    found.put(places, read(source.name, stored[part[places]], source.columns))
            matrix.fill(first, found)
        return matrix

    def dequantise(self, read: ReadRows) -> None:
        """Fill `floats` with what is quantised."""
        for source in self._sources:
            rows, stored = source.rows.flatten(), source.stored_rows.flatten()
            step = max(1, _CHUNK // self.shape[1])
            for first in range(0, len(rows), step):
                part = slice(first, first + step)
                found = read(source.name, stored[part], source.columns)
                self.floats()[rows[part]] = values_of(found).to(self.dtype)
        self._sources.clear()

    def _places(self) -> tuple[Tensor, Tensor]:
        """Of each row the index of its source, -1 if it is none, and its row there."""
        owners, stored = torch.full((2, self.shape[0]), -1).unbind()
        for index, source in enumerate(self._sources):
            rows = source.rows.flatten()
            owners[rows], stored[rows] = index, source.stored_rows.flatten()
        return owners, stored
