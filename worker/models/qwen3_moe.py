"""Qwen3-MoE: a Qwen3 with mixtures of experts in all layers that are not dense."""

from typing import Final

from longshore.worker.layers.attention import HeadNormAttention
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.moe import ExpertForm, MixtureOfExperts, SplitExperts
from longshore.worker.layers.moe_router import Routing
from longshore.worker.layers.placement import Placement
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel
from longshore.worker.models.llama import FeedForward, PreNormLayer
from longshore.worker.models.qwen3_moe_config import Qwen3MoeConfig

EXPERTS: Final = ExpertForm(stored=SplitExperts())


class Qwen3Moe(DecoderModel):
    config: Qwen3MoeConfig

    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        config = self.config
        mlp: FeedForward
        if layer in config.dense_layers:
            mlp = GatedMLP(config, placement)
        else:
            routing = Routing(
                num_experts=config.num_experts,
                top_k=config.top_k,
                renormalise=config.renormalise,
            )
            mlp = MixtureOfExperts(
                config.hidden_size, config.expert_width, routing, EXPERTS, placement
            )
        return PreNormLayer(
            config, placement, attention=HeadNormAttention(config, placement), mlp=mlp
        )
