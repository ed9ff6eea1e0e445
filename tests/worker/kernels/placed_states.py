"""States of sequences in random pages of a pool, which a kernel advances and float64 checks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec
import torch
from torch import Tensor

from longshore.protocol.kv_cache_spec import StateSpec
from longshore.worker.kv_cache.state_pages import StatePages

NUM_LAYERS, LAYER = 3, 1
ANY_LENGTHS: Final = (0, 1, 2, 4, 13)


class PlacedStates:
    """States of one layer of several, of sequences of these lengths, in the order of `rows`.

    All other bytes of the pool are NaN in any dtype, and so are the pages of a sequence of one
    token and the null block. The line of a sequence of no tokens has the pages of the last one.

    pages, exact: the states in float32, and in float64.
    of_kernel:    table, rows and lens.
    """

    def __init__(
        self,
        shapes: tuple[tuple[int, ...], ...],
        lens: Sequence[int],
        dtype: torch.dtype,
        *,
        unit_bytes: int,
        num_pages: int,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(len(lens))
        spec = StateSpec(
            block_size=16,
            shapes=shapes,
            dtype_bytes=(4, dtype.itemsize),
            num_pages=num_pages,
            unit_bytes=unit_bytes,
        )
        n = len(lens)
        num_blocks = n * num_pages + 3
        self.pages = _pages(spec, num_blocks, (torch.float32, dtype), device)
        exact = msgspec.structs.replace(spec, dtype_bytes=(8, dtype.itemsize))
        self.exact = _pages(exact, num_blocks, (torch.float64, dtype), device)
        drawn = 1 + torch.randperm(num_blocks - 1, generator=generator)[: n * num_pages]
        table = torch.nn.functional.pad(drawn.view(n, num_pages), (0, 2), value=num_blocks - 1)
        lengths = torch.tensor(lens, dtype=torch.int64)
        table[lengths == 0] = table[-1:].clone()
        self._tables = table[lengths > 0].to(device)
        for tensor, shape in enumerate(shapes):
            values = torch.randn(n, *shape, generator=generator)[lengths > 0]
            values[lengths[lengths > 0] == 1] = float("nan")
            values = values.to(self.pages.dtypes[tensor]).to(device)
            self.pages.write(tensor, LAYER, self._tables, values)
            self.exact.write(tensor, LAYER, self._tables, values.to(self.exact.dtypes[tensor]))
        self._before = self.pages.buffer.clone()
        rows = torch.randperm(n, generator=generator)
        self.of_kernel = [each.to(device) for each in (table.int(), rows, lengths[rows])]

    def results(self) -> list[tuple[Tensor, Tensor]]:
        """Per tensor, what the kernel has left and what is right: (n, *shape), of the sequences of
        at least one token."""
        got, wanted = (
            [pages.read(tensor, LAYER, self._tables) for tensor in range(2)]
            for pages in (self.pages, self.exact)
        )
        return list(zip(got, wanted, strict=True))

    def check(self, tolerance: float) -> None:
        (states, exact_states), (kept, exact_kept) = self.results()
        assert torch.equal(kept, exact_kept)
        torch.testing.assert_close(states.double(), exact_states, rtol=tolerance, atol=tolerance)
        self.check_other_bytes()

    def check_other_bytes(self) -> None:
        """What belongs to no state is as before."""
        wanted = replace(self.pages, buffer=self._before)
        for tensor, (values, _) in enumerate(self.results()):
            wanted.write(tensor, LAYER, self._tables, values)
        assert torch.equal(self.pages.buffer, wanted.buffer)


def _pages(
    spec: StateSpec, num_blocks: int, dtypes: tuple[torch.dtype, ...], device: str
) -> StatePages:
    """Blocks have one unit more than a page of these states."""
    num_bytes = spec.page_bytes(NUM_LAYERS) + spec.unit_bytes
    buffer = torch.full((num_blocks, num_bytes), 0xFF, dtype=torch.uint8, device=device)
    return StatePages(buffer, spec, NUM_LAYERS, dtypes)
