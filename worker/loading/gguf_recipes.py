"""Tensors of a model made of those in a GGUF file: rows in another order, matrices of a stack,
several tensors in one. Only the rows that are asked for are read."""

from collections.abc import Callable
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from longshore.protocol.errors import shortened
from longshore.protocol.gguf_header import GgufTensor

Take: TypeAlias = Callable[[str, "slice | np.ndarray"], np.ndarray]
"""Rows of a tensor in the file, (n, columns) in float32, or (n, bytes) as they are stored. The rows
of all matrices in a stack are counted through, and a vector is one row."""
Change: TypeAlias = Callable[[np.ndarray], np.ndarray]
Merge: TypeAlias = Callable[[list[np.ndarray]], np.ndarray]


class RowGrid(NamedTuple):
    """Whole rows of tensors in the file, in another order.

    counts:     the number of rows of each source.
    numbers:    makes the numbers of rows, those of all sources counted through, in the shape of the
                tensor without its columns.
    column_dim: the dimension of the columns: -1, or -2 if matrices are transposed.
    """

    counts: tuple[int, ...]
    numbers: Callable[[], np.ndarray]
    column_dim: int = -1


class Recipe(NamedTuple):
    """How a tensor of the model is made.

    sources: of the tensors in the file.
    read:    its entries from the first to before the last, along its first axis.
    grid:    of a tensor that consists of whole rows of these.
    """

    shape: tuple[int, ...]
    sources: tuple[str, ...]
    read: Callable[[Take, int, int], np.ndarray]
    grid: RowGrid | None = None


def of_rows(shape: tuple[int, ...], sources: tuple[str, ...], grid: RowGrid) -> Recipe:
    def read(take: Take, first: int, last: int) -> np.ndarray:
        numbers = grid.numbers()[first:last]
        rows = take_rows(take, sources, grid.counts, numbers.ravel())
        return np.moveaxis(rows.reshape(*numbers.shape, rows.shape[1]), -1, grid.column_dim)

    return Recipe(shape, sources, read, grid)


def take_rows(
    take: Take, sources: tuple[str, ...], counts: tuple[int, ...], numbers: np.ndarray
) -> np.ndarray:
    """Rows of several tensors, counted through."""
    ends = np.cumsum(counts)
    owners = np.searchsorted(ends, numbers, side="right")
    if not len(numbers):
        return take(sources[0], slice(0, 0))
    if (owners == owners[0]).all():
        return take(sources[owners[0]], _as_slice(numbers - (ends - counts)[owners[0]]))
    found: np.ndarray | None = None
    for owner in np.unique(owners):
        places = owners == owner
        rows = take(sources[owner], _as_slice(numbers[places] - (ends - counts)[owner]))
        if found is None:
            found = np.empty((len(numbers), rows.shape[1]), rows.dtype)
        found[places] = rows
    assert found is not None
    return found


def _as_slice(rows: np.ndarray) -> slice | np.ndarray:
    """Adjacent rows as a slice, which does not copy a file's memory."""
    first, last = int(rows[0]), int(rows[-1])
    is_run = last - first + 1 == len(rows) and bool((np.diff(rows) == 1).all())
    return slice(first, last + 1) if is_run else rows


def plain(tensor: GgufTensor) -> Recipe:
    """As it is stored."""
    name, shape = tensor.name, tensor.shape
    if len(shape) == 1:
        return Recipe(
            shape, (name,), lambda take, first, last: take(name, slice(0, 1))[0, first:last]
        )
    count = prod(shape[:-1])
    return of_rows(shape, (name,), RowGrid((count,), lambda: np.arange(count).reshape(shape[:-1])))


def with_values(recipe: Recipe, change: Callable[[np.ndarray], np.ndarray]) -> Recipe:
    """change: of values of any shape."""
    read = recipe.read
    return Recipe(
        recipe.shape, recipe.sources, lambda take, first, last: change(read(take, first, last))
    )


