"""Mixtral: a Llama with a mixture of experts instead of the MLP."""

from typing import Final

from longshore.worker.layers.attention import SelfAttention
from longshore.worker.layers.moe import ExpertForm, MixtureOfExperts, SplitExperts
from longshore.worker.layers.moe_router import Routing
from longshore.worker.layers.placement import Placement
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel
from longshore.worker.models.llama import PreNormLayer
from longshore.worker.models.mixtral_config import MixtralConfig

EXPERTS: Final = ExpertForm(stored=SplitExperts(gate="w1", up="w3", down="w2"))


class Mixtral(DecoderModel):
    config: MixtralConfig

    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        config = self.config
        routing = Routing(num_experts=config.num_experts, top_k=config.top_k, renormalise=True)
        return PreNormLayer(
            config,
            placement,
            attention=SelfAttention(config, placement),
            mlp=MixtureOfExperts(
                config.hidden_size, config.intermediate_size, routing, EXPERTS, placement
            ),
            mlp_name="block_sparse_moe",
        )
