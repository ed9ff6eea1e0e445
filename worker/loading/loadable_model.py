"""The interface of a model that the weight loader needs."""

from collections.abc import Sequence
from typing import Protocol

from longshore.worker.layers.matrix_memory import MatrixMemory
from longshore.worker.layers.stored_tensor import StoredTensors


class LoadableModel(Protocol):
    """A model whose tensors can be filled by their names in the checkpoint."""

    def checkpoint_tensors(self) -> StoredTensors:
        """The memory of each tensor, by name."""
        ...

    @property
    def memories(self) -> Sequence[MatrixMemory]:
        """Those that may stay quantised."""
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
