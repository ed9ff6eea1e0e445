"""EAGLE-3 (Li et al., 2025): a layer that reads hidden states from three depths of the model.

They are projected to one. For each token, the layer attends with its embedding and the state of the
token before; later tokens are drafted from its own hidden states. The head has frequent tokens
only, and a table of their ids.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.attention.kind import CachedLayer, PagedAttentionKind
from longshore.worker.drafting.draft_layers import draft_name
from longshore.worker.drafting.eagle_config import NUM_STATES, EagleConfig
from longshore.worker.drafting.network import DraftNetwork, DraftWeights
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.kernels.argmax import argmax
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.kv_cache.plan import cache_name
from longshore.worker.layers.attention import SelfAttention
from longshore.worker.layers.embedding import OutputHead, VocabParallelEmbedding
from longshore.worker.layers.linear import ColumnParallelLinear, Columns
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.rms_norm import RMSNorm
from longshore.worker.layers.rotary import rotary_table
from longshore.worker.layers.stored_tensor import StoredTensors
from longshore.worker.loading.stored_weights import StoredWeights
from longshore.worker.models.decoder_model import DecoderModel

_LAYER_NAMES = ("midlayer", "layers.0")


class EagleWeights(DraftWeights):
    """names: of the tensors in the checkpoint."""

    def __init__(self, config: EagleConfig, placement: Placement, names: Sequence[str]) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(placement)
        self._layer_name = next(
            (name for name in _LAYER_NAMES if any(each.startswith(name) for each in names)),
            _LAYER_NAMES[0],
        )
        columns = (Columns(size, slice(0, size)),)  # every shard computes all
        self.projection = ColumnParallelLinear(
            NUM_STATES * config.model_hidden_size, columns, bias=False, placement=placement
        )
        self.embedding: VocabParallelEmbedding | None = None
        if "embed_tokens.weight" in names or size != config.model_hidden_size:
            self.embedding = VocabParallelEmbedding(config.vocab_size, size, placement)
        self.embedding_norm = RMSNorm(size, eps, placement)
        self.hidden_norm = RMSNorm(size, eps, placement)
        self.attention = SelfAttention(config, placement, in_features=2 * size)
        self.post_attention_norm = RMSNorm(size, eps, placement)
        self.mlp = GatedMLP(config, placement)
        self.last_norm = RMSNorm(size, eps, placement)
        self.head = OutputHead(config.num_draft_tokens, size, placement)

    def checkpoint_tensors(self) -> StoredTensors:
        name = self._layer_name
        tensors: StoredTensors = {
            **self.projection.checkpoint_tensors(["fc"]),
            **self.embedding_norm.checkpoint_tensors(f"{name}.input_layernorm"),
            **self.hidden_norm.checkpoint_tensors(f"{name}.hidden_norm"),
            **self.attention.checkpoint_tensors(f"{name}.self_attn"),
            **self.post_attention_norm.checkpoint_tensors(f"{name}.post_attention_layernorm"),
            **self.mlp.checkpoint_tensors(f"{name}.mlp"),
            **self.last_norm.checkpoint_tensors("norm"),
            "lm_head.weight": self.head.stored(),
        }
        if self.embedding is not None:
            tensors["embed_tokens.weight"] = self.embedding.stored()
        return tensors

    def is_redundant(self, name: str) -> bool:
        """d2t is read on its own; t2d says the same."""
        return name in ("d2t", "t2d") or name.endswith("rotary_emb.inv_freq")


class EagleDrafter(DraftNetwork):
    """Raises UnsupportedModel if the hidden states of this model cannot be read."""

    reads_hidden = True

    def __init__(
        self,
        model: DecoderModel,
        config: EagleConfig,
        placement: Placement,
        stored: StoredWeights | None,
        *,
        max_tokens: int,
    ) -> None:
        """stored: its weights; None: they are random. max_tokens: of a step."""
        if type(model).run_layers is not DecoderModel.run_layers:
            raise UnsupportedModel(
                "speculative_config: eagle3 cannot read the hidden states of this model's layers"
            )
        self._model, self._config = model, config
        names = [] if stored is None else list(stored.tensors)
        self.weights = self._layer = EagleWeights(config, placement, names)
        self._rotary_table = rotary_table(
            config.rope_of(0),
            rotary_dim=config.rotary_dim,
            max_positions=model.max_model_len,
            device=placement.device,
        )
        self._token_ids = _token_ids(config, stored)
        if self._token_ids is not None:
            self._token_ids = self._token_ids.to(placement.device)
        size = model.config.hidden_size
        self._states = torch.zeros(
            (max_tokens, NUM_STATES * size), dtype=placement.dtype, device=placement.device
        )
        model.taps = dict(zip(config.read_layers, self._states.split(size, dim=1), strict=True))

    @property
    def hidden_size(self) -> int:
        return self._config.hidden_size

    def cached_layers(self) -> tuple[CachedLayer, ...]:
        parallel = self._model.parallel
        num_heads = self._config.num_heads // parallel.num_shards
        return (CachedLayer(draft_name(cache_name(0)), PagedAttentionKind(num_heads=num_heads)),)

    def states_of(self, hidden: Tensor) -> Tensor:
        return self._layer.projection(self._states[: len(hidden)])

    def forward(
        self, token_ids: Tensor, previous: Tensor, positions: Tensor, attention: AttentionStep
    ) -> Tensor:
        layer = self._layer
        embed = self._model.embed if layer.embedding is None else layer.embedding
        normed = layer.hidden_norm(previous)
        x = torch.cat((layer.embedding_norm(embed(token_ids)), normed), dim=1)
        residual = normed if self._config.adds_normed_hidden else previous
        x = layer.attention(x, 0, Rotation(positions, self._rotary_table), attention)
        x, residual = layer.post_attention_norm.after_add(x, residual)
        hidden: Tensor = residual + layer.mlp(x)
        return hidden

    def next_tokens(self, hidden: Tensor) -> Tensor:
        best = argmax(self._layer.head(self._layer.last_norm(hidden)))[0]
        return best if self._token_ids is None else self._token_ids[best]


def _token_ids(config: EagleConfig, stored: StoredWeights | None) -> Tensor | None:
    """(num_draft_tokens,) int64, the model's id of each token of the head; None: they are the same.
    Raises BrokenCheckpoint."""
    if config.num_draft_tokens == config.vocab_size:
        return None
    own = torch.arange(config.num_draft_tokens)
    if stored is None:
        return own
    if "d2t" not in stored.tensors:
        raise BrokenCheckpoint(
            f"{stored.model_dir}: the head has draft_vocab_size={config.num_draft_tokens} tokens, "
            f"but there is no table d2t of their ids"
        )
    with stored.reader() as read:
        ids: Tensor = own + read("d2t", (slice(None),)).long()
    if not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
        raise BrokenCheckpoint(
            f"{stored.model_dir}: d2t has ids outside 0..{config.vocab_size - 1}"
        )
    return ids
