"""LFM2 (Liquid AI, 2025): short convolutions, and attention in some layers, dense or with mixtures
of experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from longshore.protocol.errors import shortened
from longshore.protocol.kv_cache_spec import KVCacheSpec, StateSpec
from longshore.worker.errors import UnsupportedModel
from longshore.worker.kv_cache.plan import CacheSizes
from longshore.worker.models.bamba_config import read_layer_indices
from longshore.worker.models.decoder_config import (
    FULL,
    DecoderConfig,
    read_dense_fields,
    read_layer_types,
)
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.mamba2_config import state_spec
from longshore.worker.models.mixtral_config import read_top_k
from longshore.worker.models.tensor_shapes import (
    Shapes,
    gated_mlp,
    linear,
    norms,
    split_experts,
)

CONVOLUTION: Final = "conv"
MLP_NAMES: Final = ("w1", "w3", "w2")
"""Of gate, up and down."""
NORM_NAMES: Final = ("q_layernorm", "k_layernorm")


@dataclass(frozen=True, kw_only=True)
class ConvShape:
    """The sizes of a convolution layer, of the whole model or of one shard.

    width: tokens that a convolution covers, the newest included.
    bias:  whether it and its projections have biases.
    """

    num_channels: int
    width: int
    bias: bool

    def tensor_shapes(self, name: str) -> Shapes:
        size = self.num_channels
        shapes: Shapes = {
            **linear(f"{name}.in_proj", 3 * size, size, bias=self.bias),
            **linear(f"{name}.out_proj", size, size, bias=self.bias),
            f"{name}.conv.weight": (size, 1, self.width),
        }
        return shapes | {f"{name}.conv.bias": (size,)} if self.bias else shapes

    def shard(self, num_shards: int) -> "ConvShape":
        """The sizes on each of `num_shards` ranks, which divide the channels."""
        return replace(self, num_channels=self.num_channels // num_shards)

    def spec(self, sizes: CacheSizes) -> StateSpec:
        """What a rank caches of one layer: only the last inputs of the convolution. Each channel is
        a head without a state."""
        own = self.shard(sizes.num_shards)
        kept_inputs = (own.width - 1, own.num_channels)
        return state_spec((own.num_channels, 0), kept_inputs, (("head", 1),), sizes)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The mixtures of experts of LFM2-MoE.

    top_k:          experts per token.
    num_dense_layers: the first layers, which have an MLP instead.
    renormalise:    the weights of a token's experts are normalised to a sum of 1.
    scale:          factor on the weights.
    has_correction: whether the choice, but not the weights, has a bias.
    """

    num_experts: int
    top_k: int
    expert_width: int
    num_dense_layers: int
    renormalise: bool
    scale: float
    has_correction: bool


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(DecoderConfig):
    """intermediate_size is that of the dense layers.

    attention_layers: indices of the attention layers; all others are convolutions.
    mixture:          None: all layers are dense.
    """

    model_type = "lfm2"
    model = "longshore.worker.models.lfm2:Lfm2"
    stored_names: ClassVar[Mapping[str, str]] = {"model.norm.": "model.embedding_norm."}

    attention_layers: frozenset[int]
    convolution: ConvShape
    mixture: Mixture | None = None

    def has_experts(self, layer: int) -> bool:
        return self.mixture is not None and layer >= self.mixture.num_dense_layers

    def cut_sizes(self) -> dict[str, int]:
        sizes = super().cut_sizes() | {"hidden_size": self.hidden_size}
        if self.mixture is not None:
            sizes["moe_intermediate_size"] = self.mixture.expert_width
        return sizes

    def cache_spec(self, layer: int, sizes: CacheSizes) -> KVCacheSpec:
        if layer in self.attention_layers:
            return super().cache_spec(layer, sizes)
        return self.convolution.spec(sizes)

    def layer_shapes(self, layer: int, name: str) -> Shapes:
        if layer in self.attention_layers:
            mixer = self.attention_shapes(f"{name}.self_attn")
        else:
            mixer = self.convolution.tensor_shapes(f"{name}.conv")
        return {
            **norms(name, self.hidden_size, "operator_norm", "ffn_norm"),
            **mixer,
            **self.mlp_shapes(layer, f"{name}.feed_forward"),
        }

    def attention_shapes(
        self, name: str, names: Sequence[str] = ("q_proj", "k_proj", "v_proj", "out_proj")
    ) -> Shapes:
        return super().attention_shapes(name, names) | norms(name, self.head_dim, *NORM_NAMES)

    def mlp_shapes(self, layer: int, name: str) -> Shapes:
        size, mixture = self.hidden_size, self.mixture
        if mixture is None or not self.has_experts(layer):
            return gated_mlp(name, size, self.intermediate_size, names=MLP_NAMES)
        shapes = split_experts(name, mixture.num_experts, size, mixture.expert_width, MLP_NAMES)
        if mixture.has_correction:
            shapes[f"{name}.expert_bias"] = (mixture.num_experts,)
        return shapes

    @classmethod
    def read(cls, fields: JsonFields) -> "Lfm2Config":
        return cls(**_read_common(fields, intermediate_size=_dense_width(fields)))


