"""Where a tensor of a checkpoint goes. A rank may hold a part of it, or several parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint and the memory that takes it, or parts of it.

    shape: as it is stored.
    parts: (place, index): `stored[index]` is copied to `place`, which has its shape or one that it
           broadcasts to. Without parts this rank needs nothing of it.
    """

    shape: tuple[int, ...]
    parts: Sequence[tuple[Tensor, tuple[slice, ...]]]


StoredTensors: TypeAlias = dict[str, StoredTensor]
"""By the checkpoint's name."""


def whole(place: Tensor) -> StoredTensor:
    """The stored tensor is `place`."""
    return StoredTensor(tuple(place.shape), ((place, (slice(None),) * place.dim()),))
