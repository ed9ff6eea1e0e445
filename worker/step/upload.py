"""Any number of arrays of any size, moved to the device with two copies.

This is for data that only some steps need; data of every step has fixed staging buffers
(`staging.py`).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Upload:
    """Collects integers and float32s on the host; `pack` concatenates each kind."""

    def __init__(self) -> None:
        self._ints: list[npt.NDArray[np.int64]] = []
        self._reals: list[npt.NDArray[np.float64]] = []
        self._num_ints = 0
        self._num_reals = 0

    def ints(self, values: npt.NDArray[np.int64]) -> slice:
        """Add `values`; returns their slice of the integers."""
        span = slice(self._num_ints, self._num_ints + len(values))
        self._ints.append(values)
        self._num_ints = span.stop
        return span

    def reals(self, values: npt.NDArray[np.float64]) -> slice:
        """Add `values`; returns their slice of the float32s."""
        span = slice(self._num_reals, self._num_reals + len(values))
        self._reals.append(values)
        self._num_reals = span.stop
        return span

    def pack(self, *, pin_memory: bool) -> "PackedUpload":
        """Concatenate the arrays in new memory. Pinned memory comes from torch's caching allocator,
        which reuses it only after the copy."""
        ints = torch.from_numpy(_concatenate(self._ints, np.int64))
        reals = torch.from_numpy(_concatenate(self._reals, np.float32))
        if pin_memory:
            ints, reals = ints.pin_memory(), reals.pin_memory()
        return PackedUpload(ints, reals)


class PackedUpload:
    """Integers and float32s on the host, ready to copy to the device."""

    def __init__(self, ints: Tensor, reals: Tensor) -> None:
        self._ints = ints
        self._reals = reals

    def to_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(n,) int64 and (m,) float32. On the compute queue."""
        return (
            self._ints.to(device, non_blocking=True),
            self._reals.to(device, non_blocking=True),
        )


def _concatenate(
    parts: Sequence[npt.NDArray[np.generic]], dtype: type[np.generic]
) -> npt.NDArray[np.generic]:
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)
