"""Drafters with weights, as the device computes them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from longshore.protocol.arrays import Int32Array
from longshore.worker.attention.backend import AttentionStep
from longshore.worker.attention.kind import CachedLayer
from longshore.worker.drafting.draft_layers import draft_name
from longshore.worker.drafting.drafter import Drafter
from longshore.worker.kernels.argmax import argmax
from longshore.worker.layers.matrix_memory import MatrixMemory
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors
from longshore.worker.loading.loadable_model import LoadableModel
from longshore.worker.models.decoder_model import DecoderModel


class DraftWeights(ABC):
    """Weights of a layer of its own. A LoadableModel."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    @abstractmethod
    def checkpoint_tensors(self) -> StoredTensors: ...

    @abstractmethod
    def is_redundant(self, name: str) -> bool: ...

    @property
    def memories(self) -> Sequence[MatrixMemory]:
        return self._placement.memories

    def loaded(self) -> None:
        self._placement.loaded()

    def copy_of(self, name: str) -> str | None:
        return None


class DraftNetwork(ABC):
    """Computes hidden states of its own for each token, of which a head makes the logits of the
    next one.

    weights: what is loaded.
    reads_hidden: it reads the hidden state before each token: the model's, or, of a token after a
             draft, its own.
    """

    weights: LoadableModel
    reads_hidden: bool

    @abstractmethod
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        """Its layers, in the numbering of `attention.forward`, by their names in
        `DraftLayers.cache_specs`."""

    @abstractmethod
    def forward(
        self, token_ids: Tensor, previous: Tensor, positions: Tensor, attention: AttentionStep
    ) -> Tensor:
        """The hidden states of tokens, (n, hidden_size), after writing their KV. All shards call
        it.

        token_ids, positions: (n,) int32 and int64.
        previous:  (n, hidden_size), hidden states of the tokens before, if `reads_hidden`.
        """

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Of its own hidden states, and of what `states_of` returns."""

    def states_of(self, hidden: Tensor) -> Tensor:
        """What `forward` reads of the model: (n, hidden_size) for the tokens of the step that was
        just computed, if `reads_hidden`. hidden: the model's, before its last norm."""
        return hidden

    @abstractmethod
    def next_tokens(self, hidden: Tensor) -> Tensor:
        """The most likely token after each. hidden: (n, hidden_size) from `forward` -> (n,) int64,
        the same on all shards, which all call it."""


class DraftModel(DraftNetwork):
    """A small model with the tokens of the large one."""

    reads_hidden = False

    def __init__(self, model: DecoderModel, vocab_size: int) -> None:
        """vocab_size: of the large model; some families round theirs up by size."""
        self.weights = self._model = model
        self._vocab_size = vocab_size

    def cached_layers(self) -> tuple[CachedLayer, ...]:
        layers = self._model.cached_layers()
        return tuple(replace(layer, name=draft_name(layer.name)) for layer in layers)

    def forward(
        self, token_ids: Tensor, previous: Tensor, positions: Tensor, attention: AttentionStep
    ) -> Tensor:
        known = token_ids.clamp(max=self._model.config.vocab_size - 1)
        return self._model.forward(known, positions, attention)

    @property
    def hidden_size(self) -> int:
        return self._model.config.hidden_size

    def next_tokens(self, hidden: Tensor) -> Tensor:
        return argmax(self._model.logits(hidden)[:, : self._vocab_size])[0]


class MadeDrafts(Drafter):
    """The drafts that the device has made. made: those of the last step, by row."""

    def __init__(self) -> None:
        self.made: Mapping[int, Sequence[int]] = {}

    def start(self, row: int, token_ids: Int32Array, num_prompt: int) -> None:
        """The device has the tokens."""

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        """The device has sampled them."""

    def propose(self, row: int, max_tokens: int) -> Sequence[int]:
        return self.made.get(row, ())[:max_tokens]

    def rewind(self, row: int, num_tokens: int) -> None:
        """The next step shows it."""

    def end(self, row: int, *, is_finished: bool) -> None:
        """Nothing was kept."""
