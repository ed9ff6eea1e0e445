"""Decoders whose checkpoints have other names for what every decoder has."""

from collections.abc import Mapping
from typing import ClassVar

from longshore.worker.layers.stored_tensor import StoredTensors
from longshore.worker.models.decoder_model import DecoderModel


class RenamedDecoder(DecoderModel):
    """names: how a tensor's name begins elsewhere, and how in these checkpoints."""

    names: ClassVar[Mapping[str, str]]

    def checkpoint_tensors(self) -> StoredTensors:
        return {self._stored(name): place for name, place in super().checkpoint_tensors().items()}

    def is_redundant(self, name: str) -> bool:
        return super().is_redundant(self._own(name))

    def copy_of(self, name: str) -> str | None:
        original = super().copy_of(self._own(name))
        return None if original is None else self._stored(original)

    def _stored(self, name: str) -> str:
        return _with_other_beginning(name, self.names)

    def _own(self, name: str) -> str:
        return _with_other_beginning(name, {there: own for own, there in self.names.items()})


def _with_other_beginning(name: str, others: Mapping[str, str]) -> str:
    """others: by beginning. A name that begins in none of these ways stays as it is."""
    for beginning, other in others.items():
        if name.startswith(beginning):
            return other + name.removeprefix(beginning)
    return name
