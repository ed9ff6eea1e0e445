"""States of layers that are not divided by tokens: a state's units are scattered over the pages of
its sequence, which are blocks of the pool.

A page has room for `page_units` units, so unit u of a state is unit `u % page_units` of its page
`u // page_units`. Layers follow each other, and the tensors of a layer; each begins with a unit.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longshore.protocol.kv_cache_spec import StateSpec

ALL = slice(None)


@dataclass(frozen=True, eq=False)
class StatePages:
    """The states of a group's layers.

    buffer: (num_blocks, block bytes) uint8, contiguous; a block is whole units.
    dtypes: of each tensor of the spec's shapes.
    """

    buffer: Tensor
    spec: StateSpec
    num_layers: int
    dtypes: tuple[torch.dtype, ...]

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    @cached_property
    def page_units(self) -> int:
        """Units of a state in a page."""
        return self.spec.page_bytes(self.num_layers) // self.spec.unit_bytes

    @cached_property
    def first_units(self) -> tuple[int, ...]:
        """See StateSpec.first_units."""
        return self.spec.first_units

    @cached_property
    def layer_units(self) -> int:
        """Units of a layer."""
        return sum(self.spec.tensor_units)

    def units(self, tensor: int) -> Tensor:
        """All units of the buffer, (num_blocks * units per block, elements) of a tensor's dtype."""
        dtype = self.dtypes[tensor]
        return self.buffer.view(dtype).view(-1, self.spec.unit_bytes // dtype.itemsize)

    def read(self, tensor: int, layer: int, tables: Tensor, heads: slice = ALL) -> Tensor:
        """A copy of a tensor of the states in these pages: (n, *shape).

        tables: (n, num_pages) int64. heads: a part of the first dimension of the shape; of the
        first tensor, whose heads are whole units.
        """
        shape = self._shape(tensor, heads)
        lines = self._lines(tensor, layer, tables, heads)
        units = self.units(tensor)
        values = units.index_select(0, lines.flatten())
        values = values.view(len(tables), lines.shape[1] * units.shape[1])
        return values[:, : shape.numel()].reshape(len(tables), *shape)

    def write(
        self, tensor: int, layer: int, tables: Tensor, states: Tensor, heads: slice = ALL
    ) -> None:
        """Write (n, *shape) to these pages; arguments as in `read`."""
        lines = self._lines(tensor, layer, tables, heads)
        units = self.units(tensor)
        values = states.flatten(1)
        padding = lines.shape[1] * units.shape[1] - values.shape[1]
        if padding:
            values = torch.nn.functional.pad(values, (0, padding))
        units.index_copy_(0, lines.flatten(), values.reshape(-1, units.shape[1]))

    def zero_after(self, num_tokens: Tensor) -> None:
        """Does nothing: a state is not divided by tokens."""

    def _shape(self, tensor: int, heads: slice) -> torch.Size:
        size, *rest = self.spec.shapes[tensor]
        return torch.Size((len(range(*heads.indices(size))), *rest))

    def _lines(self, tensor: int, layer: int, tables: Tensor, heads: slice) -> Tensor:
        """(n, units) int64, where each unit is in `units`."""
        count, size = self.spec.tensor_units[tensor], self.spec.shapes[tensor][0]
        part = ALL
        if heads != ALL:
            assert tensor == 0
            first, last, _ = heads.indices(size)
            part = slice(first * count // size, last * count // size)
        begin = layer * self.layer_units + self.first_units[tensor]
        units = torch.arange(begin, begin + count, device=tables.device)[part]
        pages = tables.index_select(1, units // self.page_units)
        return pages * (self.buffer.shape[1] // self.spec.unit_bytes) + units % self.page_units
