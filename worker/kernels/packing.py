"""Matrices in the formats of quantised files, as the CPU kernels read them.

A format has codes of a few bits, scales, and perhaps offsets or zero points; native/unpack.h says
how it computes values, and how a panel stores them. `QuantisedRows` are rows of a matrix in any of
them, before they are in panels.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from longshore.worker.kernels.native import PANEL

BLOCK: Final = 32  # inputs, as in native/unpack.h
FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of E2M1 without their sign, which is the highest bit of a code."""
FP4_VALUES: Final = torch.tensor((*FP4, *(-value for value in FP4)))


@dataclass(frozen=True)
class Packing:
    """A format.

    name:   one of ggml's, or `int4`, `int8` or `fp8`, in groups.
    number: of Packing in native/calls.h; 0: only GPUs have it.
    bits:   of a code.
    span:   inputs of a record, which share the scales of its header.
    fields: dtypes of the header's fields and the elements of each.
    """

    name: str
    number: int
    bits: int
    span: int
    fields: tuple[tuple[torch.dtype, int], ...]

    def grouped(self, group: int) -> "Packing":
        """With this number of inputs in a group: a multiple of BLOCK."""
        return replace(self, span=group)

    @property
    def record_bytes(self) -> int:
        """Of one output."""
        header = sum(dtype.itemsize * count for dtype, count in self.fields)
        return header + self.span * self.bits // 8

    def num_bytes(self, num_rows: int, num_columns: int) -> int:
        """Of the panels of a matrix."""
        return -(-num_rows // PANEL) * PANEL * (num_columns // self.span) * self.record_bytes


_HALF: Final = (torch.float16, 1)
_SUPER: Final = 256

Q4_0: Final = Packing("Q4_0", 1, 4, BLOCK, (_HALF,))
Q4_1: Final = Packing("Q4_1", 2, 4, BLOCK, (_HALF, _HALF))
Q5_0: Final = Packing("Q5_0", 3, 5, BLOCK, (_HALF,))
Q5_1: Final = Packing("Q5_1", 4, 5, BLOCK, (_HALF, _HALF))
Q8_0: Final = Packing("Q8_0", 5, 8, BLOCK, (_HALF,))
Q4_K: Final = Packing("Q4_K", 6, 4, _SUPER, (_HALF, _HALF, (torch.uint8, 8), (torch.uint8, 8)))
Q5_K: Final = Packing("Q5_K", 7, 5, _SUPER, (_HALF, _HALF, (torch.uint8, 8), (torch.uint8, 8)))
Q6_K: Final = Packing("Q6_K", 8, 6, _SUPER, (_HALF, (torch.int8, 16)))
MXFP4: Final = Packing("MXFP4", 9, 4, BLOCK, ((torch.uint8, 1),))
INT4: Final = Packing("int4", 10, 4, BLOCK, ((torch.float32, 1), (torch.uint8, 1)))
INT8: Final = Packing("int8", 11, 8, BLOCK, ((torch.float32, 1), (torch.uint8, 1)))
FP8: Final = Packing("fp8", 0, 8, BLOCK, ((torch.float32, 1),))
"""E4M3 without infinities, as torch.float8_e4m3fn; a code is its byte."""


def native_packing(packing: Packing | None) -> tuple[int, int]:
    """The group and the number of a packing in the structures of native/calls.h. None: plain."""
    return (0, 0) if packing is None else (packing.span, packing.number)


@dataclass(frozen=True)
class QuantisedRows:
    """Rows of a matrix.

    codes:  (rows, columns) uint8, without sign: a signed one is stored plus half its range.
    header: of each field of the format (rows, columns / span, elements).
    """

    packing: Packing
    codes: Tensor
    header: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.codes)

    @classmethod
    def zeros(cls, packing: Packing, num_rows: int, num_columns: int) -> "QuantisedRows":
        records = num_columns // packing.span
        header = tuple(
            torch.zeros(num_rows, records, count, dtype=dtype) for dtype, count in packing.fields
        )
        return cls(packing, torch.zeros(num_rows, num_columns, dtype=torch.uint8), header)

    def rows(self, order: Tensor) -> "QuantisedRows":
        """order: (n,) int64."""
        header = tuple(field[order] for field in self.header)
        return QuantisedRows(self.packing, self.codes[order], header)

    def put(self, places: Tensor, rows: "QuantisedRows") -> None:
        """Copy rows of the same format to these places."""
        self.codes[places] = rows.codes
        for field, given in zip(self.header, rows.header, strict=True):
            field[places] = given


