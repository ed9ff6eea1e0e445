"""The tensors of GGUF files: one file, or the parts of one that was split.

Values are computed by the `gguf` package, when they are read. A file has the tensors as llama.cpp
computes with them; `gguf_tensors.py` says how those of a Hugging Face model are made of them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from longshore.protocol.errors import shortened
from longshore.protocol.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.loading.gguf_recipes import Recipe, take_rows
from longshore.worker.loading.gguf_tensors import recipes
from longshore.worker.loading.safetensors_files import has_safetensors
from longshore.worker.loading.stored_weights import (
    KeptBits,
    QuantisedForm,
    StoredWeight,
    StoredWeights,
    WeightReader,
)
from longshore.worker.models.json_fields import MAX_COUNT

if TYPE_CHECKING:
    from torch import Tensor

    from longshore.worker.kernels.packing import QuantisedRows

GGUF_SUFFIX: Final = ".gguf"
KEPT_BITS: Final = {
    "Q4_0": KeptBits(4.5, 4.5),
    "Q4_1": KeptBits(5.0, 5.0),
    "Q5_0": KeptBits(5.5, 8.5),
    "Q5_1": KeptBits(6.0, 9.0),
    "Q8_0": KeptBits(8.5, 8.5),
    "Q4_K": KeptBits(4.625, 6.0),
    "Q5_K": KeptBits(5.625, 10.0),
    "Q6_K": KeptBits(6.5625, 10.0),
    "MXFP4": KeptBits(4.25, 5.0),
}
"""The types that the kernels compute with. Values of others are dequantised."""
_VALUES_AT_A_TIME: Final = 1 << 22


class GgufFiles(StoredWeights):
    """Files are memory-mapped; of a tensor, only the rows that are read are computed.

    stored:  the tensors in the files, by name.
    scales:  of some of them, the tensor with factors for its matrices.
    recipes: how the tensors of the model are made of them.
    """

    method = "gguf"

    def __init__(self, model_dir: Path) -> None:
        """Raises BrokenCheckpoint if a file is damaged or a part is missing, and UnsupportedModel
        for an architecture that is not supported."""
        self.model_dir = model_dir
        headers = {path: read_header(path) for path in sorted(model_dir.glob(f"*{GGUF_SUFFIX}"))}
        first = next(iter(headers.values()))
        self.dtypes = frozenset(readable_types())
        self.stored: dict[str, tuple[Path, GgufTensor]] = {}
        for path, header in headers.items():
            for tensor in header.tensors:
                check_bounds(path, tensor)
                if tensor.name in self.stored:
                    raise BrokenCheckpoint(
                        f"{path} and {self.stored[tensor.name][0].name} both have "
                        f"{shortened(tensor.name)}. Files of different models are in the folder."
                    )
                self.stored[tensor.name] = path, tensor
        tensors = {name: tensor for name, (_, tensor) in self.stored.items()}
        self.scales = _scales_of(tensors, ".scale")
        unused = {*self.scales.values(), *_scales_of(tensors, ".input_scale").values()}
        self.recipes = recipes(
            first.metadata,
            {name: tensor for name, tensor in tensors.items() if name not in unused},
            str(next(iter(headers))),
        )
        self.tensors = {
            name: self._weight(recipe)
            for name, recipe in sorted(self.recipes.items(), key=lambda item: self._place(item[1]))
        }

    @contextmanager
    def reader(self) -> Iterator[WeightReader]:
        files: dict[Path, np.memmap] = {}
        try:
            yield _GgufReader(self, files)
        finally:
            files.clear()

    def _weight(self, recipe: Recipe) -> StoredWeight:
        path, tensor = self.stored[recipe.sources[0]]
        kind = self.kept_type(recipe)
        bits = None if kind is None else KEPT_BITS[kind]
        return StoredWeight(path, recipe.shape, type_name(tensor.type_id), bits)

    def kept_type(self, recipe: Recipe) -> str | None:
        """The type of a tensor that the CPU kernels can compute with as it is."""
        types = {type_name(self.stored[source][1].type_id) for source in recipe.sources}
        if (
            recipe.grid is None
            or len(types) > 1
            or not self.scales.keys().isdisjoint(recipe.sources)
        ):
            return None
        return next(iter(types & KEPT_BITS.keys()), None)

    def _place(self, recipe: Recipe) -> tuple[str, int]:
        path, tensor = self.stored[recipe.sources[0]]
        return path.name, tensor.begin


class _GgufReader(WeightReader):
    """files: those that have been opened."""

    def __init__(self, weights: GgufFiles, files: dict[Path, np.memmap]) -> None:
        super().__init__(self._floats)
        self._weights, self._files = weights, files

    def form(self, name: str) -> QuantisedForm | None:
        from longshore.worker.loading.gguf_blocks import PACKINGS

        recipe = self._weights.recipes[name]
        kind = self._weights.kept_type(recipe)
        if kind is None or recipe.grid is None:
            return None
        return QuantisedForm(PACKINGS[kind], recipe.grid.column_dim)

    def rows(self, name: str, rows: "Tensor", columns: slice) -> "QuantisedRows":
        import torch

        from longshore.worker.loading.gguf_blocks import quantised_rows

        recipe = self._weights.recipes[name]
        assert recipe.grid is not None
        numbers = recipe.grid.numbers().ravel()[rows.numpy()]
        with self._naming(name):
            stored = take_rows(self._bytes, recipe.sources, recipe.grid.counts, numbers)
            kind = type_name(self._weights.stored[recipe.sources[0]][1].type_id)
            part = stored[:, _bytes_of(kind, columns)]
            return quantised_rows(kind, torch.from_numpy(np.require(part, requirements=["C", "W"])))

    def _floats(self, name: str, index: tuple[slice, ...]) -> "Tensor":
        import torch

        recipe = self._weights.recipes[name]
        rows = range(recipe.shape[0])[index[0] if index else slice(None)]
        first, last = (rows[0], rows[-1] + 1) if rows else (0, 0)
        with self._naming(name):
            values = recipe.read(self._values, first, last)
        part = values[(slice(None, None, rows.step), *index[1:])]
        return torch.from_numpy(np.require(part, requirements=["C", "W"]))

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise BrokenCheckpoint(
                f"{self._weights.tensors[name].path} is not a complete GGUF file: {error}. Fetch "
                "it again."
            ) from error

    def _values(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        tensor, scales = self._weights.stored[name][1], self._weights.scales
        values = _dequantised(self._bytes(name, rows), tensor)
        if name in scales:
            factors = self._values(scales[name], slice(0, 1))[0]
            num_rows = prod(tensor.shape[:-1])
            values *= np.repeat(factors, num_rows // len(factors))[rows, None]
        return values

    def _bytes(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        path, tensor = self._weights.stored[name]
        if path not in self._files:
            self._files[path] = np.memmap(path, mode="r")
        return _stored_rows(self._files[path], tensor)[rows]


def has_gguf(path: Path) -> bool:
    """Whether this is a GGUF file, or a folder whose weights are in one."""
    if path.is_dir():
        return not has_safetensors(path) and any(path.glob(f"*{GGUF_SUFFIX}"))
    return path.suffix == GGUF_SUFFIX


def read_header(path: Path, *, with_texts: bool = False) -> GgufHeader:
    """Raises BrokenCheckpoint if this is not a GGUF file, or it is damaged."""
    try:
        return read_gguf_header(path, with_texts=with_texts)
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(
            f"{path} is not a complete GGUF file: {error}. Fetch it again."
        ) from error


def _scales_of(tensors: Mapping[str, GgufTensor], end: str) -> dict[str, str]:
    """The matrices, or stacks of them, that have a factor for each matrix, as those in NVFP4, or
    another scale of this name."""
    found = {}
    for name, tensor in tensors.items():
        matrices = tensors.get(f"{name.removesuffix(end)}.weight") if name.endswith(end) else None
        if matrices is not None and tensor.shape == (prod(matrices.shape[:-2]),):
            found[matrices.name] = name
    return found


def read_vector(path: Path, tensor: GgufTensor) -> list[float]:
    """The values of a vector that belongs to the config. Raises BrokenCheckpoint."""
    if len(tensor.shape) != 1 or tensor.shape[0] > MAX_COUNT:
        raise BrokenCheckpoint(
            f"{path}: {tensor.name} has the shape {tensor.shape}, which is no vector of a rope. "
            "Fetch the file again."
        )
    stored = _stored_rows(np.memmap(path, mode="r"), tensor)
    values: list[float] = _dequantised(stored, tensor)[0].tolist()
    return values


def type_name(type_id: int) -> str:
    """The name of an element type, such as `Q4_K`."""
    from gguf.constants import GGMLQuantizationType

    try:
        return GGMLQuantizationType(type_id).name
    except ValueError:
        return f"type {type_id}"


def check_bounds(path: Path, tensor: GgufTensor) -> None:
    """Raise BrokenCheckpoint if the tensor is not within its file, and UnsupportedModel for a type
    whose values cannot be computed."""
    from gguf.constants import GGML_QUANT_SIZES

    types = readable_types()
    name = type_name(tensor.type_id)
    if name not in types:
        raise UnsupportedModel(
            f"{path}: {shortened(tensor.name)} is stored as {name}. Supported: "
            f"{', '.join(sorted(types))}. Use another file of this model."
        )
    block, block_bytes = GGML_QUANT_SIZES[types[name]]
    if tensor.shape[-1] % block:
        raise BrokenCheckpoint(
            f"{path}: {shortened(tensor.name)} has rows of {tensor.shape[-1]:,} values, which are "
            f"not blocks of {block}. Fetch the file again."
        )
    size = path.stat().st_size
    if (end := tensor.begin + prod(tensor.shape) // block * block_bytes) > size:
        raise BrokenCheckpoint(
            f"{path} is not a complete GGUF file: {shortened(tensor.name)} ends at byte {end:,}, "
            f"and the file has {size:,}. Fetch it again."
        )


@cache
def readable_types() -> dict[str, Any]:
    """The types whose values the `gguf` package computes, by name."""
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    names = (*(each.name for each in quants._type_traits), "F32", "F16")
    return {name: GGMLQuantizationType[name] for name in names}


def _stored_rows(file: np.memmap, tensor: GgufTensor) -> np.ndarray:
    """(rows, bytes of a row), those of more than two dimensions counted through."""
    num_rows = prod(tensor.shape[:-1])
    row_bytes = _bytes_of(type_name(tensor.type_id), slice(0, tensor.shape[-1])).stop
    return file[tensor.begin : tensor.begin + num_rows * row_bytes].reshape(num_rows, row_bytes)


def _bytes_of(kind: str, columns: slice) -> slice:
    """Of a row. columns: whole blocks."""
    from gguf.constants import GGML_QUANT_SIZES

    block, block_bytes = GGML_QUANT_SIZES[readable_types()[kind]]
    return slice(columns.start // block * block_bytes, columns.stop // block * block_bytes)


def _dequantised(stored: np.ndarray, tensor: GgufTensor) -> np.ndarray:
    """In float32. stored: some rows."""
    from gguf.quants import dequantize

    values = np.empty((len(stored), tensor.shape[-1]), np.float32)
    # The package needs several times the memory of what it computes.
    step = max(1, _VALUES_AT_A_TIME // tensor.shape[-1])
    kind = readable_types()[type_name(tensor.type_id)]
    for first in range(0, len(stored), step):
        part = np.ascontiguousarray(stored[first : first + step])
        values[first : first + step] = dequantize(part, kind)
    return values
