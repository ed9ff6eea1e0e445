"""Qwen3-Next (Qwen Team, 2025): gated DeltaNet in three layers of four, gated attention in the
fourth, and mixtures of experts with a gated shared expert. Also the base of Qwen3.5's configs."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from longshore.protocol.errors import shortened
from longshore.protocol.kv_cache_spec import KVCacheSpec
from longshore.worker.errors import UnsupportedModel
from longshore.worker.kv_cache.plan import CacheSizes
from longshore.worker.models.decoder_config import (
    FULL,
    DecoderConfig,
    read_dense_fields,
    read_layer_types,
)
from longshore.worker.models.delta_shape import DeltaShape, read_delta_shape
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.mixtral_config import read_top_k
from longshore.worker.models.qwen3_moe_config import dense_layers
from longshore.worker.models.tensor_shapes import (
    Shapes,
    experts_by_outputs,
    gated_mlp,
    linear,
    norms,
    split_experts,
)

LINEAR: Final = "linear_attention"
_DRAFTER: Final = ("mtp.", "model.mtp.")
"""How the names of layers for multi-token prediction begin; they are not loaded."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """top_k:        experts per token, in addition to the shared one.
    expert_width, shared_width: intermediate sizes of an expert and of the shared expert.
    renormalise:  the weights of a token's experts are normalised to a sum of 1.
    is_stacked:   the checkpoint has two tensors for all experts of a layer, and not three for each.
    """

    num_experts: int
    top_k: int
    expert_width: int
    shared_width: int
    renormalise: bool
    is_stacked: bool = False

    def tensor_shapes(self, name: str, size: int) -> Shapes:
        """The tensors of a layer's mixture. size: of the hidden states."""
        stored = experts_by_outputs if self.is_stacked else split_experts
        return {
            **stored(name, self.num_experts, size, self.expert_width),
            **gated_mlp(f"{name}.shared_expert", size, self.shared_width),
            **linear(f"{name}.shared_expert_gate", 1, size),
        }


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(DecoderConfig):
    """intermediate_size is that of the dense layers.

    delta:            sizes of the layers that do not attend.
    attention_layers: indices of the layers with attention.
    mixture:          of the layers that are not dense; None: all are.
    dense_layers:     layers without experts.
    """

    model_type = "qwen3_next"
    model = "longshore.worker.models.qwen3_next:Qwen3Next"

    delta: DeltaShape
    attention_layers: frozenset[int]
    mixture: Mixture | None
    dense_layers: frozenset[int]

    def cut_sizes(self) -> dict[str, int]:
        sizes = {"num_attention_heads": self.num_heads}
        if self.dense_layers:
            sizes["intermediate_size"] = self.intermediate_size
        if self.mixture is not None:
            sizes["moe_intermediate_size"] = self.mixture.expert_width
            sizes["shared_expert_intermediate_size"] = self.mixture.shared_width
        return sizes

    def check_split(self, *, num_shards: int, num_stages: int = 1) -> None:
        self.delta.check_split(num_shards)
        super().check_split(num_shards=num_shards, num_stages=num_stages)

    def cache_spec(self, layer: int, sizes: CacheSizes) -> KVCacheSpec:
        if layer in self.attention_layers:
            return super().cache_spec(layer, sizes)
        return self.delta.spec(sizes)

    def layer_shapes(self, layer: int, name: str) -> Shapes:
        if layer in self.attention_layers:
            mixer = self.attention_shapes(f"{name}.self_attn")
        else:
            mixer = self.delta.tensor_shapes(f"{name}.linear_attn", self.hidden_size)
        return {
            **norms(name, self.hidden_size, "input_layernorm", "post_attention_layernorm"),
            **mixer,
            **self.mlp_shapes(layer, f"{name}.mlp"),
        }

    def attention_shapes(self, name: str, *names: Sequence[str]) -> Shapes:
        shapes = super().attention_shapes(name, *names)
        for key in (f"{name}.q_proj.weight", f"{name}.q_proj.bias"):
            if key in shapes:  # each head has a query and a gate
                rows, *columns = shapes[key]
                shapes[key] = (2 * rows, *columns)
        return shapes | norms(name, self.head_dim, "q_norm", "k_norm")

    def mlp_shapes(self, layer: int, name: str) -> Shapes:
        if self.mixture is None or layer in self.dense_layers:
            return super().mlp_shapes(layer, name)
        return self.mixture.tensor_shapes(name, self.hidden_size)

    def is_redundant(self, name: str) -> bool:
        return name.startswith(_DRAFTER) or super().is_redundant(name)

    def with_names(self, names: AbstractSet[str]) -> Self:
        if self.mixture is None:
            return self
        is_stacked = any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
        return replace(self, mixture=replace(self.mixture, is_stacked=is_stacked))

    @classmethod
    def read(cls, fields: JsonFields) -> "Qwen3NextConfig":
        shape = read_hybrid_fields(fields, is_fused=True)
        mixture = None
        if fields.count("num_experts", 512, minimum=0):
            mixture = read_mixture(
                fields,
                num_experts=512,
                top_k=10,
                renormalise=fields.boolean("norm_topk_prob", True),
            )
        layers = frozenset(range(shape["num_layers"]))
        return cls(
            **shape,
            mixture=mixture,
            dense_layers=layers if mixture is None else dense_layers(fields, len(layers)),
        )


def read_hybrid_fields(fields: JsonFields, *, is_fused: bool) -> dict[str, Any]:
    """What Qwen3-Next and Qwen3.5 have in common, as keyword arguments. is_fused: see
    DeltaShape."""
    why = "this family gates the results of attention"
    fields.reject_unless_neutral("attn_output_gate", True, why)
    fields.reject_unless_neutral("use_sliding_window", False, "this family has no windows")
    bias = fields.boolean("attention_bias", False)
    period = fields.integer("full_attention_interval", 4)
    values = {"partial_rotary_factor": 0.25, **fields.values}
    shape = read_dense_fields(
        JsonFields(values, fields.source),
        max_position_embeddings=32_768,
        head_dim=256,
        has_partial_rotary=True,
        computed=("num_experts", "layer_types"),
    )
    types = read_layer_types(fields, lambda layer: LINEAR if (layer + 1) % period else FULL)
    if others := sorted(set(types) - {LINEAR, FULL}):
        raise UnsupportedModel(
            f"{fields.source}: layers of type {shortened(', '.join(others))} are not supported; "
            f"this family supports {LINEAR} and {FULL}. Check layer_types, or use another "
            "checkpoint."
        )
    return {
        **shape,
        "qkv_bias": bias,
        "out_bias": bias,
        "delta": read_delta_shape(fields, is_fused=is_fused),
        "attention_layers": frozenset(layer for layer, kind in enumerate(types) if kind == FULL),
    }


def read_mixture(fields: JsonFields, *, num_experts: int, top_k: int, renormalise: bool) -> Mixture:
    """num_experts, top_k: the family's defaults."""
    num_experts = fields.count("num_experts", num_experts)
    return Mixture(
        num_experts=num_experts,
        top_k=read_top_k(fields, top_k, num_experts),
        expert_width=fields.integer("moe_intermediate_size", 512),
        shared_width=fields.integer("shared_expert_intermediate_size", 512),
        renormalise=renormalise,
    )
