"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al., 2024), dense."""

from dataclasses import dataclass
from typing import Final

from longshore.worker.models.decoder_config import (
    DecoderConfig,
    read_dense_fields,
    sliding_window,
)
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.mistral_config import same_window

ROPE_ALIASES: Final = {"su": "longrope", "yarn": "longrope"}
"""Rope types as the first checkpoints of this family named them."""


@dataclass(frozen=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """No biases; partial rotary positions are possible; all layers have a window or none has."""

    model_type = "phi3"
    model = "longshore.worker.models.phi3:Phi3"

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
