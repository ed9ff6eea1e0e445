"""The tensors of a checkpoint, whatever the format of its files: what they are called, their
shapes, and how to read them. Only reading imports torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from longshore.worker.config import ON_GPU, QuantisedProducts

if TYPE_CHECKING:
    from torch import Tensor

    from longshore.worker.kernels.packing import Packing, QuantisedRows

ReadTensor: TypeAlias = "Callable[[str, tuple[slice, ...]], Tensor]"
"""Reads a part of a tensor of this name, as floats, on the CPU."""


class QuantisedForm(NamedTuple):
    """How rows of a tensor can be read without dequantising them.

    column_dim: the dimension of the columns of a matrix: -1, or -2 if it is transposed.
    """

    packing: "Packing"
    column_dim: int


class WeightReader:
    """Reads tensors. The base class has none that are quantised."""

    def __init__(self, read: ReadTensor) -> None:
        self._read = read

    def __call__(self, name: str, index: tuple[slice, ...]) -> "Tensor":
        """A part of a tensor of this name, as floats, on the CPU."""
        return self._read(name, index)

    def form(self, name: str) -> QuantisedForm | None:
        """None: the tensor can only be read as floats."""
        return None

    def rows(self, name: str, rows: "Tensor", columns: slice) -> "QuantisedRows":
        """rows: (n,) int64, those of all matrices of the tensor counted through. columns: of whole
        records."""
        raise NotImplementedError(f"{name} is not quantised")


class KeptBits(NamedTuple):
    """Of a number that stays quantised, with its part of scales: in the forms of PackedMatrix and
    of DeviceMatrix. None: a CPU has no kernel, so it becomes a float."""

    on_cpu: float | None
    on_gpu: float


@dataclass(frozen=True)
class StoredWeight:
    """A tensor as a model sees it.

    path:  the file that messages about it name.
    dtype: how it is stored, in the words of its format, such as `BF16`.
    kept_bits: if the kernels can compute with it as it is; None: it becomes floats.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    kept_bits: KeptBits | None = None

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


class StoredWeights(ABC):
    """The tensors of a checkpoint. Making one reads the headers of its files.

    model_dir: the folder of the files.
    tensors: by their names in the checkpoint, in the order in which reading them is fastest.
    dtypes:  those that can be read.
    method:  how they are quantised, such as `awq`; None: they are floats.
    """

    model_dir: Path
    tensors: Mapping[str, StoredWeight]
    dtypes: Collection[str] = ("F32", "BF16", "F16")
    method: str | None = None

    @property
    def num_elements(self) -> int:
        return sum(each.num_elements for each in self.tensors.values())

    def num_bytes(self, dtype_bytes: int, products: QuantisedProducts | None) -> int:
        """In memory. dtype_bytes: of a float. products: of what stays quantised; None: nothing."""

        def bits_of(weight: StoredWeight) -> float:
            kept, of_float = weight.kept_bits, 8 * dtype_bytes
            if products is None or kept is None:
                return weight.num_elements * of_float
            bits = kept.on_gpu if products in ON_GPU else kept.on_cpu
            return weight.num_elements * (of_float if bits is None else bits)

        return int(sum(map(bits_of, self.tensors.values()))) // 8

    @property
    def num_file_bytes(self) -> int:
        return sum(path.stat().st_size for path in {each.path for each in self.tensors.values()})

    @abstractmethod
    def reader(self) -> AbstractContextManager[WeightReader]:
        """Open the files. Reading raises BrokenCheckpoint if a file is damaged."""
