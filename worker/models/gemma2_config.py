"""Gemma 2 (Gemma Team, 2024): a window in every second layer; soft caps on scores and logits."""

from dataclasses import dataclass
from typing import Final

from longshore.worker.models.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    read_dense_fields,
    sliding_window,
)
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.tensor_shapes import Shapes, norms

SOFTCAPS: Final = ("attn_logit_softcapping", "final_logit_softcapping")
NULLABLE: Final = ("sliding_window", *SOFTCAPS)
ACTIVATIONS: Final = ("gelu_tanh", "gelu", "silu")
DEFAULTS: Final = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
"""Published files leave out values that are the same as in the first checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """All attention projections have biases, or none has."""

    model_type = "gemma2"
    model = "longshore.worker.models.gemma2:Gemma2"

    def layer_shapes(self, layer: int, name: str) -> Shapes:
        return super().layer_shapes(layer, name) | sandwich_norms(name, self.hidden_size)

    @classmethod
    def read(cls, fields: JsonFields) -> "Gemma2Config":
        fields = fields.with_defaults(DEFAULTS, nullable=NULLABLE)
        reject_bidirectional(fields)
        bias = fields.boolean("attention_bias", False)
        shape = read_dense_fields(
            fields,
            window=sliding_window(fields),
            layer_type=lambda layer: FULL if layer % 2 else SLIDING,
            activations=ACTIVATIONS,
            activation_key="hidden_activation",
            computed=SOFTCAPS,
        )
        return cls(
            **shape,
            qkv_bias=bias,
            out_bias=bias,
            score_scale=score_scale(fields),
            score_softcap=softcap(fields, "attn_logit_softcapping"),
            logit_softcap=softcap(fields, "final_logit_softcapping"),
        )


def sandwich_norms(name: str, size: int) -> Shapes:
    """The norms around the MLP of a layer."""
    return norms(name, size, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def reject_bidirectional(fields: JsonFields) -> None:
    fields.reject_unless_neutral(
        "use_bidirectional_attention", False, "attention to later tokens is not supported"
    )


def score_scale(fields: JsonFields) -> float:
    """query_pre_attn_scalar replaces the head size in the factor on scores."""
    size = fields.real("query_pre_attn_scalar")
    if size <= 0:
        raise fields.wrong("query_pre_attn_scalar", "above 0")
    return size**-0.5


def softcap(fields: JsonFields, key: str) -> float | None:
    """The soft cap under `key`; null is none."""
    if fields.values.get(key) is None:
        return None
    cap = fields.real(key)
    if cap == 0.0:
        raise fields.wrong(key, "above 0, or null for none")
    return cap
