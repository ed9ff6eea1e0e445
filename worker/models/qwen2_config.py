"""Qwen2 and Qwen2.5 (Yang et al., 2024): a Llama with biases on queries, keys and values."""

from dataclasses import dataclass
from typing import Any

from longshore.worker.models.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    read_dense_fields,
    sliding_window,
)
from longshore.worker.models.json_fields import JsonFields


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """Later layers may have a window. Some checkpoints give a window but do not enable it."""

    model_type = "qwen2"
    model = "longshore.worker.models.llama:Llama"

    @classmethod
    def read(cls, fields: JsonFields) -> "Qwen2Config":
        shape = read_dense_fields(fields, max_position_embeddings=32_768, **later_windows(fields))
        return cls(**shape, qkv_bias=True)


def later_windows(fields: JsonFields) -> dict[str, Any]:
    """Arguments of `read_dense_fields`: layers from `max_window_layers` on have a window, if
    `use_sliding_window` is true."""
    if not fields.boolean("use_sliding_window", False):
        return {}
    first_layer = fields.integer("max_window_layers", 28, minimum=0)
    return {
        "window": sliding_window(fields, 4096),
        "layer_type": lambda layer: SLIDING if layer >= first_layer else FULL,
    }
