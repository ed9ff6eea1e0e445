"""The interface of a model that the weight loader needs."""

from typing import Protocol

from longshore.worker.layers.stored_tensor import StoredTensors


class LoadableModel(Protocol):
    """A model whose tensors can be filled by their names in the checkpoint."""

    def checkpoint_tensors(self) -> StoredTensors:
        """The memory of each tensor, by name."""
        ...

    def is_redundant(self, name: str) -> bool:
        """Whether the checkpoint may contain `name` although the model does not need it."""
        ...

    def loaded(self) -> None:
        """Called once every tensor is filled."""
        ...

    def copy_of(self, name: str) -> str | None:
        """The tensor that a redundant one must be equal to; None if any value is accepted."""
        ...
