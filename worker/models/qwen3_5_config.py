"""Qwen3.5 (Qwen Team, 2026), text: the layers of Qwen3-Next, dense or with mixtures of experts.

Checkpoints take images and videos too, which have three positions each: in time, height and width.
The three of a token of text are its position, so the rotary positions are those of other families.
"""

from dataclasses import dataclass
from typing import Final

from longshore.worker.models.gemma3_config import OF_ALL_PARTS
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.qwen3_next_config import (
    Qwen3NextConfig,
    read_hybrid_fields,
    read_mixture,
)

_POSITIONS_OF_IMAGES: Final = ("mrope_section", "mrope_interleaved")
_OF_ALL_PARTS: Final = (*OF_ALL_PARTS, "tie_word_embeddings")


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(Qwen3NextConfig):
    """The dense models. All layers have an MLP."""

    model_type = "qwen3_5_text"

    @classmethod
    def read(cls, fields: JsonFields) -> "Qwen35Config":
        shape = read_hybrid_fields(_with_text_positions(fields), is_fused=False)
        layers = frozenset(range(shape["num_layers"]))
        return cls(**shape, mixture=None, dense_layers=layers)


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(Qwen3NextConfig):
    """The models with a mixture of experts in every layer."""

    model_type = "qwen3_5_moe_text"

    @classmethod
    def read(cls, fields: JsonFields) -> "Qwen35MoeConfig":
        mixture = read_mixture(fields, num_experts=256, top_k=8, renormalise=True)
        values = {"intermediate_size": mixture.shared_width, **fields.values}
        fields = _with_text_positions(JsonFields(values, fields.source))
        shape = read_hybrid_fields(fields, is_fused=False)
        return cls(**shape, mixture=mixture, dense_layers=frozenset())


@dataclass(frozen=True, kw_only=True)
class Qwen35ImagesConfig(Qwen35Config):
    """The text part of a checkpoint with images and text; images are not supported."""

    model_type = "qwen3_5"

    @classmethod
    def read(cls, fields: JsonFields) -> "Qwen35Config":
        return super().read(_text_part(fields))


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeImagesConfig(Qwen35MoeConfig):
    """The text part of a checkpoint with images and text; images are not supported."""

    model_type = "qwen3_5_moe"

    @classmethod
    def read(cls, fields: JsonFields) -> "Qwen35MoeConfig":
        return super().read(_text_part(fields))


def _text_part(fields: JsonFields) -> JsonFields:
    text = fields.table("text_config")
    values = {} if text is None else text.values
    shared = {
        key: value
        for key in _OF_ALL_PARTS
        if (value := fields.values.get(key)) is not None and values.get(key) is None
    }
    # One head serves all parts, so where the parts differ, the whole decides.
    if (is_tied := fields.values.get("tie_word_embeddings")) is not None:
        shared["tie_word_embeddings"] = is_tied
    return JsonFields({**values, **shared}, f"{fields.source}, text_config")


def _with_text_positions(fields: JsonFields) -> JsonFields:
    """Without the division of rotary pairs among the positions of images."""
    values = dict(fields.values)
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.table(key)
        if rope is not None:
            values[key] = {
                name: value
                for name, value in rope.values.items()
                if name not in _POSITIONS_OF_IMAGES
            }
    return JsonFields(values, fields.source)
