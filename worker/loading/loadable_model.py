"""What the loader of weights needs of a model."""

from typing import Protocol

from longshore.worker.layers.stored_tensor import StoredTensors


class LoadableModel(Protocol):
    """Places for tensors, by the names that its checkpoint has."""

    def checkpoint_tensors(self) -> StoredTensors:
        """Where each tensor goes."""
        ...

    def is_redundant(self, name: str) -> bool:
        """The checkpoint may contain `name`; it is not needed."""
        ...

    def loaded(self) -> None:
        """Every tensor is filled."""
        ...

    def copy_of(self, name: str) -> str | None:
        """The tensor that a redundant one must be equal to; None if it does not matter."""
        ...
