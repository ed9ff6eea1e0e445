"""Gemma 3 (Gemma Team, 2025), text: five layers with a window alternate with one without; the two
kinds have different ropes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from longshore.worker.models.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    read_dense_fields,
    read_layer_types,
    read_rotary_dim,
    sliding_window,
)
from longshore.worker.models.gemma2_config import (
    ACTIVATIONS,
    NULLABLE,
    reject_bidirectional,
    sandwich_norms,
    score_scale,
    softcap,
)
from longshore.worker.models.gemma2_config import DEFAULTS as GEMMA2_DEFAULTS
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.rope_config import RopeConfig, read_rope_config
from longshore.worker.models.tensor_shapes import Shapes, norms

DEFAULTS: Final = {
    **GEMMA2_DEFAULTS,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
OF_ALL_PARTS: Final = ("dtype", "torch_dtype", "quantization_config", "compression_config")
"""Keys that are at the top level if config.json has several parts."""


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """rope: rope of layers without a window; local_rope: rope of layers with one."""

    model_type = "gemma3_text"
    model = "longshore.worker.models.gemma3:Gemma3"

    local_rope: RopeConfig
    is_local: tuple[bool, ...]

    @property
    def max_supported_len(self) -> int:
        """Files of this family give the length after scaling."""
        return self.max_position_embeddings

    def rope_of(self, layer: int) -> RopeConfig:
        return self.local_rope if self.is_local[layer] else self.rope

    def attention_shapes(self, name: str, *names: Sequence[str]) -> Shapes:
        heads = norms(name, self.head_dim, "q_norm", "k_norm")
        return super().attention_shapes(name, *names) | heads

    def layer_shapes(self, layer: int, name: str) -> Shapes:
        return super().layer_shapes(layer, name) | sandwich_norms(name, self.hidden_size)

    @classmethod
    def read(cls, fields: JsonFields) -> "Gemma3Config":
        fields = fields.with_defaults(DEFAULTS, nullable=NULLABLE)
        reject_bidirectional(fields)
        bias = fields.boolean("attention_bias", False)
        period = fields.integer("sliding_window_pattern")

        def layer_type(layer: int) -> str:
            return SLIDING if (layer + 1) % period else FULL

        shape = read_dense_fields(
            _with_rope(fields, FULL, "rope_theta"),
            window=sliding_window(fields),
            layer_type=layer_type,
            activations=ACTIVATIONS,
            activation_key="hidden_activation",
            computed=("final_logit_softcapping",),
        )
        local = _with_rope(fields, SLIDING, "rope_local_base_freq")
        return cls(
            **shape,
            qkv_bias=bias,
            out_bias=bias,
            score_scale=score_scale(fields),
            logit_softcap=softcap(fields, "final_logit_softcapping"),
            local_rope=read_rope_config(
                local,
                max_position_embeddings=shape["max_position_embeddings"],
                rotary_dim=read_rotary_dim(local, shape["head_dim"]),
            ),
            is_local=tuple(kind == SLIDING for kind in read_layer_types(fields, layer_type)),
        )


@dataclass(frozen=True, kw_only=True)
class Gemma3ImagesConfig(Gemma3Config):
    """The text part of a checkpoint with images and text; images are not supported."""

    model_type = "gemma3"
    model = "longshore.worker.models.gemma3:Gemma3"

    @classmethod
    def read(cls, fields: JsonFields) -> "Gemma3Config":
        text = fields.table("text_config")
        values = {} if text is None else text.values
        shared = {key: value for key, value in fields.values.items() if key in OF_ALL_PARTS}
        return super().read(JsonFields({**shared, **values}, f"{fields.source}, text_config"))


def _with_rope(fields: JsonFields, layer_type: str, theta_key: str) -> JsonFields:
    """The fields with the rope of one layer type under the keys that other families use.

    theta_key: key of the base in files written by transformers 4. In these files the scaling
    applies to layers without a window only.
    """
    scaling = fields.table("rope_scaling")
    ropes = fields.table("rope_parameters")
    if ropes is not None and ropes.values.keys() & {FULL, SLIDING}:
        scaling = ropes.table(layer_type)
    elif layer_type == SLIDING:
        scaling = None
    else:
        scaling = scaling or ropes
    rope: dict[str, Any] = {"rope_theta": fields.values[theta_key]}
    if scaling is not None:
        rope |= {key: value for key, value in scaling.values.items() if value is not None}
    own = {"rope_theta": None, "rope_scaling": None, "rope_parameters": rope}
    return JsonFields({**fields.values, **own}, f"{fields.source}, {layer_type}")
