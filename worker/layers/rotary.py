"""Rotary position embeddings (Su et al., 2021) with the scalings that checkpoints use.

Cosines and sines are tabulated for every position up to max_model_len, so a step only gathers.
"""

import logging
import math

import torch
from torch import Tensor

from longshore.worker.models.rope_config import (
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    RopeConfig,
    YarnRope,
)

logger = logging.getLogger(__name__)


def rotary_table(
    rope: RopeConfig, *, rotary_dim: int, max_positions: int, device: torch.device
) -> Tensor:
    """Cosines and sines of positions below `max_positions`, for `Rotation`.

    rotary_dim: leading elements of a head that are rotated, as pairs (i, i + rotary_dim / 2).
    """
    if device.type == "meta":  # a model whose shapes are checked before it is built
        return torch.empty((max_positions, 2, rotary_dim // 2), device=device)
    if isinstance(rope, LongRope):
        is_long = rope.is_long(max_positions)
        logger.info(
            "longrope: with max_model_len=%d all requests use the %s factors (trained length: %d)",
            max_positions,
            "long" if is_long else "short",
            rope.original_max_position_embeddings,
        )
    frequencies, amplitude = rope_frequencies(rope, rotary_dim, max_positions)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return (torch.stack((angles.cos(), angles.sin()), dim=1) * amplitude).to(device)


def rope_frequencies(rope: RopeConfig, rotary_dim: int, max_model_len: int) -> tuple[Tensor, float]:
    """Radians per position, (rotary_dim / 2,) float32, and the factor on cosines and sines.

    max_model_len: maximum tokens of a request; it determines which factors longrope uses.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope:
        case DefaultRope() | DynamicRope():
            return plain, 1.0
        case LinearRope(factor=factor):
            return plain / factor, 1.0
        case Llama3Rope():
            return _llama3_frequencies(rope, plain), 1.0
        case YarnRope():
            return _yarn_frequencies(rope, exponents, rotary_dim), _yarn_amplitude(rope)
        case LongRope():
            chosen = rope.long_factors if rope.is_long(max_model_len) else rope.short_factors
            factors = torch.tensor(chosen, dtype=torch.float32)
            return 1.0 / (factors * rope.theta**exponents), _longrope_amplitude(rope)


def _llama3_frequencies(rope: Llama3Rope, plain: Tensor) -> Tensor:
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    keep = (original / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = (1 - keep) * plain / rope.factor + keep * plain
    scaled = torch.where(wavelengths > original / rope.low_freq_factor, plain / rope.factor, ramp)
    return torch.where(wavelengths < original / rope.high_freq_factor, plain, scaled)


def _yarn_frequencies(rope: YarnRope, exponents: Tensor, rotary_dim: int) -> Tensor:
    def dimension_of(num_rotations: float) -> float:
        """The (fractional) dimension with `num_rotations` rotations over the trained length."""
        length = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return rotary_dim * math.log(length) / (2 * math.log(rope.theta))

    low = dimension_of(rope.beta_fast)
    high = dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # avoids division by zero
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    wavelengths = rope.theta**exponents
    return (1 / (rope.factor * wavelengths)) * (1 - keep) + (1 / wavelengths) * keep


def _yarn_amplitude(rope: YarnRope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    grown = math.log(rope.factor) * 0.1
    if rope.mscale and rope.mscale_all_dim:
        return (grown * rope.mscale + 1) / (grown * rope.mscale_all_dim + 1)
    return grown + 1


def _longrope_amplitude(rope: LongRope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
