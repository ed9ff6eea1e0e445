"""float8_e4m3fn by its definition, in float64."""

import math
from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.kv_cache.fp8 import KVScales

NAN: Final = 0x7F


def number(code: int) -> float:
    """The value of a code."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & NAN == NAN:
        return math.nan
    size = (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
    return -size if code & 0x80 else size


NUMBERS: Final = np.array([number(code) for code in range(NAN)])
"""Those that are not negative, in order: as large as their codes."""


def nearest(values: np.ndarray) -> np.ndarray:
    """The nearest codes, uint8; the even one on ties, and the largest number if out of range."""
    sizes = np.minimum(np.abs(values), NUMBERS[-1])
    above = np.searchsorted(NUMBERS, sizes)  # a NaN is sorted after all numbers
    above = np.minimum(above, NAN - 1)
    below = np.maximum(above - 1, 0)
    to_above, to_below = NUMBERS[above] - sizes, sizes - NUMBERS[below]
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    codes = np.where(np.isnan(values), NAN, np.where(takes_above, above, below))
    return (codes | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def stored(values: Tensor, scale: float) -> Tensor:
    """The codes, uint8, of numbers divided by a scale: multiplied by its inverse in float32."""
    inverse = np.float32(1) / np.float32(scale)
    with np.errstate(over="ignore"):
        divided = values.float().numpy() * inverse
    return torch.from_numpy(nearest(divided.astype(np.float64)))


def kept(vectors: Iterable[Tensor], scales: KVScales | None) -> tuple[Tensor, ...]:
    """Keys and values as attention reads them from the cache, in float64. scales: None if not
    fp8."""
    if scales is None:
        return tuple(vectors)
    table = torch.tensor([number(code) for code in range(256)], dtype=torch.float64)
    return tuple(
        table[stored(each, scale).long()] * scale
        for each, scale in zip(vectors, scales, strict=True)
    )


kv_scales: Final = st.builds(
    KVScales, st.sampled_from([1.0, 0.25, 0.3]), st.sampled_from([1.0, 0.01, 7.0])
)
