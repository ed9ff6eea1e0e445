"""Blocks of quantised numbers in GGUF files, as `QuantisedRows`. The layouts are those of ggml."""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from longshore.worker.kernels import packing
from longshore.worker.kernels.packing import Packing, QuantisedRows


def quantised_rows(type_name: str, stored: Tensor) -> QuantisedRows:
    """stored: (rows, bytes of a row) uint8, of a type in `PACKINGS`."""
    form, read, block_bytes = _TYPES[type_name]
    codes, *header = read(stored.unflatten(1, (-1, block_bytes)))
    return QuantisedRows(form, codes.flatten(1), tuple(header))


def _halves(blocks: Tensor, first: int, count: int = 1) -> Tensor:
    return blocks[..., first : first + 2 * count].contiguous().view(torch.float16)


def _nibbles(blocks: Tensor) -> Tensor:
    """(..., n) -> (..., 2 n): all lower ones, then all upper ones."""
    return torch.cat((blocks & 15, blocks >> 4), dim=-1)


def _bits(packed: Tensor, bits: int) -> Tensor:
    """(..., n) -> (..., n * 8 / bits), in order."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (packed.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)


def _four_bits(num_halves: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def read(blocks: Tensor) -> tuple[Tensor, ...]:
        header = (_halves(blocks, 2 * i) for i in range(num_halves))
        return _nibbles(blocks[..., 2 * num_halves :]), *header

    return read


def _five_bits(num_halves: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def read(blocks: Tensor) -> tuple[Tensor, ...]:
        header = (_halves(blocks, 2 * i) for i in range(num_halves))
        upper, rest = blocks[..., 2 * num_halves :].tensor_split((4,), dim=-1)
        return _nibbles(rest) | _bits(upper, 1) << 4, *header

    return read


def _eight_bits(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks[..., 2:] ^ 128, _halves(blocks, 0)


def _mxfp4(blocks: Tensor) -> tuple[Tensor, ...]:
    return _nibbles(blocks[..., 1:]), blocks[..., :1]


def _factors(stored: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes of eight scales and eight offsets, each of 6 bits."""
    low, middle, high = stored.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), dim=-1)
    return scales, torch.cat((middle & 63, (high >> 4) | (middle >> 6) << 4), dim=-1)


def _k4(blocks: Tensor) -> tuple[Tensor, ...]:
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    return codes, _halves(blocks, 0), _halves(blocks, 2), *_factors(blocks[..., 4:16])


def _k5(blocks: Tensor) -> tuple[Tensor, ...]:
    codes = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    bits = _bits(blocks[..., 16:48], 1).unflatten(-1, (32, 8)).transpose(-1, -2).flatten(-2)
    return codes | bits << 4, _halves(blocks, 0), _halves(blocks, 2), *_factors(blocks[..., 4:16])


def _k6(blocks: Tensor) -> tuple[Tensor, ...]:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    upper = _bits(blocks[..., 128:192], 2).unflatten(-1, (2, 32, 4)).transpose(-1, -2).flatten(-3)
    return low | upper << 4, _halves(blocks, 208), blocks[..., 192:208].view(torch.int8)


_TYPES: Final[Mapping[str, tuple[Packing, Callable[[Tensor], tuple[Tensor, ...]], int]]] = {
    "Q4_0": (packing.Q4_0, _four_bits(1), 18),
    "Q4_1": (packing.Q4_1, _four_bits(2), 20),
    "Q5_0": (packing.Q5_0, _five_bits(1), 22),
    "Q5_1": (packing.Q5_1, _five_bits(2), 24),
    "Q8_0": (packing.Q8_0, _eight_bits, 34),
    "Q4_K": (packing.Q4_K, _k4, 144),
    "Q5_K": (packing.Q5_K, _k5, 176),
    "Q6_K": (packing.Q6_K, _k6, 210),
    "MXFP4": (packing.MXFP4, _mxfp4, 17),
}
PACKINGS: Final[Mapping[str, Packing]] = {name: form for name, (form, _, _) in _TYPES.items()}
"""The types that products are computed of as they are stored; others are dequantised."""
