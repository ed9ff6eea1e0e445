"""The destination of a checkpoint tensor. A rank may hold the whole tensor or parts of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, and the memory for it or for parts of it.

    shape: its shape in the checkpoint.
    parts: (target, index): `stored[index]` is copied to `target`, which has the same shape or one
           that it broadcasts to. Empty if this rank does not need the tensor.
    """

    shape: tuple[int, ...]
    parts: Sequence[tuple[Tensor, tuple[slice, ...]]]


StoredTensors: TypeAlias = dict[str, StoredTensor]
"""By name in the checkpoint."""


def whole(target: Tensor) -> StoredTensor:
    """`target` holds the whole stored tensor."""
    return StoredTensor(tuple(target.shape), ((target, (slice(None),) * target.dim()),))
