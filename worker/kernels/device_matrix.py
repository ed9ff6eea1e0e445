"""y = x W^T + b on a GPU, with a matrix as a quantised file has it: its codes become values in the
product, in float32, and are rounded to x's dtype. So it is a product with the dequantised matrix.
With `rounds_inputs`, x is rounded to FP8 as well, with a scale for each span of inputs that have a
scale in the matrix, and a product of FP8 with FP8 is computed.

Codes of up to four bits take four, others eight. Every 16 inputs have a scale of their own or share
one; how many, follows from the number of scales.
"""

from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from longshore.worker.kernels.packing import BLOCK, FP4_VALUES, FP8, Packing, QuantisedRows

HAS_FP8: Final = 8, 9
"""The first compute capability with products of FP8 with FP8."""


class Coding(IntEnum):
    """How a code and its scale give a value."""

    MIDDLE = 0  # (code - 2^(bits - 1)) * scale
    ZERO = 1  # (code - zero) * scale
    OFFSET = 2  # code * scale + offset
    FP4 = 3  # E2M1(code) * scale
    FP8 = 4  # E4M3(code) * scale


def line_bytes(packing: Packing, num_columns: int) -> int:
    """Of a row of a `DeviceMatrix`."""
    _, *parts = _form(QuantisedRows.zeros(packing, 1, num_columns))
    return sum(part.nbytes for part in parts if part is not None)


class DeviceMatrix:
    """A matrix that is filled by rows.

    codes:   (rows, columns) uint8; of four bits (rows, columns / 2): byte i of 16 has the codes of
             inputs i and i + 16 of 32, the first one in the lower bits.
    scales:  (rows, columns / span), float16 or float32.
    offsets: the same, float16, float32 or uint8; None: the coding has none.
    """

    def __init__(
        self,
        packing: Packing,
        num_rows: int,
        num_columns: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rounds_inputs: bool = False,
    ) -> None:
        """Zeros. dtype: of x and of the results. rounds_inputs: only if the matrix is in FP8."""
        self.packing, self.num_rows, self.dtype = packing, num_rows, dtype
        self.rounds_inputs = rounds_inputs and packing.name == FP8.name
        self.num_columns = num_columns
        self._fp4_values = FP4_VALUES.to(device)

        def memory(line: Tensor) -> Tensor:
            return torch.zeros(num_rows, line.shape[1], dtype=line.dtype, device=device)

        line = QuantisedRows.zeros(packing, 1, num_columns)
        self._coding, codes, scales, offsets = _form(line)
        self.codes, self.scales = memory(codes), memory(scales)
        self.offsets = None if offsets is None else memory(offsets)

    def fill(self, first: int, rows: QuantisedRows) -> None:
        """Rows of the same format. first: the place of the first one."""
        places = slice(first, first + len(rows))
        _, self.codes[places], self.scales[places], offsets = _form(rows)
        if self.offsets is not None and offsets is not None:
            self.offsets[places] = offsets

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None, int, Coding]:
        """As operators take it: codes, scales, offsets, bits of a code, and the coding."""
        return self.codes, self.scales, self.offsets, self.packing.bits, self._coding

    def product(
        self, x: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """x: (n, columns), bias: (rows,) -> x M^T + bias, (n, rows). out: memory for it, each line
        contiguous. Raises ValueError for arguments of a wrong shape or dtype."""
        from longshore.worker.kernels.gpu.packed_linear import packed_linear

        if x.dtype != self.dtype or x.shape[1:] != (self.num_columns,):
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)}, the matrix needs {self.dtype} "
                f"(n, {self.num_columns})"
            )
        if bias is not None and (bias.dtype != self.dtype or bias.shape != (self.num_rows,)):
            raise ValueError(
                f"the bias is {bias.dtype} {tuple(bias.shape)}, the matrix needs {self.dtype} "
                f"({self.num_rows},)"
            )
        if x.stride(1) != 1:
            x = x.contiguous()
        if out is None:
            out = x.new_empty(len(x), self.num_rows)
        packed_linear(*self.rounded(x), *self.parts, bias, out)
        return out

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x and None, or codes and scales of x in FP8."""
        if not self.rounds_inputs:
            return x, None
        from longshore.worker.kernels.gpu.round_rows import round_rows

        codes, scales = round_rows(x, self.packing.span)
        return codes, scales

    def rows(self, indices: Tensor) -> Tensor:
        """indices: (n,) int32 or int64, below the number of rows -> (n, columns)."""
        codes, scales = self.codes[indices], self.scales[indices].float().unsqueeze(2)
        if codes.shape[1] < self.num_columns:
            pairs = codes.unflatten(1, (-1, 1, BLOCK // 2))
            codes = torch.cat([pairs & 15, pairs >> 4], dim=2).flatten(1)
        groups = codes.unflatten(1, (scales.shape[1], -1))
        if self._coding == Coding.FP4:
            values = self._fp4_values[groups.int()] * scales
        elif self._coding == Coding.FP8:
            values = groups.view(torch.float8_e4m3fn).float() * scales
        elif self._coding == Coding.MIDDLE:
            values = (groups.float() - (1 << self.packing.bits - 1)) * scales
        else:
            assert self.offsets is not None
            offsets = self.offsets[indices].float().unsqueeze(2)
            is_zero = self._coding == Coding.ZERO
            numbers = groups.float()
            values = (numbers - offsets) * scales if is_zero else numbers * scales + offsets
        return values.flatten(1).to(self.dtype)


def _form(rows: QuantisedRows) -> tuple[Coding, Tensor, Tensor, Tensor | None]:
    """The coding, codes, scales and offsets of `DeviceMatrix`."""
    packing, codes = rows.packing, rows.codes
    if packing.bits == 4:
        pairs = codes.unflatten(1, (-1, 2, BLOCK // 2))
        codes = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
    scale, *more = (field.flatten(1) for field in rows.header)

    def scaled(field: Tensor, factors: Tensor) -> Tensor:
        """Several factors of each record."""
        count = factors.shape[1] // field.shape[1]
        return field.float().repeat_interleave(count, dim=1) * factors.float()

    match packing.name, more:
        case "MXFP4", []:
            bits = scale.to(torch.int32)
            exponents = torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32)
            return Coding.FP4, codes, exponents, None
        case "fp8", []:
            return Coding.FP8, codes, scale, None
        case "int4" | "int8", [zeros]:
            return Coding.ZERO, codes, scale, zeros
        case "Q6_K", [factors]:
            return Coding.MIDDLE, codes, scaled(scale, factors), None
        case _, []:
            return Coding.MIDDLE, codes, scale, None
        case _, [offsets]:
            return Coding.OFFSET, codes, scale, offsets
        case _, [offset, factors, offsets]:
            return Coding.OFFSET, codes, scaled(scale, factors), -scaled(offset, offsets)
    raise AssertionError(packing)
