"""The placement of a model's weights: dtype, device, and this rank's position among all ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longshore.worker.ranks.parallel import ALONE, Parallel


@dataclass(frozen=True)
class Placement:
    """Passed to every layer of a model at construction."""

    dtype: torch.dtype
    device: torch.device
    parallel: Parallel = ALONE
    _when_loaded: list[Callable[[], None]] = field(default_factory=list)

    def empty(self, *shape: int) -> Tensor:
        """Uninitialised memory for a weight, filled by the loader."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def when_loaded(self, action: Callable[[], None]) -> None:
        """Register an action to call once all weights are filled. Actions run in order."""
        self._when_loaded.append(action)

    def loaded(self) -> None:
        """Run the registered actions. The model calls it once, when all weights are filled."""
        while self._when_loaded:
            self._when_loaded.pop(0)()
