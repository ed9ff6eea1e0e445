"""The base class of all models: embedding, layers, final norm, head. A family adds its layer.

A rank holds a shard of every layer of its pipeline stage. The first stage has the embedding, the
last the norm and the head; a head that is tied to the embedding is held by both.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, Protocol, TypeAlias

import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionStep, EncodingStep
from longshore.worker.attention.kind import CachedLayer, Kind, PagedAttentionKind
from longshore.worker.config import QuantisedProducts
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.kv_cache.plan import cache_name
from longshore.worker.layers.classification_head import (
    ClassificationHead,
    PooledClassificationHead,
)
from longshore.worker.layers.embedding import OutputHead, VocabParallelEmbedding
from longshore.worker.layers.layer_norm import LayerNorm
from longshore.worker.layers.matrix_memory import MatrixMemory
from longshore.worker.layers.moe_router import Router
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.rms_norm import RMSNorm
from longshore.worker.layers.rotary import rotary_table
from longshore.worker.layers.stored_tensor import StoredTensor, StoredTensors
from longshore.worker.loading.tensor_names import CLASSIFIER, EMBEDDINGS, HEAD, NORM, renamed
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.ranks.parallel import ALONE, Parallel

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")

LabelHead: TypeAlias = ClassificationHead | PooledClassificationHead


class DecoderLayer(Protocol):
    """One layer of a family."""

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        layer: int,
        rotation: Rotation,
        attention: AttentionStep,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states, before and after, are x + residual, each (n, hidden_size); None is zeros.
        They are separate so that the next norm can add them in the same pass. Both may be
        overwritten. layer: index among the layers of this rank."""
        ...

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        """name: checkpoint name of the layer, such as `model.layers.0`."""
        ...


