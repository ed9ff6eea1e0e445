"""The rope settings of a checkpoint, in either spelling.

Up to transformers 4 the base is `rope_theta` and the scaling `rope_scaling` (with `type` or
`rope_type`); transformers 5 writes both into `rope_parameters`.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, TypeAlias

from longshore.protocol.errors import shortened
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
    """NTK-aware scaling: the base grows with the sequence beyond the trained length.

    Up to that length there is no scaling. Beyond it, each new length would rotate *all* keys by
    other angles, but cached keys keep their rotation, so output would depend on which request
    computed the prefix. Longer requests are therefore rejected (`max_supported_len`).
    """

    theta: float
    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Low frequencies divided by `factor`, high ones kept, interpolated between (Llama 3.1)."""

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


@dataclass(frozen=True)
class LongRope:
    """Each frequency divided by its own factor (LongRoPE, Ding et al., 2024).

    There are two sets of factors, for requests up to the trained length and beyond it. The choice
    is made once, by max_model_len, because cached keys cannot be rotated again when a request
    exceeds the trained length.

    short_factors, long_factors: one per rotary pair.
    attention_factor: multiplies cosines and sines; None derives it from factor and trained length.
    """

    theta: float
    factor: float
    original_max_position_embeddings: int
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float | None

    def is_long(self, max_model_len: int) -> bool:
        return max_model_len > self.original_max_position_embeddings


RopeConfig: TypeAlias = DefaultRope | LinearRope | DynamicRope | Llama3Rope | YarnRope | LongRope

DEFAULT_THETA: Final = 10_000.0
# `finetuned` is in some checkpoints and has no effect.
_COMMON_KEYS: Final = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_KEYS_OF_TYPE: Final[dict[str, set[str]]] = {
    "default": set(),
    # The original length has no effect in these two; transformers accepts it.
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
    "longrope": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    },
}


def read_rope_config(
    config: JsonFields,
    *,
    max_position_embeddings: int,
    rotary_dim: int,
    aliases: Mapping[str, str] | None = None,
    default_theta: float = DEFAULT_THETA,
) -> RopeConfig:
    """The rope of a config.json. Raises UnsupportedModel for an unsupported type or key.

    rotary_dim:    elements of a head that are rotated.
    aliases:       other names of rope types in this family.
    default_theta: the family's default base.
    """
    rope = config.table("rope_scaling") or config.table("rope_parameters")
    theta = config.real("rope_theta", default_theta, minimum=1.0)
    if rope is None:
        return DefaultRope(theta)
    theta = rope.real("rope_theta", theta, minimum=1.0)
    kind = rope.text("rope_type", rope.text("type", "default"))
    kind = (aliases or {}).get(kind, kind)
    if kind not in _KEYS_OF_TYPE:
        raise UnsupportedModel(
            f"{rope.source}: rope type {kind!r} is not supported; positions would be wrong. "
            f"Supported: {', '.join(_KEYS_OF_TYPE)}."
        )
    _reject_unknown_keys(rope, kind, _KEYS_OF_TYPE[kind])
    if kind == "default":
        return DefaultRope(theta)
    key = "original_max_position_embeddings"
    holder = rope if config.values.get(key) is None else config
    # longrope chooses its factors by this length, so it has no default.
    original = holder.integer(key, None if kind == "longrope" else max_position_embeddings)
    if kind == "longrope":
        stretched = max(1.0, max_position_embeddings / original)
        return _long_rope(rope, theta, stretched, original, rotary_dim)
    factor = rope.real("factor", minimum=1.0)
    if kind == "linear":
        return LinearRope(theta, factor)
    if kind == "dynamic":
        return DynamicRope(theta, factor)
    if kind == "llama3":
        return _llama3_rope(rope, theta, factor, original)
    return YarnRope(
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=_optional_real(rope, "attention_factor"),
        beta_fast=rope.real("beta_fast", 0.0) or 32.0,
        beta_slow=rope.real("beta_slow", 0.0) or 1.0,
        mscale=rope.real("mscale", 0.0),
        mscale_all_dim=rope.real("mscale_all_dim", 0.0),
        truncate=rope.boolean("truncate", True),
    )


def max_supported_len(rope: RopeConfig, max_position_embeddings: int) -> int:
    """Maximum tokens of a request for which this rope gives well-defined positions.

    With linear and YaRN scaling the config gives the trained length, which is multiplied by the
    factor. With llama3 and longrope it gives the length after scaling. Dynamic scaling is limited
    to the trained length (see DynamicRope).
    """
    match rope:
        case LinearRope(factor=factor):
            return int(max_position_embeddings * factor)
        case YarnRope(factor=factor):
            stretched = int(rope.original_max_position_embeddings * factor)
            return max(max_position_embeddings, stretched)
        case DefaultRope() | DynamicRope() | Llama3Rope() | LongRope():
            return max_position_embeddings


def rotation_of(rope: RopeConfig, max_model_len: int) -> str:
    """What `max_model_len` decides about the rotation of keys, in words; empty: nothing. Keys of
    another rotation cannot be used."""
    if isinstance(rope, LongRope):
        return f"longrope, {'long' if rope.is_long(max_model_len) else 'short'} factors"
    return ""


def _llama3_rope(rope: JsonFields, theta: float, factor: float, original: int) -> Llama3Rope:
    low_freq_factor = rope.real("low_freq_factor")
    high_freq_factor = rope.real("high_freq_factor")
    if not 0 < low_freq_factor < high_freq_factor:
        raise rope.wrong("high_freq_factor", f"above low_freq_factor={low_freq_factor}, above 0")
    return Llama3Rope(theta, factor, low_freq_factor, high_freq_factor, original)


def _long_rope(
    rope: JsonFields, theta: float, stretched: float, original: int, rotary_dim: int
) -> LongRope:
    return LongRope(
        theta=theta,
        factor=rope.real("factor", stretched, minimum=1.0),
        original_max_position_embeddings=original,
        short_factors=rope.reals("short_factor", rotary_dim // 2),
        long_factors=rope.reals("long_factor", rotary_dim // 2),
        attention_factor=_optional_real(rope, "attention_factor"),
    )


def _optional_real(rope: JsonFields, key: str) -> float | None:
    return None if rope.values.get(key) is None else rope.real(key)


def _reject_unknown_keys(rope: JsonFields, kind: str, known: AbstractSet[str]) -> None:
    unknown = sorted(rope.values.keys() - known - _COMMON_KEYS)
    if unknown:
        raise UnsupportedModel(
            f"{rope.source}: {shortened(', '.join(unknown))} not supported for rope type {kind!r}; "
            "ignoring them could give wrong positions. Remove them or use a supported rope type."
        )
