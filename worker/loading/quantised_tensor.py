"""How a quantised tensor is stored: numbers in a few bits, a scale for each block of them, and
perhaps a zero point for each block. Every format here is of this form:

    value = (number - zero point) * scale

`dequantise.py` computes it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from longshore.worker.loading.stored_weights import KeptBits

KEPT_BLOCK: Final = 32
"""Numbers in the blocks of kernels/packing.py."""
FP8_SPAN: Final = 128
FP8_DTYPE: Final = "F8_E4M3"

Coding: TypeAlias = Literal["plain", "exponent", "integers", "fp4", "bytes", "fp4_codes"]


@dataclass(frozen=True)
class Numbers:
    """A matrix of numbers in one stored tensor, perhaps with leading dimensions.

    name:   of the stored tensor.
    shape:  of the matrix: (rows, columns).
    num_dims: of the stored matrix. 0: one number for all; 1: a number for each row; 2: a matrix;
            3: a matrix whose packed elements have several bytes, in a dimension of their own.
    coding: plain: an element per number. exponent: bytes e for 2 ** (e - 127), E8M0. integers:
            without sign, without gaps in words of 32 bits, the first one in the lowest bits. fp4:
            two per byte, E2M1, the first one in the lower bits. bytes, fp4_codes: the codes of
            exponents and of fp4, without their values.
    bits:   of an integer.
    dim:    the dimension of the matrix that is packed.
    period, units: as many numbers are in as many stored elements along `dim`.
    order:  the place of each integer in its word; empty: in order.
    offset: added to each integer.
    is_less_one: integers are stored minus one, by a subtraction from whole words.
    """

    name: str
    shape: tuple[int, int]
    num_dims: int = 2
    coding: Coding = "plain"
    bits: int = 0
    dim: int = 1
    period: int = 1
    units: int = 1
    order: tuple[int, ...] = ()
    offset: int = 0
    is_less_one: bool = False

    def covering(self, part: slice) -> tuple[slice, int]:
        """The stored elements along `dim` that hold the numbers of `part`, and the numbers among
        them before it."""
        first, last = part.start // self.period, -(-part.stop // self.period)
        end = min(last * self.units, self.stored_size(self.shape[self.dim]))
        return slice(first * self.units, end), part.start - first * self.period

    def stored_size(self, size: int) -> int:
        """How many elements hold `size` numbers along `dim`."""
        return -(-size * self.units // self.period)


@dataclass(frozen=True)
class Blocks:
    """Scales or zero points: one for each block of rows x columns of the matrix.

    block: its rows and columns.
    """

    numbers: Numbers
    block: tuple[int, int]


@dataclass(frozen=True)
class QuantisedTensor:
    """One tensor of a model.

    path:     of the file with the numbers.
    leading:  dimensions before those of the matrix, such as experts.
    is_transposed: the tensor of the model has the matrix's columns as rows.
    divisor, factor: name of a scale of all scales, by which they are divided or multiplied.
    groups:   name of the tensor that gives the block of each row or column of the matrix, along
              `groups_dim`, if they are not in order.
    others:   names of further tensors that are about this one but are not needed.
    """

    path: Path
    numbers: Numbers
    scales: Blocks
    zeros: Blocks | None = None
    leading: tuple[int, ...] = ()
    is_transposed: bool = False
    divisor: str | None = None
    factor: str | None = None
    groups: str | None = None
    groups_dim: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.numbers.shape
        return *self.leading, *((columns, rows) if self.is_transposed else (rows, columns))

    @property
    def inputs_dim(self) -> int:
        """The dimension of the matrix along which the numbers of a group are."""
        rows, columns = self.scales.block
        return 0 if columns == 1 and rows > 1 else 1

    @property
    def group(self) -> int:
        """Numbers with one scale, along that dimension."""
        return self.scales.block[self.inputs_dim]

    @property
    def fp8_span(self) -> int:
        """Numbers in FP8 with one scale in memory. One scale of a whole row is several there, so
        that ranks can divide the row."""
        is_whole = self.scales.numbers.shape[self.inputs_dim] == 1
        return FP8_SPAN if is_whole and self.group % FP8_SPAN == 0 else self.group

    def kept_bits(self, dtype: str) -> int | None:
        """Bits of a code that kernels compute with: 4 or 8. None: they have no such format. dtype:
        of the stored numbers."""
        numbers, scales = self.numbers, self.scales
        if self.group % KEPT_BLOCK or numbers.shape[self.inputs_dim] % self.group:
            return None
        if numbers.coding == "fp4":
            is_mxfp4 = scales.numbers.coding == "exponent" and self.group == KEPT_BLOCK
            return None if not is_mxfp4 or self.zeros or self.divisor or self.factor else 4
        if self.zeros is not None and self.zeros.block != scales.block:
            return None
        if numbers.coding == "integers":
            return 4 if numbers.bits <= 4 else 8
        is_fp8 = dtype == FP8_DTYPE and self.zeros is None
        return 8 if numbers.coding == "plain" and (dtype == "I8" or is_fp8) else None

    def bits_in_memory(self, dtype: str) -> KeptBits | None:
        """Of a number that stays as it is: its code and its part of a scale and a zero point."""
        bits = self.kept_bits(dtype)
        if bits is None:
            return None
        if dtype == FP8_DTYPE:
            return KeptBits(None, bits + 32 / self.fp8_span)
        on_cpu, on_gpu = (8, 32) if self.numbers.coding == "fp4" else (40, 40)
        return KeptBits(bits + on_cpu / self.group, bits + on_gpu / self.group)

    def names(self) -> Iterator[str]:
        """Of the tensors that must be read."""
        yield self.numbers.name
        yield self.scales.numbers.name
        if self.zeros is not None:
            yield self.zeros.numbers.name
        yield from filter(None, (self.divisor, self.factor, self.groups))
