"""Qwen2 and Qwen2.5 (Yang et al., 2024): a Llama with biases on queries, keys and values."""

from dataclasses import dataclass

from longshore.worker.models.decoder_config import (
    DecoderConfig,
    read_dense_fields,
    sliding_window,
)
from longshore.worker.models.json_fields import JsonFields


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """Some checkpoints state a window that none of their layers uses."""

    model_type = "qwen2"
    model = "longshore.worker.models.llama:Llama"

    @classmethod
    def read(cls, fields: JsonFields) -> "Qwen2Config":
        shape = read_dense_fields(
            fields, max_position_embeddings=32_768, window=qwen_window(fields)
        )
        return cls(**shape, qkv_bias=True)


def qwen_window(fields: JsonFields) -> int | None:
    """The window of the layers from `max_window_layers` on, if it is switched on and there are
    such layers."""
    is_used = fields.boolean("use_sliding_window", False)
    first_layer = fields.integer("max_window_layers", 28, minimum=0)
    if not is_used or first_layer >= fields.integer("num_hidden_layers"):
        return None
    return sliding_window(fields, 4096)
