"""BERT and RoBERTa: encoders with learned positions, and a norm after each half of a layer."""

import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.attention.bidirectional_backend import BidirectionalAttentionKind
from longshore.worker.attention.kind import Kind
from longshore.worker.config import QuantisedProducts
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.layers.attention import NoPEAttention
from longshore.worker.layers.classification_head import PooledClassificationHead
from longshore.worker.layers.layer_norm import LayerNorm
from longshore.worker.layers.mlp import MLP
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors, whole
from longshore.worker.models.bert_config import BertConfig
from longshore.worker.models.decoder_model import DecoderModel
from longshore.worker.ranks.parallel import ALONE, Parallel

QKV = ("self.query", "self.key", "self.value")


class BertLayer:
    """x = norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, config: BertConfig, placement: Placement) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention = NoPEAttention(config, placement, qkv_names=QKV, out_name="output.dense")
        self.attention_norm = LayerNorm(size, eps, placement)
        self.mlp = MLP(
            size,
            config.intermediate_size,
            config.activation,
            placement,
            names=("intermediate.dense", "output.dense"),
        )
        self.mlp_norm = LayerNorm(size, eps, placement)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        layer: int,
        rotation: Rotation,
        attention: AttentionStep,
    ) -> tuple[Tensor, None]:
        x, _ = self.attention_norm.after_add(self.attention(x, layer, rotation, attention), x)
        x, _ = self.mlp_norm.after_add(self.mlp(x), x)
        return x, None

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            **self.attention.checkpoint_tensors(f"{name}.attention"),
            **self.attention_norm.checkpoint_tensors(f"{name}.attention.output.LayerNorm"),
            **self.mlp.checkpoint_tensors(name),
            **self.mlp_norm.checkpoint_tensors(f"{name}.output.LayerNorm"),
        }


class Bert(DecoderModel):
    """positions: (first_position + max_position_embeddings, hidden_size). token_types:
    (num_token_types, hidden_size)."""

    config: BertConfig
    norm_type = None

    def __init__(
        self,
        config: BertConfig,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        parallel: Parallel = ALONE,
        products: QuantisedProducts | None = None,
    ) -> None:
        super().__init__(
            config,
            max_model_len=max_model_len,
            dtype=dtype,
            device=device,
            parallel=parallel,
            products=products,
        )
        size, placement = config.hidden_size, self._placement
        num_positions = config.first_position + config.max_position_embeddings
        self.positions = placement.empty(num_positions, size)
        self.token_types = placement.empty(config.num_token_types, size)
        self.embedding_norm = LayerNorm(size, config.rms_norm_eps, placement)

    def make_layer(self, placement: Placement, layer: int) -> BertLayer:
        return BertLayer(self.config, placement)

    def make_classifier(self) -> PooledClassificationHead:
        config = self.config
        return PooledClassificationHead(
            len(config.labels), config.hidden_size, self._placement, names=config.head_names
        )

    def attention_kind(self, layer: int) -> Kind:
        return BidirectionalAttentionKind()

    def forward(self, inputs: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        x = self.embed(inputs)
        x.add_(self.positions.index_select(0, positions + self.config.first_position))
        x.add_(self._token_types(inputs, positions))
        x, _ = self.run_layers(self.embedding_norm(x), positions, attention)
        return x

    def _token_types(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Type 1 for the tokens after the first separator of a prompt, so for the second text of a
        pair; else type 0. (n, hidden_size), or one row for all."""
        separator = self.config.separator_id
        if separator is None:
            return self.token_types[:1]
        is_separator = (token_ids == separator).long()
        num_before = is_separator.cumsum(0).sub_(is_separator)
        indices = torch.arange(len(positions), device=positions.device)
        # A prompt is computed whole. Only the warm-up has a step that begins later in a prompt.
        starts = (indices - positions).clamp_(min=0)
        types = (num_before - num_before.index_select(0, starts)).clamp_(max=1)
        return self.token_types.index_select(0, types)

    def checkpoint_tensors(self) -> StoredTensors:
        name = f"{self.config.encoder}.embeddings"
        return {
            **super().checkpoint_tensors(),
            f"{name}.position_embeddings.weight": whole(self.positions),
            f"{name}.token_type_embeddings.weight": whole(self.token_types),
            **self.embedding_norm.checkpoint_tensors(f"{name}.LayerNorm"),
        }
