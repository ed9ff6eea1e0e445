"""Keys and values as float8_e4m3fn: a sign, four bits of exponent, three of mantissa.

Its numbers reach from 2^-9 to 448; from 2^-6 on, rounding moves a number by a sixteenth of itself
at most. What is stored is a number divided by the scale of its layer. Scales are not applied to
what is read: they multiply scores and results, so that every way to compute attention reads the
same numbers, exactly. The CPU kernel converts the same way (kernels/native/simd.h), bit by bit.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0


class KVScales(NamedTuple):
    """Of one layer. What is stored, multiplied by these, is what was put in."""

    keys: float = 1.0
    values: float = 1.0


@dataclass(frozen=True)
class Fp8Layers:
    """Of a group that is kept in fp8.

    dtype:  that attention takes and gives.
    scales: by layer of the group.
    """

    dtype: torch.dtype
    scales: tuple[KVScales, ...]


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """The bits, uint8. What is too large becomes the largest number; a NaN stays one."""
    inverse = float(np.float32(1) / np.float32(scale))
    return (x.float() * inverse).clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)


def from_fp8(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that `to_fp8` made, which every dtype of a model can hold; not multiplied."""
    return bits.view(FP8).to(dtype)
