"""Llama (Touvron et al., 2023), versions 2 and 3."""

from dataclasses import dataclass

from longshore.worker.models.decoder_config import DecoderConfig, read_dense_fields
from longshore.worker.models.json_fields import JsonFields


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """All attention projections have biases, or none has."""

    model_type = "llama"
    model = "longshore.worker.models.llama:Llama"

    @classmethod
    def read(cls, fields: JsonFields) -> "LlamaConfig":
        fields.reject_unless_neutral(
            "sliding_window", None, "sliding windows are not part of this family"
        )
        attention_bias = fields.boolean("attention_bias", False)
        return cls(
            **read_dense_fields(fields),
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            mlp_bias=fields.boolean("mlp_bias", False),
        )
