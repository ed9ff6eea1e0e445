"""Rotary position scaling as a checkpoint states it, in either spelling.

Until transformers 4 the base is `rope_theta` and the scaling `rope_scaling` (kind under `type` or
`rope_type`); transformers 5 writes both into `rope_parameters`.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, TypeAlias

from longshore.worker.errors import UnsupportedModel
from longshore.worker.models.json_fields import JsonFields


@dataclass(frozen=True)
class DefaultRope:
    """No scaling."""

    theta: float


@dataclass(frozen=True)
class LinearRope:
    """Positions divided by `factor` (position interpolation, Chen et al., 2023)."""

    theta: float
    factor: float


@dataclass(frozen=True)
class DynamicRope:
    """NTK-aware base that grows with the sequence once it is longer than the trained length.

    Up to that length it is no scaling at all. Beyond it, each new length would rotate *all* keys
    by other angles, but cached keys stay as they were rotated, so what a request sees would depend
    on who computed its prefix: longer requests are refused (`max_supported_len`).
    """

    theta: float
    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Low frequencies divided by `factor`, high ones kept, a smooth ramp between (Llama 3.1)."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRope:
    """Interpolation by parts and a temperature on attention (YaRN, Peng et al., 2023).

    attention_factor: multiplies cosines and sines; None derives it from factor and mscale.
    truncate:         whether the ramp's ends are rounded to whole dimensions.
    """

    theta: float
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    truncate: bool


RopeConfig: TypeAlias = DefaultRope | LinearRope | DynamicRope | Llama3Rope | YarnRope

DEFAULT_THETA: Final = 10_000.0
# `finetuned` is written into some checkpoints and read by nobody.
_COMMON_KEYS: Final = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_KEYS_OF_TYPE: Final[dict[str, set[str]]] = {
    "default": set(),
    # The original length changes nothing in these two; transformers accepts it.
    "linear": {"factor", "original_max_position_embeddings"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


def read_rope_config(config: JsonFields, *, max_position_embeddings: int) -> RopeConfig:
    """The rope of a config.json. Raises UnsupportedModel for a kind or key that is not computed."""
    rope = config.table("rope_scaling") or config.table("rope_parameters")
    theta = config.real("rope_theta", DEFAULT_THETA, minimum=1.0)
    config.refuse_unless_neutral("partial_rotary_factor", 1.0, "rotating part of a head")
    if rope is None:
        return DefaultRope(theta)
    theta = rope.real("rope_theta", theta, minimum=1.0)
    rope.refuse_unless_neutral("partial_rotary_factor", 1.0, "rotating part of a head")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _KEYS_OF_TYPE:
        raise UnsupportedModel(
            f"{rope.source}: rope type {kind!r} is not supported; positions would be wrong. "
            f"Supported: {', '.join(_KEYS_OF_TYPE)}."
        )
    _refuse_unknown_keys(rope, kind, _KEYS_OF_TYPE[kind])
    if kind == "default":
        return DefaultRope(theta)
    factor = rope.real("factor", minimum=1.0)
    if kind == "linear":
        return LinearRope(theta, factor)
    if kind == "dynamic":
        return DynamicRope(theta, factor)
    original = config.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", max_position_embeddings),
    )
    if kind == "llama3":
        return _llama3_rope(rope, theta, factor, original)
    return YarnRope(
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=(
            None if rope.values.get("attention_factor") is None else rope.real("attention_factor")
        ),
        beta_fast=rope.real("beta_fast", 0.0) or 32.0,
        beta_slow=rope.real("beta_slow", 0.0) or 1.0,
        mscale=rope.real("mscale", 0.0),
        mscale_all_dim=rope.real("mscale_all_dim", 0.0),
        truncate=rope.boolean("truncate", True),
    )


def max_supported_len(rope: RopeConfig, max_position_embeddings: int) -> int:
    """Longest request this rope gives well-defined positions for, in tokens.

    Scaling stretches the trained length by its factor where the config gives the unstretched one;
    llama3's gives the stretched one, and dynamic scaling is held to the trained length (see
    DynamicRope).
    """
    match rope:
        case LinearRope(factor=factor):
            return int(max_position_embeddings * factor)
        case YarnRope(factor=factor):
            stretched = int(rope.original_max_position_embeddings * factor)
            return max(max_position_embeddings, stretched)
        case DefaultRope() | DynamicRope() | Llama3Rope():
            return max_position_embeddings


def _llama3_rope(rope: JsonFields, theta: float, factor: float, original: int) -> Llama3Rope:
    low_freq_factor = rope.real("low_freq_factor")
    high_freq_factor = rope.real("high_freq_factor")
    if not 0 < low_freq_factor < high_freq_factor:
        raise rope.wrong("high_freq_factor", f"above low_freq_factor={low_freq_factor}, above 0")
    return Llama3Rope(theta, factor, low_freq_factor, high_freq_factor, original)


def _refuse_unknown_keys(rope: JsonFields, kind: str, known: AbstractSet[str]) -> None:
    unknown = sorted(rope.values.keys() - known - _COMMON_KEYS)
    if unknown:
        raise UnsupportedModel(
            f"{rope.source}: {', '.join(unknown)} mean nothing to rope type {kind!r} here; "
            "ignoring them could give wrong positions. Remove them or use a supported rope type."
        )