class Lfm2MoeConfig(Lfm2Config):
    """Mixtures of experts in all layers but the first ones."""

    model_type = "lfm2_moe"

    @classmethod
    def read(cls, fields: JsonFields) -> "Lfm2MoeConfig":
        num_experts = fields.count("num_experts", 32)
        mixture = Mixture(
            num_experts=num_experts,
            top_k=read_top_k(fields, 4, num_experts),
            expert_width=fields.integer("moe_intermediate_size", 1792),
            num_dense_layers=fields.integer("num_dense_layers", 2, minimum=0),
            renormalise=fields.boolean("norm_topk_prob", True),
            scale=fields.real("routed_scaling_factor", 1.0),
            has_correction=fields.boolean("use_expert_bias", True),
        )
        width = fields.integer("intermediate_size", 7168)
        shape = _read_common(fields, intermediate_size=width, computed=["num_experts"])
        return cls(**shape, mixture=mixture)


def _read_common(
    fields: JsonFields, *, intermediate_size: int, computed: Sequence[str] = ()
) -> dict[str, Any]:
    """What both families have, as keyword arguments. intermediate_size: of dense layers. computed:
    see read_dense_fields."""
    size = fields.integer("hidden_size")
    for key in ("conv_dim", "conv_dim_out", "block_dim"):
        fields.reject_unless_neutral(key, size, f"this family has hidden_size={size} channels")
    fields.reject_unless_neutral("block_use_swiglu", True, "this family's MLP has a gate")
    fields.reject_unless_neutral("use_pos_enc", True, "this family has rotary positions")
    values = {
        **fields.values,
        "rms_norm_eps": fields.values.get("norm_eps"),
        "intermediate_size": intermediate_size,
        "tie_word_embeddings": fields.boolean(
            "tie_embedding", fields.boolean("tie_word_embeddings", True)
        ),
    }
    return {
        **read_dense_fields(
            JsonFields(values, fields.source),
            rms_norm_eps=1e-5,
            max_position_embeddings=128_000,
            rope_theta=1e6,
            computed=("layer_types", *computed),
        ),
        "attention_layers": _attention_layers(fields),
        "convolution": ConvShape(
            num_channels=size,
            width=fields.integer("conv_L_cache", 3, minimum=2),
            bias=fields.boolean("conv_bias", False),
        ),
    }


def _dense_width(fields: JsonFields) -> int:
    """The width of the MLP, which transformers derives from the one in the file."""
    width = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12_288))
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return width
    width = int(fields.real("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    multiple = fields.integer("block_multiple_of", 256)
    return multiple * -(-width // multiple)


def _attention_layers(fields: JsonFields) -> frozenset[int]:
    """By `layer_types`, or by the indices of the attention layers. Without both, all attend."""
    indices = read_layer_indices(fields, "full_attn_idxs")

    def by_index(layer: int) -> str:
        return FULL if indices is None or layer in indices else CONVOLUTION

    types = read_layer_types(fields, by_index)
    if others := sorted(set(types) - {FULL, CONVOLUTION}):
        raise UnsupportedModel(
            f"{fields.source}: layers of type {shortened(', '.join(others))} are not supported; "
            f"this family supports {CONVOLUTION} and {FULL}. Check layer_types, or use another "
            "checkpoint."
        )
    return frozenset(layer for layer, kind in enumerate(types) if kind == FULL)
