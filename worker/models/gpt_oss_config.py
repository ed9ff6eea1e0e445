"""GPT-OSS (OpenAI, 2025): attention sinks, windows in every second layer, mixtures of experts."""

from collections.abc import Sequence
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
from longshore.worker.models.mixtral_config import read_top_k
from longshore.worker.models.tensor_shapes import Shapes, stacked_experts

DEFAULT_ROPE: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """top_k: experts per token. intermediate_size is that of one expert.

    swiglu_alpha: alpha of the experts' activation, gate * sigmoid(alpha * gate).
    swiglu_limit: gate is clamped to at most this, up to plus or minus this.
    """

    model_type = "gpt_oss"
    model = "longshore.worker.models.gpt_oss:GptOss"

    num_experts: int
    top_k: int
    swiglu_alpha: float
    swiglu_limit: float

    def attention_shapes(self, name: str, *names: Sequence[str]) -> Shapes:
        return super().attention_shapes(name, *names) | {f"{name}.sinks": (self.num_heads,)}

    def mlp_shapes(self, layer: int, name: str) -> Shapes:
        size, width = self.hidden_size, self.intermediate_size
        return stacked_experts(name, self.num_experts, size, width, bias=True)

    @classmethod
    def read(cls, fields: JsonFields) -> "GptOssConfig":
        if not fields.values.keys() & {"rope_scaling", "rope_parameters"}:
            fields = fields.with_defaults({"rope_scaling": DEFAULT_ROPE})
        num_experts = fields.count("num_local_experts", 128)
        bias = fields.boolean("attention_bias", True)
        shape = read_dense_fields(
            fields,
            rms_norm_eps=1e-5,
            max_position_embeddings=131_072,
            head_dim=64,
            window=sliding_window(fields, 128),
            layer_type=lambda layer: FULL if layer % 2 else SLIDING,
            rope_theta=150_000.0,
            computed=("num_local_experts",),
        )
        return cls(
            **shape,
            qkv_bias=bias,
            out_bias=bias,
            num_experts=num_experts,
            top_k=read_top_k(fields, 4, num_experts),
            swiglu_alpha=fields.real("swiglu_alpha", 1.702),
            swiglu_limit=fields.real("swiglu_limit", 7.0),
        )
