"""Computes parts of quantised tensors in float32, from the stored tensors that hold them."""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from longshore.worker.errors import BrokenCheckpoint
from longshore.worker.kernels.packing import FP4_VALUES
from longshore.worker.loading.quantised_tensor import Blocks, Coding, Numbers, QuantisedTensor
from longshore.worker.loading.stored_weights import ReadTensor

_CHUNK: Final = 1 << 22  # numbers whose intermediate results are in memory at once
_WORD_BITS: Final = 32


def dequantise(tensor: QuantisedTensor, index: tuple[slice, ...], read: ReadTensor) -> Tensor:
    """`tensor[index]` in float32. index: slices without steps, for all dimensions or the first
    ones. read: reads stored tensors. Raises BrokenCheckpoint if the blocks of rows or columns are
    not those of the scales."""
    rest = (slice(None),) * (len(tensor.shape) - len(index))
    bounds = [
        slice(*part.indices(size)[:2])
        for part, size in zip((*index, *rest), tensor.shape, strict=True)
    ]
    *leading, rows, columns = bounds
    if tensor.is_transposed:
        rows, columns = columns, rows
    sizes = [part.stop - part.start for part in (*leading, rows, columns)]
    values = torch.empty(sizes, dtype=torch.float32)
    step = max(1, _CHUNK * sizes[-2] // max(1, values.numel()))
    for begin in range(0, sizes[-2], step):
        end = min(sizes[-2], begin + step)
        part = slice(rows.start + begin, rows.start + end)
        values[..., begin:end, :] = StoredMatrix(tensor, leading, read)(part, columns)
    return values.transpose(-1, -2) if tensor.is_transposed else values


class StoredMatrix:
    """Reads parts of the matrices of a tensor. leading: of its leading dimensions."""

    def __init__(self, tensor: QuantisedTensor, leading: Sequence[slice], read: ReadTensor) -> None:
        self._tensor, self._leading, self._read = tensor, leading, read

    def __call__(self, rows: slice, columns: slice) -> Tensor:
        tensor = self._tensor
        values = self.numbers(tensor.numbers, rows, columns)
        if tensor.zeros is not None:
            values = values.sub_(self._of_blocks(tensor.zeros, rows, columns))
        return values.mul_(self.scaled(self._of_blocks(tensor.scales, rows, columns)))

    def scaled(self, scales: Tensor) -> Tensor:
        """By the scale of all scales."""
        if self._tensor.divisor is not None:
            scales = scales / self._read(self._tensor.divisor, ()).float()
        if self._tensor.factor is not None:
            scales = scales * self._read(self._tensor.factor, ()).float()
        return scales

    def _of_blocks(self, blocks: Blocks, rows: slice, columns: slice) -> Tensor:
        """The number of the block of each element, in a shape that broadcasts to them."""
        numbers = blocks.numbers
        wanted = [rows, columns]
        covering = [
            slice(part.start // size, -(-part.stop // size))
            for part, size in zip(wanted, blocks.block, strict=True)
        ]
        groups = self._groups(wanted, numbers)
        if groups is not None:
            dim = self._tensor.groups_dim
            covering[dim] = slice(0, numbers.shape[dim])
        found = self.numbers(numbers, *covering)
        for dim, (part, size) in enumerate(zip(wanted, blocks.block, strict=True)):
            if groups is not None and dim == self._tensor.groups_dim:
                found = found.index_select(dim - 2, groups)
            elif numbers.shape[dim] > 1 and size > 1:
                before = part.start - covering[dim].start * size
                found = found.repeat_interleave(size, dim - 2)
                found = found.narrow(dim - 2, before, part.stop - part.start)
        return found

    def _groups(self, wanted: Sequence[slice], numbers: Numbers) -> Tensor | None:
        name, dim = self._tensor.groups, self._tensor.groups_dim
        if name is None or numbers.shape[dim] == 1:
            return None
        groups = self._read(name, (wanted[dim],)).long()
        if not groups.numel() or bool((groups == -1).all()):  # written, but not in use
            return None
        if groups.min() < 0 or groups.max() >= numbers.shape[dim]:
            raise BrokenCheckpoint(
                f"{self._tensor.path}: {name} has numbers of groups from {groups.min()} to "
                f"{groups.max()}, but there are scales of {numbers.shape[dim]} groups. Fetch the "
                "file again."
            )
        return groups

    def numbers(self, numbers: Numbers, rows: slice, columns: slice) -> Tensor:
        """In float32, or codes of the coding."""
        if numbers.num_dims == 0:
            found = self._read(numbers.name, ()).reshape(1, 1)
            return _DECODE[numbers.coding](found, numbers)
        if numbers.num_dims == 1:
            found = self._read(numbers.name, (rows,)).unsqueeze(1)
            return _DECODE[numbers.coding](found, numbers)
        parts = [rows, columns]
        wanted = parts[numbers.dim]
        parts[numbers.dim], before = numbers.covering(wanted)
        found = self._read(numbers.name, (*self._leading, *parts))
        dim = len(self._leading) + numbers.dim
        values = _DECODE[numbers.coding](found.movedim(dim, -1 - (numbers.num_dims == 3)), numbers)
        if numbers.period > 1:
            values = values.narrow(-1, before, wanted.stop - wanted.start)
        return values.movedim(-1, dim)


def _plain(found: Tensor, numbers: Numbers) -> Tensor:
    return found.to(torch.float32)


def _bytes(found: Tensor, numbers: Numbers) -> Tensor:
    return found.view(torch.uint8)


def _exponents(found: Tensor, numbers: Numbers) -> Tensor:
    """The exponent of a float32 has the same bias; the smallest one is that of subnormal numbers,
    with half of its range."""
    exponents = _bytes(found, numbers).to(torch.int32)
    return torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)


def _integers(words: Tensor, numbers: Numbers) -> Tensor:
    """Along the last dimension."""
    bits, mask = numbers.bits, (1 << numbers.bits) - 1
    if _WORD_BITS % bits == 0:
        if numbers.is_less_one:
            words = words + sum(1 << shift for shift in range(0, _WORD_BITS, bits))
        places = numbers.order or tuple(range(_WORD_BITS // bits))
        shifts = torch.tensor([bits * place for place in places], dtype=torch.int32)
        found = (words.unsqueeze(-1) >> shifts).bitwise_and_(mask)
    else:  # an integer may be in two words
        pairs = words.unflatten(-1, (-1, bits)).to(torch.int64) & 0xFFFFFFFF
        pairs = pairs | (torch.nn.functional.pad(pairs, (0, 1))[..., 1:] << _WORD_BITS)
        starts = torch.arange(_WORD_BITS) * bits
        found = (pairs[..., starts // _WORD_BITS] >> (starts % _WORD_BITS)).bitwise_and_(mask)
        if numbers.is_less_one:
            found = (found + 1).bitwise_and_(mask)
    return found.flatten(-2).to(torch.float32).add_(numbers.offset)


def _fp4_codes(found: Tensor, numbers: Numbers) -> Tensor:
    """Along the last dimension, or the last two."""
    codes = torch.stack((found & 0xF, found >> 4), dim=-1)
    return codes.flatten(-3 if numbers.num_dims == 3 else -2)


def _fp4(found: Tensor, numbers: Numbers) -> Tensor:
    return FP4_VALUES[_fp4_codes(found, numbers).long()]


_DECODE: Final[dict[Coding, Callable[[Tensor, Numbers], Tensor]]] = {
    "plain": _plain,
    "exponent": _exponents,
    "integers": _integers,
    "fp4": _fp4,
    "bytes": _bytes,
    "fp4_codes": _fp4_codes,
}
