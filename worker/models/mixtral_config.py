"""Mixtral (Jiang et al., 2024): a Mistral with a mixture of experts in every layer."""

from dataclasses import dataclass

from longshore.worker.models.decoder_config import (
    DecoderConfig,
    read_dense_fields,
    sliding_window,
)
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.mistral_config import same_window
from longshore.worker.models.tensor_shapes import Shapes, norms, split_experts


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    """top_k: experts per token. intermediate_size is that of one expert."""

    model_type = "mixtral"
    model = "longshore.worker.models.mixtral:Mixtral"

    num_experts: int
    top_k: int

    def layer_shapes(self, layer: int, name: str) -> Shapes:
        size, width = self.hidden_size, self.intermediate_size
        mixture = f"{name}.block_sparse_moe"
        return {
            **norms(name, size, "input_layernorm", "post_attention_layernorm"),
            **self.attention_shapes(f"{name}.self_attn"),
            **split_experts(mixture, self.num_experts, size, width, ("w1", "w3", "w2")),
        }

    @classmethod
    def read(cls, fields: JsonFields) -> "MixtralConfig":
        num_experts = fields.count("num_local_experts", 8)
        shape = read_dense_fields(
            fields,
            rms_norm_eps=1e-5,
            max_position_embeddings=131_072,
            **same_window(fields, sliding_window(fields)),
            rope_theta=1e6,
            computed=("num_local_experts",),
        )
        return cls(**shape, num_experts=num_experts, top_k=read_top_k(fields, 2, num_experts))


def read_top_k(fields: JsonFields, default: int, num_experts: int) -> int:
    """`num_experts_per_tok`; raises BrokenCheckpoint if it exceeds the number of experts."""
    top_k = fields.integer("num_experts_per_tok", default)
    if top_k > num_experts:
        raise fields.wrong("num_experts_per_tok", f"at most the number of experts, {num_experts}")
    return top_k
