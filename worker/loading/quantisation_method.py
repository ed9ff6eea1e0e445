"""What a method of quantisation is: from the stored tensors of one module to a tensor of the model.

Everything is checked by config.json and the headers of the files, without torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

from longshore.protocol.errors import shortened
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.loading.quantised_tensor import (
    FP8_DTYPE,
    Blocks,
    Coding,
    Numbers,
    QuantisedTensor,
)
from longshore.worker.loading.stored_weights import StoredWeight
from longshore.worker.models.json_fields import JsonFields

ReadIntegers: TypeAlias = Callable[[str], list[int]]
"""Reads a small stored tensor of integers."""

FP8: Final = (FP8_DTYPE,)
SCALES: Final = ("F32", "BF16", "F16")
_WORD_BITS: Final = 32


@dataclass(frozen=True)
class Module:
    """The stored tensors of one module, by the ends of their names.

    name: such as `model.layers.0.mlp.up_proj`.
    """

    name: str
    parts: Mapping[str, StoredWeight]

    def part(self, end: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> StoredWeight:
        """Raises BrokenCheckpoint unless it is stored in one of `dtypes` and `shapes`. shapes: none
        accepts all."""
        found = self.parts.get(end)
        if found is None:
            file = next(iter(self.parts.values())).path
            raise BrokenCheckpoint(
                f"{file} lacks {shortened(self.name + end)}, without which {self.name} cannot be "
                "dequantised. Fetch the file again."
            )
        if found.dtype not in dtypes or (shapes and found.shape not in shapes):
            wanted = " or ".join(map(str, dict.fromkeys(shapes))) or "any shape"
            raise self.wrong(
                end, f"must be {' or '.join(dtypes)} in {wanted} by quantization_config"
            )
        return found

    def matrix(self, end: str, dtypes: Sequence[str]) -> tuple[int, int]:
        """The shape of a part that must be a matrix."""
        found = self.part(end, dtypes)
        if len(found.shape) != 2 or 0 in found.shape:
            raise self.wrong(end, "must be a matrix with elements")
        return found.shape[0], found.shape[1]

    def ignored(self, end: str) -> BrokenCheckpoint:
        """For a module that should not be quantised."""
        return BrokenCheckpoint(
            f"{self.parts[end].path}: {shortened(self.name + end)} is quantised, but "
            f"quantization_config ignores {shortened(self.name)}. Weights and config.json belong "
            "to different models."
        )

    def wrong(self, end: str, why: str) -> BrokenCheckpoint:
        found = self.parts[end]
        return BrokenCheckpoint(
            f"{found.path}: {shortened(self.name + end)} is {found.dtype} in shape {found.shape}, "
            f"but {why}. Weights and config.json belong to different models."
        )


class Quantisation(ABC):
    """A method.

    method: its name in config.json.
    ends:   of the names of stored tensors that hold numbers; what they are replaced with.
    parts:  ends of the names of tensors that belong to these.
    unused: ends of the names of further ones that are not needed: activations are floats here.
    """

    method: ClassVar[str]
    ends: ClassVar[Mapping[str, str]]
    parts: ClassVar[Sequence[str]]
    unused: ClassVar[Sequence[str]] = ()

    @classmethod
    @abstractmethod
    def read(cls, fields: JsonFields) -> "Quantisation":
        """fields: of quantization_config. Raises UnsupportedModel or BrokenCheckpoint."""

    @abstractmethod
    def tensor(self, module: Module, end: str, integers: ReadIntegers) -> QuantisedTensor:
        """The tensor whose numbers are in the part `end`. Raises as `read`."""


def blocks_of_scales(
    module: Module, end: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> Blocks:
    """The scales of blocks of this size; None: those of the whole tensor or of each row, whichever
    are stored."""
    rows, columns = shape
    name = module.name + end
    if block is None:
        found = module.part(end, SCALES, (), (1,), (1, 1), (rows,), (rows, 1))
        is_row = found.num_elements == rows and len(found.shape) > 0
        block = (1 if is_row else rows, columns)
    grid = -(-rows // block[0]), -(-columns // block[1])
    flat: list[tuple[int, ...]] = [(grid[0],)] if grid[1] == 1 else []
    scalar: list[tuple[int, ...]] = [()] if grid == (1, 1) else []
    found = module.part(end, (*SCALES, "F8_E8M0", "U8"), grid, *flat, *scalar)
    num_dims = 0 if grid == (1, 1) else len(found.shape)
    coding: Coding = "plain" if found.dtype in SCALES else "exponent"
    return Blocks(Numbers(name, grid, num_dims=num_dims, coding=coding), block)


def packed_integers(bits: int, dim: int) -> Numbers:
    """Integers of so many bits, of a tensor that is still to be set."""
    words = 1 if _WORD_BITS % bits == 0 else bits
    return Numbers(
        "",
        (0, 0),
        coding="integers",
        bits=bits,
        dim=dim,
        period=words * _WORD_BITS // bits,
        units=words,
    )


def block_size(fields: JsonFields, key: str, value: object) -> tuple[int, int]:
    """Rows and columns of a block. Raises BrokenCheckpoint."""
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and 0 < size < 1 << 31 for size in value)
    ):
        raise fields.wrong(key, "a list of two sizes above 0: rows and columns of a block")
    return value[0], value[1]


def reject_others(fields: JsonFields, key: str, *supported: str) -> None:
    """Raise UnsupportedModel for a text that is not supported. The first one is the default."""
    value = fields.text(key, supported[0])
    if value.lower() not in supported:
        raise unsupported(fields, key, value, ", ".join(supported))


def unsupported(fields: JsonFields, key: str, value: object, supported: str) -> UnsupportedModel:
    """The error for the value of a setting. supported: other values."""
    return UnsupportedModel(
        f"{fields.source}: {key}={value!r} is not supported. Use a checkpoint with one of "
        f"{supported}, or one that is not quantised."
    )
