"""Qwen3-Next and Qwen3.5, text: pre-norm layers of gated DeltaNet or gated attention, with an MLP
or a mixture of experts. All norms but those of gated DeltaNet store their weights minus one."""

from typing import ClassVar

from longshore.worker.attention.kind import Kind
from longshore.worker.layers.attention import GatedAttention
from longshore.worker.layers.delta_net import GatedDeltaNet, delta_kind
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.moe import (
    ExpertForm,
    MixtureOfExperts,
    SplitExperts,
    StackedExperts,
)
from longshore.worker.layers.moe_router import Routing
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.rms_norm import OffsetRMSNorm, RMSNorm
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel
from longshore.worker.models.llama import Attention, FeedForward, PreNormLayer
from longshore.worker.models.qwen3_next_config import Mixture, Qwen3NextConfig


class Qwen3Next(DecoderModel):
    norm_type: ClassVar[type[RMSNorm]] = OffsetRMSNorm
    config: Qwen3NextConfig

    def attention_kind(self, layer: int) -> Kind:
        if layer in self.config.attention_layers:
            return super().attention_kind(layer)
        return delta_kind(self.config.delta, self.parallel.num_shards)

    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        config = self.config
        attends = layer in config.attention_layers
        mixer: Attention
        if attends:
            mixer = GatedAttention(config, placement)
        else:
            size, eps = config.hidden_size, config.rms_norm_eps
            mixer = GatedDeltaNet(config.delta, size, eps, placement)
        mlp: FeedForward
        if config.mixture is None or layer in config.dense_layers:
            mlp = GatedMLP(config, placement)
        else:
            mlp = _mixture(config.mixture, config.hidden_size, placement)
        return PreNormLayer(
            config,
            placement,
            attention=mixer,
            mlp=mlp,
            attention_name="self_attn" if attends else "linear_attn",
            norm_type=OffsetRMSNorm,
        )


def _mixture(mixture: Mixture, hidden_size: int, placement: Placement) -> MixtureOfExperts:
    stored = StackedExperts(is_transposed=False) if mixture.is_stacked else SplitExperts()
    routing = Routing(
        num_experts=mixture.num_experts, top_k=mixture.top_k, renormalise=mixture.renormalise
    )
    return MixtureOfExperts(
        hidden_size,
        mixture.expert_width,
        routing,
        ExpertForm(stored=stored),
        placement,
        shared_width=mixture.shared_width,
        shared_name="shared_expert",
        has_shared_gate=True,
    )
