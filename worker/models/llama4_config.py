"""Llama 4 (Meta, 2025), text: most layers attend within chunks, the others have no positions; some
or all layers have a mixture of experts."""

from dataclasses import dataclass

from longshore.worker.errors import UnsupportedModel
from longshore.worker.models.decoder_config import (
    CHUNKED,
    FULL,
    DecoderConfig,
    read_dense_fields,
)
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.mixtral_config import read_top_k
from longshore.worker.models.rope_config import DefaultRope, LinearRope, Llama3Rope
from longshore.worker.models.tensor_shapes import Shapes, gated_mlp, norms, stacked_experts


@dataclass(frozen=True, kw_only=True)
class Llama4Config(DecoderConfig):
    """intermediate_size is that of the dense layers, `intermediate_size_mlp` in the file.

    expert_width:  intermediate size of an expert and of the shared expert.
    top_k:         experts per token in addition to the shared expert.
    expert_layers: layers with a mixture of experts.
    rope_layers:   layers with rotary positions.
    use_qk_norm:   in these layers, each head of queries and keys is normalised, without weights.
    floor_scale, attn_scale: in the other layers, queries are multiplied by
                   1 + attn_scale * log(1 + floor((position + 1) / floor_scale)).
    """

    model_type = "llama4_text"
    model = "longshore.worker.models.llama4:Llama4"

    expert_width: int
    num_experts: int
    top_k: int
    expert_layers: frozenset[int]
    rope_layers: frozenset[int]
    use_qk_norm: bool
    floor_scale: int
    attn_scale: float

    def cut_sizes(self) -> dict[str, int]:
        return {
            "num_attention_heads": self.num_heads,
            "intermediate_size": self.expert_width,
            "intermediate_size_mlp": self.intermediate_size,
        }

    def layer_shapes(self, layer: int, name: str) -> Shapes:
        return {
            **norms(name, self.hidden_size, "input_layernorm", "post_attention_layernorm"),
            **self.attention_shapes(f"{name}.self_attn"),
            **self.mlp_shapes(layer, f"{name}.feed_forward"),
        }

    def mlp_shapes(self, layer: int, name: str) -> Shapes:
        if layer not in self.expert_layers:
            return super().mlp_shapes(layer, name)
        size, width = self.hidden_size, self.expert_width
        return {
            **stacked_experts(name, self.num_experts, size, width),
            **gated_mlp(f"{name}.shared_expert", size, width),
        }

    @classmethod
    def read(cls, fields: JsonFields) -> "Llama4Config":
        num_experts = fields.count("num_local_experts", 16)
        rope_layers = _rope_layers(fields)
        bias = fields.boolean("attention_bias", False)
        chunk = fields.integer("attention_chunk_size", 8192)
        shape = read_dense_fields(
            fields,
            rms_norm_eps=1e-5,
            max_position_embeddings=131_072,
            head_dim=128,
            chunk=chunk,
            layer_type=lambda layer: CHUNKED if layer in rope_layers else FULL,
            rope_theta=500_000.0,
            computed=("num_local_experts", "attention_chunk_size", "use_qk_norm"),
        )
        if not isinstance(shape["rope"], DefaultRope | LinearRope | Llama3Rope):
            raise UnsupportedModel(
                f"{fields.source}: {type(shape['rope']).__name__} also scales queries and keys, "
                "which this family's norm would undo. Use default, linear or llama3 rope."
            )
        shape["intermediate_size"] = fields.integer("intermediate_size_mlp", 16_384)
        is_tuned = fields.values.get("attn_temperature_tuning") not in (False, 0)  # true, 4, absent
        return cls(
            **shape,
            qkv_bias=bias,
            out_bias=bias,
            expert_width=fields.integer("intermediate_size"),
            num_experts=num_experts,
            top_k=read_top_k(fields, 1, num_experts),
            expert_layers=_expert_layers(fields),
            rope_layers=rope_layers,
            use_qk_norm=fields.boolean("use_qk_norm", True),
            floor_scale=fields.integer("floor_scale", 8192),
            attn_scale=fields.real("attn_scale", 0.1) if is_tuned else 0.0,
        )


def _rope_layers(fields: JsonFields) -> frozenset[int]:
    """Layers with a 1 in `no_rope_layers`. If it is absent, all but every
    `no_rope_layer_interval`-th layer."""
    num_layers = fields.count("num_hidden_layers")
    flags = fields.values.get("no_rope_layers") or None
    if flags is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % interval)
    if not isinstance(flags, list) or len(flags) < num_layers:
        raise fields.wrong("no_rope_layers", f"a list of num_hidden_layers={num_layers} flags")
    return frozenset(layer for layer in range(num_layers) if flags[layer])


def _expert_layers(fields: JsonFields) -> frozenset[int]:
    """The layers in `moe_layers`. If it is absent, every `interleave_moe_layer_step`-th layer."""
    num_layers = fields.count("num_hidden_layers")
    layers = fields.values.get("moe_layers")
    if layers is None:
        step = fields.integer("interleave_moe_layer_step", 1)
        return frozenset(range(step - 1, num_layers, step))
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise fields.wrong("moe_layers", "a list of layers, counted from 0")
    return frozenset(layers)
