"""Arrays of one step, of any number and size, that two copies bring to the device.

What every step needs has fixed staging buffers (`staging.py`); this is for what some steps need.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Upload:
    """Collects integers and float32s on the host; `pack` puts each kind behind each other."""

    def __init__(self) -> None:
        self._ints: list[npt.NDArray[np.int64]] = []
        self._reals: list[npt.NDArray[np.float64]] = []
        self._num_ints = 0
        self._num_reals = 0

    def ints(self, values: npt.NDArray[np.int64]) -> slice:
        """Where `values` will be among the integers."""
        place = slice(self._num_ints, self._num_ints + len(values))
        self._ints.append(values)
        self._num_ints = place.stop
        return place

    def reals(self, values: npt.NDArray[np.float64]) -> slice:
        """Where `values` will be among the float32s."""
        place = slice(self._num_reals, self._num_reals + len(values))
        self._reals.append(values)
        self._num_reals = place.stop
        return place

    def pack(self, *, pin_memory: bool) -> "PackedUpload":
        """Memory of its own. Pinned memory comes from torch's caching allocator, which reuses it
        only after the copy."""
        ints = torch.from_numpy(_joined(self._ints, np.int64))
        reals = torch.from_numpy(_joined(self._reals, np.float32))
        if pin_memory:
            ints, reals = ints.pin_memory(), reals.pin_memory()
        return PackedUpload(ints, reals)


class PackedUpload:
    """Integers and float32s on the host, ready to be copied."""

    def __init__(self, ints: Tensor, reals: Tensor) -> None:
        self._ints = ints
        self._reals = reals

    def to_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(n,) int64 and (m,) float32. On the compute queue."""
        return (
            self._ints.to(device, non_blocking=True),
            self._reals.to(device, non_blocking=True),
        )


def _joined(
    parts: Sequence[npt.NDArray[np.generic]], dtype: type[np.generic]
) -> npt.NDArray[np.generic]:
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)
