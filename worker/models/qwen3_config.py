"""Qwen3 (Yang et al., 2025), dense: a Llama that normalises each head of queries and keys."""

from collections.abc import Sequence
from dataclasses import dataclass

from longshore.worker.models.decoder_config import DecoderConfig, read_dense_fields
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.qwen2_config import later_windows
from longshore.worker.models.tensor_shapes import Shapes, norms


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """The default head size is 128, whatever the hidden size."""

    model_type = "qwen3"
    model = "longshore.worker.models.qwen3:Qwen3"

    def attention_shapes(self, name: str, *names: Sequence[str]) -> Shapes:
        heads = norms(name, self.head_dim, "q_norm", "k_norm")
        return super().attention_shapes(name, *names) | heads

    @classmethod
    def read(cls, fields: JsonFields) -> "Qwen3Config":
        bias = fields.boolean("attention_bias", False)
        shape = read_dense_fields(
            fields, max_position_embeddings=32_768, head_dim=128, **later_windows(fields)
        )
        return cls(**shape, qkv_bias=bias, out_bias=bias)