def pack(rows: QuantisedRows) -> Tensor:
    """In panels of PANEL outputs: (panels, bytes) uint8. Further outputs of the last one are 0."""
    packing = rows.packing
    missing = -len(rows) % PANEL
    num_records = rows.codes.shape[1] // packing.span
    num_panels = (len(rows) + missing) // PANEL

    def panels(tensor: Tensor, *shape: int) -> Tensor:
        padded = torch.nn.functional.pad(tensor.flatten(1), (0, 0, 0, missing))
        return padded.view(num_panels, PANEL, num_records, *shape)

    parts = [
        panels(field, -1).permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)
        for field in rows.header
    ]
    words = _words(panels(rows.codes, -1, BLOCK), packing.bits)
    # (panels, outputs, records, blocks, words, bytes of a word)
    parts.append(words.permute(0, 2, 3, 4, 1, 5).flatten(2))
    return torch.cat(parts, dim=2).flatten(1)


def _words(codes: Tensor, bits: int) -> Tensor:
    """codes: (..., BLOCK). Returns (..., words, 4)."""
    if bits == 8:
        return codes.unflatten(-1, (-1, 4))
    words = [_bytes(codes & 15, 4)]
    if bits > 4:
        # words, their words of four bits, bytes of these, codes in a byte
        upper = (codes >> 4).unflatten(-1, (-1, 4 // (bits - 4), 4, 2))
        words.append(_bytes(upper.transpose(-3, -2).flatten(-4), bits - 4))
    return torch.cat(words, dim=-1).unflatten(-1, (-1, 4))


def _bytes(codes: Tensor, bits: int) -> Tensor:
    """Codes of so many bits without gaps, the first one in the lowest bits."""
    several = codes.unflatten(-1, (-1, 8 // bits))
    packed = several[..., 0].clone()
    for place in range(1, 8 // bits):
        packed |= several[..., place] << bits * place
    return packed


def values_of(rows: QuantisedRows) -> Tensor:
    """In float32, (rows, columns): what the kernels compute with. The reference of each format is
    ggml's, or that of compressed-tensors."""
    packing, (count, _) = rows.packing, rows.codes.shape
    codes = rows.codes.view(count, -1, packing.span)

    def of_blocks(field: Tensor) -> Tensor:
        """A number for each element. field: (rows, records, n), each for span / n inputs."""
        return field.float().repeat_interleave(packing.span // field.shape[2], dim=2)

    numbers = codes.float()
    match packing.name, rows.header:
        case "MXFP4", (exponents,):
            bits = exponents.to(torch.int32)
            scales = torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32)
            values = FP4_VALUES[codes.long()] * scales
        case "fp8", (scale,):
            values = codes.view(torch.float8_e4m3fn).float() * scale
        case "int4" | "int8", (scale, zero):
            values = (numbers - zero.float()) * scale
        case _, (scale,):
            values = (numbers - (1 << packing.bits - 1)) * scale.float()
        case "Q6_K", (scale, factors):
            values = (numbers - (1 << packing.bits - 1)) * of_blocks(scale.float() * factors)
        case _, (scale, offset):
            values = numbers * scale.float() + offset.float()
        case _, (scale, offset, factors, offsets):
            values = numbers * of_blocks(scale.float() * factors)
            values -= of_blocks(offset.float() * offsets)
        case _:
            raise AssertionError(packing)
    return values.view(count, -1)
