"""OLMo 2 (Team OLMo, 2024)."""

from collections.abc import Sequence
from dataclasses import dataclass

from longshore.worker.models.decoder_config import DecoderConfig, read_dense_fields
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.tensor_shapes import Shapes, norms


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """All attention projections have biases, or none has."""

    model_type = "olmo2"
    model = "longshore.worker.models.olmo2:Olmo2"

    def layer_shapes(self, layer: int, name: str) -> Shapes:
        after = ("post_attention_layernorm", "post_feedforward_layernorm")
        return {
            **norms(name, self.hidden_size, *after),
            **self.attention_shapes(f"{name}.self_attn"),
            **self.mlp_shapes(layer, f"{name}.mlp"),
        }

    def attention_shapes(self, name: str, *names: Sequence[str]) -> Shapes:
        return {
            **super().attention_shapes(name, *names),
            **norms(name, self.num_heads * self.head_dim, "q_norm"),
            **norms(name, self.num_kv_heads * self.head_dim, "k_norm"),
        }

    @classmethod
    def read(cls, fields: JsonFields) -> "Olmo2Config":
        bias = fields.boolean("attention_bias", False)
        shape = read_dense_fields(fields, rms_norm_eps=1e-5)
        return cls(**shape, qkv_bias=bias, out_bias=bias)
