"""The tensors of a checkpoint, whatever the format of its files: what they are called, their
shapes, and how to read them. Only reading imports torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

ReadTensor: TypeAlias = "Callable[[str, tuple[slice, ...]], Tensor]"
"""Reads a part of a tensor of this name, as floats, on the CPU."""


@dataclass(frozen=True)
class StoredWeight:
    """A tensor as a model sees it.

    path:  the file that messages about it name.
    dtype: how it is stored, in the words of its format, such as `BF16`.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str

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

    @property
    def num_file_bytes(self) -> int:
        return sum(path.stat().st_size for path in {each.path for each in self.tensors.values()})

    @abstractmethod
    def reader(self) -> AbstractContextManager[ReadTensor]:
        """Open the files. Reading raises BrokenCheckpoint if a file is damaged."""
