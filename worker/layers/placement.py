"""The placement of a model's weights: dtype, device, and this rank's position among all ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longshore.worker.config import QuantisedProducts
from longshore.worker.layers.matrix_memory import MatrixMemory, ReadRows
from longshore.worker.ranks.parallel import ALONE, Parallel


@dataclass(frozen=True)
class Placement:
    """Passed to every layer of a model at construction.

    products: how matrices in the format of a quantised checkpoint are multiplied; None: all
              become floats.
    """

    dtype: torch.dtype
    device: torch.device
    parallel: Parallel = ALONE
    products: QuantisedProducts | None = None
    memories: list[MatrixMemory] = field(default_factory=list)
    _when_loaded: list[Callable[[], None]] = field(default_factory=list)

    def empty(self, *shape: int) -> Tensor:
        """Uninitialised memory for a weight, filled by the loader."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def matrix(
        self, rows: int, columns: int, read: Callable[[ReadRows], None] | None
    ) -> MatrixMemory:
        """Memory for the weights of a matrix. read: packs rows that stay as they are in the files;
        None: they become floats."""
        memory = MatrixMemory(
            rows,
            columns,
            self.dtype,
            self.device,
            None if self.products is None else read,
            products=self.products,
        )
        if memory.read is not None:
            self.memories.append(memory)
        return memory

    def when_loaded(self, action: Callable[[], None]) -> None:
        """Register an action to call once all weights are filled. Actions run in order."""
        self._when_loaded.append(action)

    def loaded(self) -> None:
        """Run the registered actions. The model calls it once, when all weights are filled."""
        while self._when_loaded:
            self._when_loaded.pop(0)()
