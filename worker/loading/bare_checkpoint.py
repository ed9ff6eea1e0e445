"""Bare checkpoints: a decoder without its output head, as embedding models are saved. Their tensors
are named `layers.0...` instead of `model.layers.0...`."""

from collections.abc import Set as AbstractSet

from longshore.worker.layers.stored_tensor import StoredTensors
from longshore.worker.loading.loadable_model import LoadableModel
from longshore.worker.loading.tensor_names import HEAD


class BareNames:
    """A model under the tensor names of a bare checkpoint. prefix: what these names lack."""

    def __init__(self, model: LoadableModel, prefix: str) -> None:
        self._model = model
        self._prefix = prefix

    def checkpoint_tensors(self) -> StoredTensors:
        stored = self._model.checkpoint_tensors()
        return {name.removeprefix(self._prefix): tensor for name, tensor in stored.items()}

    def is_redundant(self, name: str) -> bool:
        return self._model.is_redundant(self._own(name))

    def loaded(self) -> None:
        self._model.loaded()

    def copy_of(self, name: str) -> str | None:
        original = self._model.copy_of(self._own(name))
        return None if original is None else original.removeprefix(self._prefix)

    def _own(self, name: str) -> str:
        return name if name == HEAD else self._prefix + name


def as_stored(model: LoadableModel, found: AbstractSet[str]) -> LoadableModel:
    """The model under the naming scheme of the tensors `found` in its checkpoint."""
    beginnings = {name.partition(".")[0] for name in model.checkpoint_tensors() if name != HEAD}
    if len(beginnings) != 1:
        return model
    prefix = f"{beginnings.pop()}."
    is_bare = not any(name.startswith(prefix) for name in found)
    return BareNames(model, prefix) if is_bare else model
