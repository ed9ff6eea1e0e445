"""Host buffers that asynchronous copies read from, reused in turn.

A copy to a device reads its source some time after it was issued. Whoever refills a buffer must
know that the last copy out of it has ended: each set of buffers carries a fence for that.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longshore.worker.step.compute_queue import Completion


class StagingSet:
    """Buffers that are filled and copied together.

    tensors: by name, in pinned memory if the ring was told so.
    arrays:  the same memory as numpy arrays.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, pin_memory: bool
    ) -> None:
        self.tensors: dict[str, Tensor] = {
            name: torch.zeros(shape, dtype=dtype, pin_memory=pin_memory)
            for name, (shape, dtype) in shapes.items()
        }
        self.arrays: dict[str, npt.NDArray[np.generic]] = {
            name: tensor.numpy() for name, tensor in self.tensors.items()
        }
        self._fence: Completion | None = None

    def guard(self, fence: Completion) -> None:
        """Whoever takes this set next waits until `fence` is done."""
        self._fence = fence

    def wait_until_free(self) -> None:
        """Block until no copy reads from this set any more."""
        if self._fence is not None:
            self._fence.wait()
            self._fence = None


class StagingRing:
    """`depth` equal sets. Three let two steps be in flight while a third is being written."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        *,
        pin_memory: bool,
        depth: int = 3,
    ) -> None:
        self._sets = [StagingSet(shapes, pin_memory=pin_memory) for _ in range(depth)]
        self._next = 0

    def acquire(self) -> StagingSet:
        """The set used longest ago, free to be overwritten. Guard it with what will read it."""
        staging = self._sets[self._next]
        self._next = (self._next + 1) % len(self._sets)
        staging.wait_until_free()
        return staging
