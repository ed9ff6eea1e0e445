"""Decoders whose checkpoints use other tensor names than Llama's."""

from collections.abc import Mapping
from typing import ClassVar

from longshore.worker.layers.stored_tensor import StoredTensors
from longshore.worker.models.decoder_model import DecoderModel


class RenamedDecoder(DecoderModel):
    """names: prefixes of our tensor names, and the prefixes that replace them in the checkpoint."""

    names: ClassVar[Mapping[str, str]]

    def checkpoint_tensors(self) -> StoredTensors:
        return {self._stored(name): tensor for name, tensor in super().checkpoint_tensors().items()}

    def is_redundant(self, name: str) -> bool:
        return super().is_redundant(self._own(name))

    def copy_of(self, name: str) -> str | None:
        original = super().copy_of(self._own(name))
        return None if original is None else self._stored(original)

    def _stored(self, name: str) -> str:
        return _replace_prefix(name, self.names)

    def _own(self, name: str) -> str:
        return _replace_prefix(name, {stored: own for own, stored in self.names.items()})


def _replace_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Replace the first matching prefix; other names are unchanged."""
    for prefix, other in prefixes.items():
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return name
