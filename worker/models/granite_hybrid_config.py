"""Granite 4 hybrid (IBM, 2025): Mamba 2 and attention, with several multipliers."""

from dataclasses import dataclass
from typing import Final

from longshore.worker.errors import UnsupportedModel
from longshore.worker.models.bamba_config import HybridConfig
from longshore.worker.models.decoder_config import read_dense_fields
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.mamba2_config import read_hybrid_mamba
from longshore.worker.models.tensor_shapes import Shapes, linear, norms

_COMPUTED: Final = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "num_local_experts",
    "layer_types",
)
_LAYER_TYPES: Final = {
    "mamba": False,
    "linear_attention": False,
    "attention": True,
    "full_attention": True,
}
"""Whether a layer type is attention, in the spelling of transformers 4 and 5."""


@dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(HybridConfig):
    """intermediate_size is that of the shared MLP, which computes every token.

    has_rope:    whether attention layers have rotary positions.
    num_experts: experts in addition to the shared MLP, `top_k` per token; 0 means none.
    """

    model_type = "granitemoehybrid"
    model = "longshore.worker.models.granite_hybrid:GraniteHybrid"

    has_rope: bool
    num_experts: int
    top_k: int
    expert_width: int
    embedding_multiplier: float
    residual_multiplier: float

    def layer_shapes(self, layer: int, name: str) -> Shapes:
        size, width = self.hidden_size, self.intermediate_size
        num_experts, mixture = self.num_experts, f"{name}.block_sparse_moe"
        shapes = {
            **norms(name, size, "input_layernorm", "post_attention_layernorm"),
            **self.mixer_shapes(layer, name),
            **linear(f"{name}.shared_mlp.input_linear", 2 * width, size),
            **linear(f"{name}.shared_mlp.output_linear", size, width),
        }
        if num_experts:
            shapes |= linear(f"{mixture}.router.layer", num_experts, size)
            shapes[f"{mixture}.input_linear.weight"] = (num_experts, 2 * self.expert_width, size)
            shapes[f"{mixture}.output_linear.weight"] = (num_experts, size, self.expert_width)
        return shapes

    @classmethod
    def read(cls, fields: JsonFields) -> "GraniteHybridConfig":
        num_experts = fields.count("num_local_experts", 8, minimum=0)
        top_k = fields.integer("num_experts_per_tok", 2)
        if num_experts and top_k > num_experts:
            raise fields.wrong("num_experts_per_tok", f"at most num_local_experts={num_experts}")
        bias = fields.boolean("attention_bias", False)
        shape = read_dense_fields(fields, computed=_COMPUTED)
        expert_width = shape["intermediate_size"]
        shape |= {
            "intermediate_size": fields.integer("shared_intermediate_size", 1024),
            "score_scale": fields.real("attention_multiplier", 1.0),
            "logit_scale": 1 / fields.real("logits_scaling", 1.0, minimum=1e-6),
        }
        return cls(
            **shape,
            qkv_bias=bias,
            out_bias=bias,
            mamba=read_hybrid_mamba(fields),
            attention_layers=_attention_layers(fields),
            num_experts=num_experts,
            top_k=top_k,
            expert_width=expert_width,
            has_rope=_has_rope(fields),
            embedding_multiplier=fields.real("embedding_multiplier", 1.0),
            residual_multiplier=fields.real("residual_multiplier", 1.0),
        )

    def cut_sizes(self) -> dict[str, int]:
        sizes = super().cut_sizes() | {"shared_intermediate_size": self.intermediate_size}
        return sizes | {"intermediate_size": self.expert_width if self.num_experts else 0}


def _has_rope(fields: JsonFields) -> bool:
    key = "position_embedding_type"
    kind = fields.text(key, "nope")
    if kind not in ("nope", "rope"):
        raise UnsupportedModel(
            f"{fields.source}: {key}={kind!r} is not supported; use a checkpoint with rope or nope."
        )
    return kind == "rope"


def _attention_layers(fields: JsonFields) -> frozenset[int]:
    num_layers = fields.count("num_hidden_layers")
    key = "layer_types" if fields.values.get("layer_types") is not None else "layers_block_type"
    types = fields.values.get(key)
    if types is None:
        return frozenset()
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or not set(map(str, types)) <= _LAYER_TYPES.keys()
    ):
        raise fields.wrong(key, f"a list of {num_layers} of {', '.join(_LAYER_TYPES)}")
    return frozenset(layer for layer, name in enumerate(types) if _LAYER_TYPES[name])
