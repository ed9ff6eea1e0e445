"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al., 2024), dense."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from longshore.worker.models.decoder_config import (
    DecoderConfig,
    read_dense_fields,
    sliding_window,
)
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.mistral_config import same_window
from longshore.worker.models.tensor_shapes import Shapes, linear

ROPE_ALIASES: Final = {"su": "longrope", "yarn": "longrope"}
"""Rope types as the first checkpoints of this family named them."""


@dataclass(frozen=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """No biases; partial rotary positions are possible; all layers have a window or none has."""

    model_type = "phi3"
    model = "longshore.worker.models.phi3:Phi3"

    def attention_shapes(self, name: str, *names: Sequence[str]) -> Shapes:
        width = self.num_heads * self.head_dim
        rows = width + 2 * self.num_kv_heads * self.head_dim
        return {
            **linear(f"{name}.qkv_proj", rows, self.hidden_size),
            **linear(f"{name}.o_proj", self.hidden_size, width),
        }

    def mlp_shapes(self, layer: int, name: str) -> Shapes:
        size, width = self.hidden_size, self.intermediate_size
        return {
            **linear(f"{name}.gate_up_proj", 2 * width, size),
            **linear(f"{name}.down_proj", size, width),
        }

    @classmethod
    def read(cls, fields: JsonFields) -> "Phi3Config":
        return cls(
            **read_dense_fields(
                fields,
                rms_norm_eps=1e-5,
                max_position_embeddings=4096,
                **same_window(fields, sliding_window(fields)),
                has_partial_rotary=True,
                rope_aliases=ROPE_ALIASES,
            )
        )
