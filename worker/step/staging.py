"""Host buffers that asynchronous copies read from, reused in turn.

A copy to a device may read its source long after it was issued. A buffer must not be refilled
before the last copy from it has finished, so each set of buffers has a fence.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longshore.worker.queues.compute_queue import Completion


class StagingSet:
    """Buffers that are filled and copied together.

    tensors: by name; pinned memory if `pin_memory`.
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
        """The next `acquire` of this set waits until `fence` is done."""
        self._fence = fence

    def wait_until_free(self) -> None:
        """Block until no copy reads from this set."""
        if self._fence is not None:
            self._fence.wait()
            self._fence = None


class StagingRing:
    """`depth` equal sets. With three, two steps can be in flight while a third is written."""

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
        """The least recently used set, once it is free. `guard` it with the operation that will
        read it."""
        staging = self._sets[self._next]
        self._next = (self._next + 1) % len(self._sets)
        staging.wait_until_free()
        return staging
