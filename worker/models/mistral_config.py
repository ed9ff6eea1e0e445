"""Mistral (Jiang et al., 2023) without its sliding window: computed as a Llama."""

from dataclasses import dataclass
from typing import Final

from longshore.worker.models.decoder_config import (
    DecoderConfig,
    read_dense_fields,
    sliding_window,
)
from longshore.worker.models.json_fields import JsonFields

DEFAULT_WINDOW: Final = 4096
"""A config.json that does not mention the window has the first version's."""


@dataclass(frozen=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """No biases; `head_dim` may differ from hidden_size / num_attention_heads."""

    model_type = "mistral"
    model = "longshore.worker.models.llama:Llama"

    @classmethod
    def read(cls, fields: JsonFields) -> "MistralConfig":
        window = sliding_window(fields, DEFAULT_WINDOW)
        return cls(**read_dense_fields(fields, max_position_embeddings=131_072, window=window))
