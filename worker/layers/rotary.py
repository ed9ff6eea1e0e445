"""Rotary position embeddings (Su et al., 2021) with the scalings that Llama checkpoints use.

Angles are tabulated once for every position a request may have, so a step only gathers.
"""

import math

import torch
from torch import Tensor

from longshore.worker.models.rope_config import (
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    RopeConfig,
    YarnRope,
)


class RotaryEmbedding:
    """Turns pairs (i, i + head_dim / 2) of each head by an angle that grows with the position."""

    def __init__(
        self,
        rope: RopeConfig,
        *,
        head_dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        frequencies, amplitude = rope_frequencies(rope, head_dim)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        self._cos = (angles.cos() * amplitude).to(dtype).to(device)
        self._sin = (angles.sin() * amplitude).to(dtype).to(device)

    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: (n,) int64 -> cosines and sines, each (n, 1, head_dim / 2)."""
        cos = self._cos.index_select(0, positions)
        sin = self._sin.index_select(0, positions)
        return cos.unsqueeze(1), sin.unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (n, num_heads, head_dim) -> turned, contiguous, the same shape."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position, (head_dim / 2,) float32, and the factor on cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope:
        case DefaultRope() | DynamicRope():
            return plain, 1.0
        case LinearRope(factor=factor):
            return plain / factor, 1.0
        case Llama3Rope():
            return _llama3_frequencies(rope, plain), 1.0
        case YarnRope():
            return _yarn_frequencies(rope, exponents, head_dim), _yarn_amplitude(rope)


def _llama3_frequencies(rope: Llama3Rope, plain: Tensor) -> Tensor:
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    keep = (original / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = (1 - keep) * plain / rope.factor + keep * plain
    scaled = torch.where(wavelengths > original / rope.low_freq_factor, plain / rope.factor, ramp)
    return torch.where(wavelengths < original / rope.high_freq_factor, plain, scaled)


def _yarn_frequencies(rope: YarnRope, exponents: Tensor, head_dim: int) -> Tensor:
    def dimension_that_turns(num_turns: float) -> float:
        """The (fractional) dimension that makes `num_turns` turns over the trained length."""
        length = rope.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low = dimension_that_turns(rope.beta_fast)
    high = dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
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
