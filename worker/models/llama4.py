"""Llama 4, text."""

from typing import Final

import torch
from torch import Tensor

from longshore.worker.kernels.rotary import rotary_
from longshore.worker.layers.attention import SelfAttention
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.moe import ExpertForm, MixtureOfExperts, StackedExperts
from longshore.worker.layers.moe_router import Routing
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.rotary import Rotation
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
        placement.when_loaded(self._reorder)  # registered first: it must run before packing
        super().__init__(config, placement)
        self._eps = config.rms_norm_eps
        self._ones = placement.empty(config.head_dim).fill_(1) if config.use_qk_norm else None

    def prepare(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        positions, table = rotation
        rotary_(q, k, positions, table, q_norm=self._ones, k_norm=self._ones, eps=self._eps)
        return q, k

    def _reorder(self) -> None:
        bias = self.qkv.bias
        num_rows = self.queries.num_local + self.keys.num_local
        for stored in (self.qkv.weight.stored, *(() if bias is None else (bias,))):
            pairs = stored[:num_rows].view(-1, self.head_dim // 2, 2, *stored.shape[1:])
            stored[:num_rows] = pairs.transpose(1, 2).reshape(num_rows, *stored.shape[1:])


class NoPositionAttention(SelfAttention):
    """Attention without positions. Queries grow with their position, so that the softmax over many
    tokens stays equally sharp (Nakanishi, 2025)."""

    def __init__(self, config: Llama4Config, placement: Placement) -> None:
        super().__init__(config, placement)
        self._config = config

    def prepare(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        scale = self._config.attn_scale
        if not scale:
            return q, k
        num_floors = torch.floor((rotation.positions.float() + 1) / self._config.floor_scale)
        factors = torch.log1p(num_floors).mul_(scale).add_(1).view(-1, 1, 1)
        return (q * factors).to(q.dtype), k


class Llama4(DecoderModel):
    config: Llama4Config

    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        config = self.config
        attend = RopeAttention if layer in config.rope_layers else NoPositionAttention
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
            attention=attend(config, placement),
            mlp=mlp,
            mlp_name="feed_forward",
        )
