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
from longshore.worker.loading.gguf_recipes import Recipe
from longshore.worker.loading.gguf_tensors import recipes
from longshore.worker.loading.safetensors_files import has_safetensors
from longshore.worker.loading.stored_weights import ReadTensor, StoredWeight, StoredWeights
from longshore.worker.models.json_fields import MAX_COUNT

if TYPE_CHECKING:
    from torch import Tensor

GGUF_SUFFIX: Final = ".gguf"
_VALUES_AT_A_TIME: Final = 1 << 22


class GgufFiles(StoredWeights):
    """Files are memory-mapped; of a tensor, only the rows that are read are computed."""

    method = "gguf"

    def __init__(self, model_dir: Path) -> None:
        """Raises BrokenCheckpoint if a file is damaged or a part is missing, and UnsupportedModel
        for an architecture that is not supported."""
        self.model_dir = model_dir
        headers = {path: read_header(path) for path in sorted(model_dir.glob(f"*{GGUF_SUFFIX}"))}
        first = next(iter(headers.values()))
        self.dtypes = frozenset(readable_types())
        self._tensors: dict[str, tuple[Path, GgufTensor]] = {}
        for path, header in headers.items():
            for tensor in header.tensors:
                check_bounds(path, tensor)
                if tensor.name in self._tensors:
                    raise BrokenCheckpoint(
                        f"{path} and {self._tensors[tensor.name][0].name} both have "
                        f"{shortened(tensor.name)}. Files of different models are in the folder."
                    )
                self._tensors[tensor.name] = path, tensor
        tensors = {name: tensor for name, (_, tensor) in self._tensors.items()}
        self._scales = _scales_of(tensors, ".scale")
        unused = {*self._scales.values(), *_scales_of(tensors, ".input_scale").values()}
        self._recipes = recipes(
            first.metadata,
            {name: tensor for name, tensor in tensors.items() if name not in unused},
            str(next(iter(headers))),
        )
        self.tensors = {
            name: self._weight(recipe)
            for name, recipe in sorted(self._recipes.items(), key=lambda item: self._place(item[1]))
        }

    @contextmanager
    def reader(self) -> Iterator[ReadTensor]:
        files: dict[Path, np.memmap] = {}

        def take(name: str, rows: slice | np.ndarray) -> np.ndarray:
            path, tensor = self._tensors[name]
            if path not in files:
                files[path] = np.memmap(path, mode="r")
            values = _values(files[path], tensor, rows)
            if name in self._scales:
                factors = take(self._scales[name], slice(0, 1))[0]
                num_rows = prod(tensor.shape[:-1])
                values *= np.repeat(factors, num_rows // len(factors))[rows, None]
            return values

        def read(name: str, index: tuple[slice, ...]) -> "Tensor":
            import torch

            recipe = self._recipes[name]
            rows = range(recipe.shape[0])[index[0] if index else slice(None)]
            first, last = (rows[0], rows[-1] + 1) if rows else (0, 0)
            try:
                values = recipe.read(take, first, last)
            except (OSError, ValueError) as error:
                raise BrokenCheckpoint(
                    f"{self.tensors[name].path} is not a complete GGUF file: {error}. Fetch it "
                    "again."
                ) from error
            part = values[(slice(None, None, rows.step), *index[1:])]
            return torch.from_numpy(np.require(part, requirements=["C", "W"]))

        try:
            yield read
        finally:
            files.clear()

    def _weight(self, recipe: Recipe) -> StoredWeight:
        path, tensor = self._tensors[recipe.sources[0]]
        return StoredWeight(path, recipe.shape, type_name(tensor.type_id))

    def _place(self, recipe: Recipe) -> tuple[str, int]:
        path, tensor = self._tensors[recipe.sources[0]]
        return path.name, tensor.begin


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
    values: list[float] = _values(np.memmap(path, mode="r"), tensor, slice(0, 1))[0].tolist()
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


def _values(file: np.memmap, tensor: GgufTensor, rows: slice | np.ndarray) -> np.ndarray:
    """Rows of a tensor as float32; those of more than two dimensions are counted through."""
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    kind = readable_types()[type_name(tensor.type_id)]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    num_rows, row_bytes = prod(tensor.shape[:-1]), tensor.shape[-1] // block * block_bytes
    stored = file[tensor.begin : tensor.begin + num_rows * row_bytes].reshape(num_rows, row_bytes)
    chosen = stored[rows]
    values = np.empty((len(chosen), tensor.shape[-1]), np.float32)
    # The package needs several times the memory of what it computes.
    step = max(1, _VALUES_AT_A_TIME // tensor.shape[-1])
    for first in range(0, len(chosen), step):
        part = np.ascontiguousarray(chosen[first : first + step])
        values[first : first + step] = dequantize(part, kind)
    return values
