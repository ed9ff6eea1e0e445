"""Tensors of a model made of those in a GGUF file: rows in another order, matrices of a stack,
several tensors in one. Only the rows that are asked for are read."""

from collections.abc import Callable
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from longshore.protocol.errors import shortened
from longshore.protocol.gguf_header import GgufTensor

Take: TypeAlias = Callable[[str, "slice | np.ndarray"], np.ndarray]
"""Rows of a tensor in the file, (n, columns) in float32. The rows of all matrices in a stack are
counted through, and a vector is one row."""


class Recipe(NamedTuple):
    """How a tensor of the model is made.

    sources: of the tensors in the file.
    read:    its entries from the first to before the last, along its first axis.
    """

    shape: tuple[int, ...]
    sources: tuple[str, ...]
    read: Callable[[Take, int, int], np.ndarray]


def plain(tensor: GgufTensor) -> Recipe:
    """As it is stored."""
    name, shape = tensor.name, tensor.shape
    width = prod(shape[1:-1])

    def read(take: Take, first: int, last: int) -> np.ndarray:
        if len(shape) == 1:
            return take(name, slice(0, 1))[0, first:last]
        return take(name, slice(first * width, last * width)).reshape(last - first, *shape[1:])

    return Recipe(shape, (name,), read)


def with_values(recipe: Recipe, change: Callable[[np.ndarray], np.ndarray]) -> Recipe:
    """change: of values of any shape."""
    return recipe._replace(read=lambda take, first, last: change(recipe.read(take, first, last)))


def reshaped(tensor: GgufTensor, shape: tuple[int, ...]) -> Recipe:
    """A small tensor with the same values in another shape."""
    whole = plain(tensor)

    def read(take: Take, first: int, last: int) -> np.ndarray:
        return whole.read(take, 0, whole.shape[0]).reshape(shape)[first:last]

    return Recipe(shape, whole.sources, read)


def turned(tensor: GgufTensor, num_heads: int) -> Recipe:
    """Rows of queries or keys: the model has the first elements of all rotated pairs of a head and
    then the second ones, the file has the pairs."""
    name, shape = tensor.name, tensor.shape
    if shape[0] % (2 * num_heads):
        raise ValueError(
            f"{shortened(name)} has {shape[0]:,} rows, which are not {num_heads} heads"
        )
    half = shape[0] // num_heads // 2

    def read(take: Take, first: int, last: int) -> np.ndarray:
        rows = np.arange(first, last)
        head, place = np.divmod(rows, 2 * half)
        order = head * 2 * half + 2 * (place % half) + place // half
        return take(name, slice(0, 1))[0, order] if len(shape) == 1 else take(name, order)

    return Recipe(shape, (name,), read)


def one_of(tensor: GgufTensor, number: int) -> Recipe:
    """A matrix of a stack."""
    shape = tensor.shape[1:]
    begin = number * shape[0]

    def read(take: Take, first: int, last: int) -> np.ndarray:
        return take(tensor.name, slice(begin + first, begin + last))

    return Recipe(shape, (tensor.name,), read)


def below_each_other(parts: list[Recipe]) -> Recipe:
    """The rows of several matrices."""
    _check_alike([part.shape[1:] for part in parts], parts)
    ends = np.cumsum([part.shape[0] for part in parts], dtype=object)

    def read(take: Take, first: int, last: int) -> np.ndarray:
        found = []
        for part, end in zip(parts, ends, strict=True):
            begin = end - part.shape[0]
            low, high = max(first, begin), min(last, end)
            if low < high:
                found.append(part.read(take, low - begin, high - begin))
        return np.concatenate(found) if found else parts[0].read(take, 0, 0)

    shape = (ends[-1], *parts[0].shape[1:])
    return Recipe(shape, _sources(parts), read)


def _merged(
    parts: list[Recipe], shape: tuple[int, ...], merge: Callable[..., np.ndarray]
) -> Recipe:
    """Stacks whose matrices of the same number are merged."""

    def read(take: Take, first: int, last: int) -> np.ndarray:
        return merge(*(part.read(take, first, last) for part in parts))

    return Recipe(shape, _sources(parts), read)


def rows_of_stacks(parts: list[Recipe]) -> Recipe:
    """Of each matrix of the first stack the rows, then those of the second one."""
    _check_alike([(part.shape[0], *part.shape[2:]) for part in parts], parts)
    shape = (parts[0].shape[0], sum(part.shape[1] for part in parts), *parts[0].shape[2:])
    return _merged(parts, shape, lambda *stacks: np.concatenate(stacks, axis=1))


def in_turns(parts: list[Recipe]) -> Recipe:
    """Two stacks, transposed, whose columns take turns."""
    _check_alike([part.shape for part in parts], parts)
    shape = parts[0].shape
    both = (shape[0], *shape[2:], 2 * shape[1])

    def merge(*stacks: np.ndarray) -> np.ndarray:
        last = [np.moveaxis(stack, 1, -1) for stack in stacks]
        return np.stack(last, axis=-1).reshape(len(stacks[0]), *both[1:])

    return _merged(parts, both, merge)


def transposed(tensor: GgufTensor) -> Recipe:
    """A stack whose matrices are transposed."""
    count, rows, columns = tensor.shape
    return _merged([plain(tensor)], (count, columns, rows), lambda stack: stack.swapaxes(1, 2))


def heads_of_latents(parts: list[Recipe]) -> Recipe:
    """Two stacks with a matrix per head, the first ones transposed: of each head the rows of the
    first matrix, then those of the second one."""
    (num_heads, size, first_rows), (_, second_rows, _) = (part.shape for part in parts)
    _check_alike([(num_heads, size), parts[1].shape[::2]], parts)
    rows = first_rows + second_rows

    def read(take: Take, first: int, last: int) -> np.ndarray:
        low, high = first // rows, -(-last // rows)
        keys, values = (part.read(take, low, high) for part in parts)
        both = np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, size)
        return both[first - low * rows : last - low * rows]

    return Recipe((num_heads * rows, size), _sources(parts), read)


def of_dims(tensor: GgufTensor, num_dims: int) -> GgufTensor:
    """Raises ValueError unless the tensor has so many dimensions."""
    if len(tensor.shape) != num_dims:
        raise ValueError(f"{shortened(tensor.name)} has the shape {tensor.shape}")
    return tensor


def _check_alike(shapes: list[tuple[int, ...]], parts: list[Recipe]) -> None:
    if any(shape != shapes[0] for shape in shapes):
        found = ", ".join(f"{shortened(part.sources[0])} {part.shape}" for part in parts)
        raise ValueError(f"these tensors do not belong together: {found}")


def _sources(parts: list[Recipe]) -> tuple[str, ...]:
    return tuple(name for part in parts for name in part.sources)
