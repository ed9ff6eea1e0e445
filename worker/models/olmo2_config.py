"""OLMo 2 (Team OLMo, 2024)."""

from dataclasses import dataclass

from longshore.worker.models.decoder_config import DecoderConfig, read_dense_fields
from longshore.worker.models.json_fields import JsonFields


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """All attention projections have biases, or none has."""

    model_type = "olmo2"
    model = "longshore.worker.models.olmo2:Olmo2"

    @classmethod
    def read(cls, fields: JsonFields) -> "Olmo2Config":
        bias = fields.boolean("attention_bias", False)
        shape = read_dense_fields(fields, rms_norm_eps=1e-5)
        return cls(**shape, qkv_bias=bias, out_bias=bias)
