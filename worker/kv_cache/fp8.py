"""Keys and values as float8_e4m3fn: a sign, four bits of exponent, three of mantissa.

Its range is 2^-9 to 448; from 2^-6 on, rounding changes a number by at most a sixteenth. Numbers
are divided by their layer's scale before they are stored. Reads do not apply the scales, which
multiply scores and results instead, so that all backends read exactly the same numbers. The CPU
kernel converts to the same bits (kernels/native/simd.h).
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0


class KVScales(NamedTuple):
    """The scales of one layer: stored numbers times the scale are the original ones."""

    keys: float = 1.0
    values: float = 1.0


@dataclass(frozen=True)
class Fp8Layers:
    """The layers of an fp8 group.

    dtype:  dtype of attention's inputs and outputs.
    scales: one entry per layer of the group.
    """

    dtype: torch.dtype
    scales: tuple[KVScales, ...]


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """x / scale as fp8 bits, uint8. Numbers out of range are clamped; NaN stays NaN."""
    inverse = float(np.float32(1) / np.float32(scale))
    return (x.float() * inverse).clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)


def from_fp8(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The stored numbers, without the scale; exact in every dtype of a model."""
    return bits.view(FP8).to(dtype)
