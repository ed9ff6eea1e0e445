"""Where a model's weights live: dtype, device, and this rank's place among the ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longshore.worker.ranks.parallel import ALONE, Parallel


@dataclass(frozen=True)
class Placement:
    """What every layer of a model is built with."""

    dtype: torch.dtype
    device: torch.device
    parallel: Parallel = ALONE
    _when_loaded: list[Callable[[], None]] = field(default_factory=list)

    def empty(self, *shape: int) -> Tensor:
        """Memory for a weight, uninitialised until it is loaded."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def when_loaded(self, action: Callable[[], None]) -> None:
        """`action` is called once all weights are filled."""
        self._when_loaded.append(action)

    def loaded(self) -> None:
        """All weights are filled. Called once, by the model."""
        while self._when_loaded:
            self._when_loaded.pop(0)()
