"""Qwen3-MoE (Yang et al., 2025): mixtures of experts in all layers or in some."""

from collections.abc import Sequence
from dataclasses import dataclass

from longshore.worker.models.decoder_config import (
    DecoderConfig,
    read_dense_fields,
    sliding_window,
)
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.mistral_config import same_window
from longshore.worker.models.mixtral_config import read_top_k
from longshore.worker.models.tensor_shapes import Shapes, norms, split_experts


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """top_k:        experts per token.
    expert_width: intermediate size of an expert; intermediate_size is that of the dense layers.
    renormalise:  the weights of a token's experts are normalised to a sum of 1.
    dense_layers: layers without experts.
    """

    model_type = "qwen3_moe"
    model = "longshore.worker.models.qwen3_moe:Qwen3Moe"

    num_experts: int
    top_k: int
    expert_width: int
    renormalise: bool
    dense_layers: frozenset[int]

    def cut_sizes(self) -> dict[str, int]:
        return {**super().cut_sizes(), "moe_intermediate_size": self.expert_width}

    def attention_shapes(self, name: str, *names: Sequence[str]) -> Shapes:
        heads = norms(name, self.head_dim, "q_norm", "k_norm")
        return super().attention_shapes(name, *names) | heads

    def mlp_shapes(self, layer: int, name: str) -> Shapes:
        if layer in self.dense_layers:
            return super().mlp_shapes(layer, name)
        return split_experts(name, self.num_experts, self.hidden_size, self.expert_width)

    @classmethod
    def read(cls, fields: JsonFields) -> "Qwen3MoeConfig":
        # transformers 4 writes num_experts, version 5 num_local_experts.
        num_experts = fields.count("num_local_experts", fields.count("num_experts", 128))
        bias = fields.boolean("attention_bias", False)
        has_window = fields.boolean("use_sliding_window", False)
        window = sliding_window(fields, 4096) if has_window else None
        shape = read_dense_fields(
            fields,
            max_position_embeddings=32_768,
            **same_window(fields, window),
            computed=("num_experts", "num_local_experts"),
        )
        return cls(
            **shape,
            qkv_bias=bias,
            out_bias=bias,
            num_experts=num_experts,
            top_k=read_top_k(fields, 8, num_experts),
            expert_width=fields.integer("moe_intermediate_size", 768),
            renormalise=fields.boolean("norm_topk_prob", False),
            dense_layers=dense_layers(fields, shape["num_layers"]),
        )


def dense_layers(fields: JsonFields, num_layers: int) -> frozenset[int]:
    """The layers in `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    named = fields.values.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise fields.wrong("mlp_only_layers", "a list of layers, counted from 0")
    step = fields.integer("decoder_sparse_step", 1)
    return frozenset(
        layer for layer in range(num_layers) if layer in named or (layer + 1) % step != 0
    )
