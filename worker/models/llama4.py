"""Llama 4, text."""

from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from longshore.worker.kernels.rotary import Rotation
from longshore.worker.layers.attention import Prepared, SelfAttention
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.moe import ExpertForm, MixtureOfExperts, StackedExperts
from longshore.worker.layers.moe_router import Routing
from longshore.worker.layers.placement import Placement
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel
from longshore.worker.models.llama import FeedForward, PreNormLayer
from longshore.worker.models.llama4_config import Llama4Config

EXPERTS: Final = ExpertForm(stored=StackedExperts(), weighs_inputs=True)


class RopeAttention(SelfAttention):
    """Rotary attention. The rotary pairs of the checkpoint are elements (2 i, 2 i + 1) of a head.
    Queries and keys are reordered after loading, so that pairs are (i, i + head_dim / 2) as in
    other families; this does not change their products.

    Heads are normalised before the rotation. The reference does it after, which is equal, because
    a rotation keeps the length.
    """

    def __init__(self, config: Llama4Config, placement: Placement) -> None:
        super().__init__(config, placement)
        num_rows = self.queries.num_local + self.keys.num_local
        rows = torch.arange(num_rows + self.keys.num_local)
        turned = rows[:num_rows].view(-1, self.head_dim // 2, 2).transpose(1, 2).flatten()
        self.qkv.reorder(torch.cat((turned, rows[num_rows:])))
        self._eps = config.rms_norm_eps
        self._ones = placement.empty(config.head_dim).fill_(1) if config.use_qk_norm else None

    def prepare(self, q: Tensor, k: Tensor, rotation: Rotation) -> Prepared:
        return q, k, rotation.with_norms(self._ones, self._ones, self._eps)


class NoPositionAttention(SelfAttention):
    """Attention without positions. Queries grow with their position, so that the softmax over many
    tokens stays equally sharp (Nakanishi, 2025).

    factors: (max_positions, 1, 1) float32, by which queries grow; None: they do not.
    """

    def __init__(
        self, config: Llama4Config, placement: Placement, *, factors: Tensor | None
    ) -> None:
        super().__init__(config, placement)
        self._factors = factors

    def prepare(self, q: Tensor, k: Tensor, rotation: Rotation) -> Prepared:
        if self._factors is not None:
            q.mul_(self._factors.index_select(0, rotation.positions))
        return q, k, None


class Llama4(DecoderModel):
    config: Llama4Config

    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        config = self.config
        attention: SelfAttention
        if layer in config.rope_layers:
            attention = RopeAttention(config, placement)
        else:
            attention = NoPositionAttention(config, placement, factors=self._query_factors)
        mlp: FeedForward
        if layer in config.expert_layers:
            routing = Routing(num_experts=config.num_experts, top_k=config.top_k, scoring="sigmoid")
            mlp = MixtureOfExperts(
                config.hidden_size,
                config.expert_width,
                routing,
                EXPERTS,
                placement,
                router_name="router",
                shared_width=config.expert_width,
                shared_name="shared_expert",
            )
        else:
            mlp = GatedMLP(config, placement)
        return PreNormLayer(
            config,
            placement,
            attention=attention,
            mlp=mlp,
            mlp_name="feed_forward",
        )

    @cached_property
    def _query_factors(self) -> Tensor | None:
        """See NoPositionAttention; the same for all layers."""
        config = self.config
        if not config.attn_scale:
            return None
        positions = torch.arange(self.max_model_len, dtype=torch.float32)
        num_floors = torch.floor((positions + 1) / config.floor_scale)
        factors = torch.log1p(num_floors).mul_(config.attn_scale).add_(1)
        return factors.view(-1, 1, 1).to(self._placement.device)
