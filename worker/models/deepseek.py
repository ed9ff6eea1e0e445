"""DeepSeek-V2 and V3."""

import logging
from typing import Final

from longshore.worker.attention.kind import Kind
from longshore.worker.attention.latent_backend import LatentAttentionKind
from longshore.worker.layers.latent_attention import LatentAttention
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.moe import ExpertForm, MixtureOfExperts, SplitExperts
from longshore.worker.layers.moe_router import Routing
from longshore.worker.layers.placement import Placement
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel
from longshore.worker.models.deepseek_config import DeepseekConfig, DeepseekV3Config
from longshore.worker.models.llama import PreNormLayer

logger = logging.getLogger(__name__)

EXPERTS: Final = ExpertForm(stored=SplitExperts())


class Deepseek(DecoderModel):
    """A Llama with latent attention and, after some dense layers, mixtures of experts."""

    config: DeepseekConfig

    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        config = self.config
        is_dense = config.is_dense(layer)
        return PreNormLayer(
            config,
            placement,
            attention=LatentAttention(config, placement),
            mlp=GatedMLP(config, placement) if is_dense else _mixture(config, placement),
        )

    def attention_kind(self, layer: int) -> Kind:
        config = self.config
        assert config.score_scale is not None
        return LatentAttentionKind(
            num_heads=self.num_local_heads,
            latent_dim=config.kv_lora_rank,
            rope_dim=config.qk_rope_head_dim,
            nope_dim=config.qk_nope_head_dim,
            value_dim=config.v_head_dim,
            scale=config.score_scale,
        )

    def loaded(self) -> None:
        super().loaded()
        if self.config.num_mtp_layers:
            logger.info(
                "num_nextn_predict_layers=%d: layers from model.layers.%d on are not part of the "
                "model; speculative_config with method mtp makes drafts with the first of them",
                self.config.num_mtp_layers,
                self.config.num_layers,
            )


def _mixture(config: DeepseekConfig, placement: Placement) -> MixtureOfExperts:
    is_v3 = isinstance(config, DeepseekV3Config)
    routing = Routing(
        num_experts=config.num_experts,
        top_k=config.top_k,
        scoring="sigmoid" if is_v3 else "softmax",
        renormalise=config.renormalises,
        scale=config.routed_scale,
        num_groups=config.num_groups,
        top_k_groups=config.top_k_groups,
        has_correction=is_v3,
    )
    return MixtureOfExperts(
        config.hidden_size,
        config.expert_dim,
        routing,
        EXPERTS,
        placement,
        shared_width=config.num_shared_experts * config.expert_dim,
    )
