"""Multi-token prediction (DeepSeek-V3, 2024, section 2.2): one more layer after the model's last.

It reads the embedding of a token and the model's hidden state of the token before, both normalised,
and predicts the token after. Later tokens are drafted by the same layer from its own hidden states.
In training, it never saw the first token of a text, which has none before it; here that token has
keys and values from a hidden state of zeros, so that position j of every cached layer is token j.
"""

import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.attention.kind import CachedLayer
from longshore.worker.drafting.draft_layers import draft_name
from longshore.worker.drafting.network import DraftNetwork, DraftWeights
from longshore.worker.kernels.argmax import argmax
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.kv_cache.plan import cache_name
from longshore.worker.layers.linear import ColumnParallelLinear, Columns
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.rms_norm import RMSNorm
from longshore.worker.layers.rotary import rotary_table
from longshore.worker.layers.stored_tensor import StoredTensors, whole
from longshore.worker.loading.tensor_names import renamed
from longshore.worker.models.decoder_model import DecoderModel


class MtpWeights(DraftWeights):
    """The first layer for multi-token prediction, in the checkpoint of its model."""

    def __init__(self, model: DecoderModel, placement: Placement) -> None:
        config = model.config
        size, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(placement)
        self._config = config
        self._name = f"model.layers.{config.num_layers}"
        self.embedding_norm = RMSNorm(size, eps, placement)
        self.hidden_norm = RMSNorm(size, eps, placement)
        columns = (Columns(size, slice(0, size)),)  # every shard computes all
        self.projection = ColumnParallelLinear(2 * size, columns, bias=False, placement=placement)
        self.layer = model.make_layer(placement, config.num_layers)
        self.last_norm = RMSNorm(size, eps, placement)

    def checkpoint_tensors(self) -> StoredTensors:
        name, names = self._name, self._config.stored_names
        tensors: StoredTensors = {
            f"{name}.enorm.weight": whole(self.embedding_norm.weight),
            f"{name}.hnorm.weight": whole(self.hidden_norm.weight),
            **self.projection.checkpoint_tensors([f"{name}.eh_proj"]),
            f"{name}.shared_head.norm.weight": whole(self.last_norm.weight),
            **self.layer.checkpoint_tensors(name),
        }
        return {renamed(each, names): tensor for each, tensor in tensors.items()}

    def is_redundant(self, name: str) -> bool:
        """The other tensors are those of the model, which has been loaded."""
        return True


class MtpDrafter(DraftNetwork):
    """Shares the embeddings and the head of the model."""

    reads_hidden = True

    def __init__(
        self,
        model: DecoderModel,
        placement: Placement,
    ) -> None:
        self._model = model
        config = model.config
        self.weights = self._layer = MtpWeights(model, placement)
        self._rotary_table = rotary_table(
            config.rope_of(config.num_layers - 1),
            rotary_dim=config.rotary_dim,
            max_positions=model.max_model_len,
            device=placement.device,
        )

    def cached_layers(self) -> tuple[CachedLayer, ...]:
        layer = self._model.config.num_layers
        return (CachedLayer(draft_name(cache_name(layer)), self._model.attention_kind(layer)),)

    def forward(
        self, token_ids: Tensor, previous: Tensor, positions: Tensor, attention: AttentionStep
    ) -> Tensor:
        weights = self._layer
        parts = weights.embedding_norm(self._model.embed(token_ids)), weights.hidden_norm(previous)
        x = weights.projection(torch.cat(parts, dim=1))
        rotation = Rotation(positions, self._rotary_table)
        x, residual = weights.layer(x, None, 0, rotation, attention)
        return weights.last_norm(x if residual is None else residual.add_(x))

    @property
    def hidden_size(self) -> int:
        return self._model.config.hidden_size

    def states_of(self, hidden: Tensor) -> Tensor:
        return self._model.last_norm(hidden)

    def next_tokens(self, hidden: Tensor) -> Tensor:
        """Without the model's last norm, in whose place is the layer's own."""
        head = self._model.head
        assert head is not None
        return argmax(head(hidden))[0]