def reshaped(tensor: GgufTensor, shape: tuple[int, ...]) -> Recipe:
    """A small tensor with the same values in another shape."""
    whole = plain(tensor)

    def read(take: Take, first: int, last: int) -> np.ndarray:
        return whole.read(take, 0, whole.shape[0]).reshape(shape)[first:last]

    return Recipe(shape, whole.sources, read)


def with_rows(recipe: Recipe, shape: tuple[int, ...], change: Change) -> Recipe:
    """The rows of another recipe, in a grid of another shape. change: of their numbers."""
    assert recipe.grid is not None
    numbers = recipe.grid.numbers
    grid = recipe.grid._replace(numbers=lambda: change(numbers()))
    return of_rows(shape, recipe.sources, grid)


def reordered(recipe: Recipe, order: np.ndarray) -> Recipe:
    """Row i is row `order[i]` of a matrix or vector."""
    if recipe.grid is not None:
        return with_rows(recipe, recipe.shape, lambda numbers: numbers[order])

    def read(take: Take, first: int, last: int) -> np.ndarray:
        return recipe.read(take, 0, recipe.shape[0])[order[first:last]]

    return Recipe(recipe.shape, recipe.sources, read)


def turned(tensor: GgufTensor, num_heads: int) -> Recipe:
    """Rows of queries or keys: the model has the first elements of all rotated pairs of a head and
    then the second ones, the file has the pairs."""
    size = tensor.shape[0]
    if size % (2 * num_heads):
        raise ValueError(
            f"{shortened(tensor.name)} has {size:,} rows, which are not {num_heads} heads"
        )
    order = np.arange(size).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
    return reordered(plain(tensor), order)


def one_of(tensor: GgufTensor, number: int) -> Recipe:
    """A matrix of a stack."""
    return with_rows(plain(tensor), tensor.shape[1:], lambda numbers: numbers[number])


def below_each_other(parts: list[Recipe]) -> Recipe:
    """The rows of several matrices."""
    _check_alike([part.shape[1:] for part in parts], parts)
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return _merged(parts, shape, np.concatenate)


def _merged(parts: list[Recipe], shape: tuple[int, ...], merge: Merge, dim: int = -1) -> Recipe:
    """Whole rows of several recipes. merge: makes one grid of theirs. dim: of the columns."""
    grids = [part.grid for part in parts if part.grid is not None]
    if len(grids) != len(parts) or any(grid.column_dim != -1 for grid in grids):
        raise ValueError(f"{shortened(parts[0].sources[0])} is not a matrix")
    starts = np.cumsum([0, *(sum(grid.counts) for grid in grids)])
    counts = tuple(count for grid in grids for count in grid.counts)

    def numbers() -> np.ndarray:
        return merge([grid.numbers() + start for grid, start in zip(grids, starts, strict=False)])

    return of_rows(shape, _sources(parts), RowGrid(counts, numbers, dim))


def rows_of_stacks(parts: list[Recipe]) -> Recipe:
    """Of each matrix of the first stack the rows, then those of the second one."""
    _check_alike([(part.shape[0], *part.shape[2:]) for part in parts], parts)
    shape = (parts[0].shape[0], sum(part.shape[1] for part in parts), *parts[0].shape[2:])
    return _merged(parts, shape, lambda grids: np.concatenate(grids, axis=1))


def _in_turns(stacks: list[np.ndarray]) -> np.ndarray:
    return np.stack(stacks, axis=-1).reshape(len(stacks[0]), -1)


def in_turns(parts: list[Recipe]) -> Recipe:
    """Two stacks of matrices, transposed, whose columns take turns; or of vectors."""
    _check_alike([part.shape for part in parts], parts)
    count, size, *columns = parts[0].shape
    shape = (count, *columns, 2 * size)
    if columns:
        return _merged(parts, shape, _in_turns, dim=-2)

    def read(take: Take, first: int, last: int) -> np.ndarray:
        return _in_turns([part.read(take, first, last) for part in parts])

    return Recipe(shape, _sources(parts), read)


def transposed(tensor: GgufTensor) -> Recipe:
    """A stack whose matrices are transposed."""
    count, rows, columns = tensor.shape
    return _merged([plain(tensor)], (count, columns, rows), lambda grids: grids[0], dim=-2)


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