class DecoderModel(ABC):
    """A model for causal language modelling. Uninitialised until `checkpoint_tensors` are filled.

    max_model_len: maximum tokens of a request; rotary positions are tabulated up to it.
    norm_type:     class of the final norm, before the head; None: there is none.
    products:      see Placement.
    taps:          by layer of this rank, memory (max_tokens, hidden_size) to which each step copies
                   the hidden states before it.
    Raises UnsupportedModel if the model cannot be divided evenly among the ranks.
    """

    norm_type: ClassVar[type[RMSNorm] | type[LayerNorm] | None] = RMSNorm

    def __init__(
        self,
        config: DecoderConfig,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        parallel: Parallel = ALONE,
        products: QuantisedProducts | None = None,
    ) -> None:
        config.check_split(num_shards=parallel.num_shards, num_stages=parallel.num_stages)
        self.config = config
        self.max_model_len = max_model_len
        self.parallel = parallel
        self._placement = Placement(dtype, device, parallel, products)
        self.num_local_heads = config.num_heads // parallel.num_shards
        self.num_local_kv_heads = config.num_local_kv_heads(parallel.num_shards)
        self.taps: Mapping[int, Tensor] = {}
        self._layer_indices = parallel.layers(config.num_layers)
        ropes = [config.rope_of(layer) for layer in self._layer_indices]
        tables = {
            rope: rotary_table(
                rope, rotary_dim=config.rotary_dim, max_positions=max_model_len, device=device
            )
            for rope in dict.fromkeys(ropes)
        }
        self._rotary_tables = [tables[rope] for rope in ropes]
        self.layers: Sequence[DecoderLayer] = [
            self.make_layer(self._placement, layer) for layer in self._layer_indices
        ]
        first, last = parallel.is_first_stage, parallel.is_last_stage
        is_tied = config.tie_word_embeddings
        size = (config.vocab_size, config.hidden_size, self._placement)
        has_table = first or (last and is_tied and config.has_head)
        self.embedding = VocabParallelEmbedding(*size) if has_table else None
        self.norm: RMSNorm | LayerNorm | None = None
        self.head: OutputHead | None = None
        self.classifier: LabelHead | None = None
        if last:
            if self.norm_type is not None:
                self.norm = self.norm_type(config.hidden_size, config.rms_norm_eps, self._placement)
            if config.has_head:
                self.head = OutputHead(*size, tied_to=self.embedding if is_tied else None)
            if config.labels:
                self.classifier = self.make_classifier()

    @abstractmethod
    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        """Build one layer; `self.config` is already set. layer: index in the whole model."""

    def make_classifier(self) -> LabelHead:
        """Build the classification head; for models with labels."""
        config = self.config
        return ClassificationHead(
            len(config.labels), config.hidden_size, self._placement, tokens=config.label_tokens
        )

    def attention_kind(self, layer: int) -> Kind:
        """How a layer is computed; `config.cache_spec` says what it caches. A family with layers of
        several kinds overrides both. layer: index in the whole model."""
        reach = self.config.reach_of(layer)
        return PagedAttentionKind(
            num_heads=self.num_local_heads,
            scale=self.config.score_scale,
            window=reach.window,
            chunk=reach.chunk,
            softcap=self.config.score_softcap,
        )

    def cached_layers(self) -> tuple[CachedLayer, ...]:
        """This rank's cached layers, in the numbering of `attention.forward`, with their names in
        `config.cache_specs`."""
        return tuple(
            CachedLayer(cache_name(layer), self.attention_kind(layer))
            for layer in self._layer_indices
        )

    @property
    def routers(self) -> list[Router]:
        """The routers of this rank's mixtures of experts, in the order of the layers."""
        mixtures = (getattr(layer, "mlp", None) for layer in self.layers)
        routers = (getattr(mixture, "router", None) for mixture in mixtures)
        return [router for router in routers if isinstance(router, Router)]

    def forward(self, inputs: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """The hidden states after this stage's layers, (n, hidden_size), before the final norm.

        inputs:    token ids, (n,) int32, on the first stage; on other stages the result of the
                   previous one, (n, hidden_size), which is overwritten.
        positions: (n,) int64, below max_model_len.
        """
        x = self.embed(inputs) if self.parallel.is_first_stage else inputs
        x, residual = self.run_layers(x, positions, attention)
        return x if residual is None else residual.add_(x)

    def encode(self, samples: Tensor) -> Tensor:
        """Encode audio: (config.max_audio_samples,) float32 at config.sampling_rate ->
        (config.max_encoder_tokens, hidden_size). Called on all shards. For families with an
        encoder."""
        raise NotImplementedError(f"{type(self).__name__} has no encoder")

    def write_encoded(self, encoded: Tensor, row: int, attention: EncodingStep) -> None:
        """Write the KV of a row's encoder tokens, (num_tokens, hidden_size). Called when the row
        starts, before the step's tokens are computed, on all shards."""
        raise NotImplementedError(f"{type(self).__name__} has no encoder")

    def run_layers(
        self, x: Tensor, positions: Tensor, attention: AttentionStep
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers only. Returns hidden states as a sum, see DecoderLayer. Overwrites x."""
        residual: Tensor | None = None
        for index, (layer, table) in enumerate(zip(self.layers, self._rotary_tables, strict=True)):
            if (tap := self.taps.get(index)) is not None:
                tap[: len(x)] = x if residual is None else x + residual
            x, residual = layer(x, residual, index, Rotation(positions, table), attention)
        return x, residual

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids: (n,) int32 -> (n, hidden_size)."""
        assert self.embedding is not None, "only the first stage embeds"
        return self.embedding(token_ids)

    def last_norm(self, hidden: Tensor) -> Tensor:
        """The final norm, from whose output vectors are pooled. hidden: (n, hidden_size) from
        `forward` of the last stage -> the same shape."""
        if self.norm_type is None:
            return hidden
        assert self.norm is not None, "only the last stage has a norm and a head"
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (n, hidden_size) from `forward` of the last stage -> (n, vocab_size) float32. All
        shards must call this, and all get the same result."""
        assert self.head is not None
        scale, cap = self.config.logit_scale, self.config.logit_softcap
        return self.head(self.last_norm(hidden), scale=scale, cap=cap)

    def checkpoint_tensors(self) -> StoredTensors:
        """The checkpoint tensors that this rank needs, with their destinations."""
        tensors: StoredTensors = {}
        if self.embedding is not None:
            tensors[EMBEDDINGS] = self.embedding.stored()
        if self.norm is not None:
            tensors |= self.norm.checkpoint_tensors("model.norm")
        if self.head is not None and not self.head.is_tied:
            tensors[HEAD] = self.head.stored()
        if self.classifier is not None:
            self._add_classifier(tensors, self.classifier)
        for index, layer in zip(self._layer_indices, self.layers, strict=True):
            tensors |= layer.checkpoint_tensors(f"model.layers.{index}")
        names = self.config.stored_names
        return {renamed(name, names): tensor for name, tensor in tensors.items()}

    def _add_classifier(self, tensors: StoredTensors, head: LabelHead) -> None:
        if isinstance(head, PooledClassificationHead):
            tensors |= head.checkpoint_tensors()
            return
        if head.tokens is None:
            tensors[CLASSIFIER] = head.stored()
            return
        rows = head.in_output_head(self.config.vocab_size)
        name = EMBEDDINGS if self.config.tie_word_embeddings else HEAD
        others = tensors[name].parts if name in tensors else ()
        tensors[name] = StoredTensor(rows.shape, (*others, *rows.parts))

    @property
    def memories(self) -> Sequence[MatrixMemory]:
        """See LoadableModel."""
        return self._placement.memories

    def loaded(self) -> None:
        """Called once every tensor is filled: pack the weights. They cannot be filled again."""
        self._placement.loaded()

    def is_redundant(self, name: str) -> bool:
        """Whether the checkpoint may have this tensor although the model does not need it: no rank
        needs it, or it belongs to another stage."""
        name = self.config.own_name(name)
        layer = _LAYER.match(name)
        return bool(
            self.config.is_redundant(name)
            or (name in (EMBEDDINGS, NORM, HEAD) and self.parallel.num_stages > 1)
            or (name == CLASSIFIER and self.config.labels and not self.parallel.is_last_stage)
            or (layer is not None and self._is_elsewhere(int(layer[1])))
        )

    def _is_elsewhere(self, layer: int) -> bool:
        return layer < self.config.num_layers and layer not in self._layer_indices

    def copy_of(self, name: str) -> str | None:
        """See LoadableModel."""
        original = self.config.copy_of(self.config.own_name(name))
        return None if original is None else renamed(original, self.config.stored_names)
