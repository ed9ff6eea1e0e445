"""Mistral (Jiang et al., 2023): a Llama with a sliding window in all layers or in none."""

from dataclasses import dataclass
from typing import Any, Final

from longshore.worker.models.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    read_dense_fields,
    sliding_window,
)
from longshore.worker.models.json_fields import JsonFields

DEFAULT_WINDOW: Final = 4096
"""The window if config.json does not give one: that of the first version."""


@dataclass(frozen=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """No biases; `head_dim` may differ from hidden_size / num_attention_heads."""

    model_type = "mistral"
    model = "longshore.worker.models.llama:Llama"

    @classmethod
    def read(cls, fields: JsonFields) -> "MistralConfig":
        window = sliding_window(fields, DEFAULT_WINDOW)
        return cls(
            **read_dense_fields(
                fields, max_position_embeddings=131_072, **same_window(fields, window)
            )
        )


def same_window(fields: JsonFields, window: int | None) -> dict[str, Any]:
    """Arguments of `read_dense_fields`: all layers have this window, in tokens; None: no window."""
    layer_type = FULL if window is None else SLIDING
    fields.reject_unless_neutral(
        "layer_types",
        [layer_type] * fields.count("num_hidden_layers"),
        "layers of this family are all alike",
    )
    return {"window": window, "layer_type": lambda _: layer_type}
