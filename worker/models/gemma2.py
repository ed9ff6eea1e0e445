"""Gemma 2: norms before and after attention and MLP, scaled embeddings."""

import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.layers.attention import SelfAttention
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.rms_norm import OffsetRMSNorm
from longshore.worker.layers.stored_tensor import StoredTensors, whole
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel


class SandwichNormLayer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(
        self, config: DecoderConfig, placement: Placement, *, attention: SelfAttention
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = OffsetRMSNorm(size, eps, placement)
        self.attention = attention
        self.post_attention_norm = OffsetRMSNorm(size, eps, placement)
        self.pre_mlp_norm = OffsetRMSNorm(size, eps, placement)
        self.mlp = GatedMLP(config, placement)
        self.post_mlp_norm = OffsetRMSNorm(size, eps, placement)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        layer: int,
        rotation: Rotation,
        attention: AttentionStep,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_norm.after_add(x, residual)
        x = self.attention(x, layer, rotation, attention)
        x, residual = self.pre_mlp_norm.after_norm_and_add(self.post_attention_norm, x, residual)
        return self.post_mlp_norm(self.mlp(x)), residual

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            f"{name}.input_layernorm.weight": whole(self.input_norm.weight),
            f"{name}.post_attention_layernorm.weight": whole(self.post_attention_norm.weight),
            f"{name}.pre_feedforward_layernorm.weight": whole(self.pre_mlp_norm.weight),
            f"{name}.post_feedforward_layernorm.weight": whole(self.post_mlp_norm.weight),
            **self.attention.checkpoint_tensors(f"{name}.self_attn"),
            **self.mlp.checkpoint_tensors(f"{name}.mlp"),
        }


class Gemma2(DecoderModel):
    norm_type = OffsetRMSNorm

    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        attention = SelfAttention(self.config, placement)
        return SandwichNormLayer(self.config, placement, attention=attention)

    def embed(self, token_ids: Tensor) -> Tensor:
        vectors = super().embed(token_ids)
        # The factor is rounded to the model's dtype, as in training.
        factor = torch.tensor(self.config.hidden_size**0.5, dtype=vectors.dtype)
        return vectors.mul_(factor)
