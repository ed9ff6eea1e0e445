"""The header of a GGUF file: its metadata, and what its tensors are called and where they lie.

The format is llama.cpp's (docs/gguf.md of ggml), versions 2 and 3 in little-endian order. The
`gguf` package reads it, too, but trusts the counts and sizes in the file; here each one is compared
with the bytes that are left before anything is read or allocated for it.
"""

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from longshore.protocol.errors import shortened
from longshore.protocol.model_files import open_regular

MAX_HEADER_BYTES: Final = 256 << 20
"""The largest vocabularies have a tenth of it."""
STORED_DTYPE: Final = "gguf_dtype"
"""Key of a config.json that is made of such a file: how most matrices are stored, to be shown."""
MAX_DIMS: Final = 4
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_ALIGNMENT: Final = 1 << 16
_LENGTH: Final = struct.Struct("<Q")
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"},
    **{10: "Q", 11: "q", 12: "d"},
}
"""Types of values, as `struct` names them."""


class GgufTensor(NamedTuple):
    """shape:  as numpy has it, rows before columns: the file has the reverse.
    type_id: of the elements' type in ggml.
    begin:  of its data in the file, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    begin: int


class GgufHeader(NamedTuple):
    """metadata:  values by key: numbers, texts, and lists of them.
    data_begin:   where the header ends and the data of tensors begins, in bytes.
    """

    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    data_begin: int


def read_gguf_header(path: Path, *, with_texts: bool = True) -> GgufHeader:
    """with_texts: read lists of texts, too; without them, the vocabulary is skipped.

    Raises OSError if the file cannot be read, and ValueError if it is not a complete GGUF file.
    Where tensors begin is inside the file; where they end depends on their types.
    """
    with open_regular(path) as file:
        size = file.seek(0, 2)
        if size < len(_MAGIC) + 4:
            raise ValueError("the file is too short")
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            return _Reader(content, size, with_texts).header()


class _Reader:
    def __init__(self, content: mmap.mmap, size: int, with_texts: bool) -> None:
        self._content = content
        self._file_size = size
        self._end = min(size, MAX_HEADER_BYTES)
        self._at = 0
        self._with_texts = with_texts

    def header(self) -> GgufHeader:
        if self._bytes(4) != _MAGIC:
            raise ValueError("it does not begin as a GGUF file")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(
                f"its version is {version}, and versions 2 and 3 in little-endian order are "
                "supported"
            )
        num_tensors, num_values = self._number("Q"), self._number("Q")
        self._check_count(num_values, 8 + 4 + 1)
        self._check_count(num_tensors, 8 + 4 + 8 + 4 + 8)
        metadata = self._metadata(num_values)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"general.alignment={alignment} is not a number of bytes")
        tensors = self._tensors(num_tensors)
        data_begin = -(-self._at // alignment) * alignment
        placed = tuple(each._replace(begin=data_begin + each.begin) for each in tensors)
        for tensor in placed:
            if tensor.begin > self._file_size:
                raise ValueError(
                    f"{shortened(tensor.name)} begins at byte {tensor.begin:,}, and the file has "
                    f"{self._file_size:,}"
                )
        return GgufHeader(metadata, placed, data_begin)

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._name()
            if key in metadata:
                raise ValueError(f"it has {shortened(key)} twice")
            metadata[key] = self._value(self._number("I"))
        return metadata

    def _tensors(self, count: int) -> list[GgufTensor]:
        tensors: list[GgufTensor] = []
        names: set[str] = set()
        for _ in range(count):
            name = self._name()
            num_dims = self._number("I")
            if name in names:
                raise ValueError(f"it has the tensor {shortened(name)} twice")
            if not 1 <= num_dims <= MAX_DIMS:
                raise ValueError(f"{shortened(name)} has {num_dims} dimensions")
            names.add(name)
            shape = tuple(self._number("Q") for _ in range(num_dims))
            if 0 in shape:
                raise ValueError(f"{shortened(name)} has no elements")
            tensors.append(GgufTensor(name, shape[::-1], self._number("I"), self._number("Q")))
        return tensors

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        return self._number(self._scalar(kind))

    def _array(self) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            self._check_count(count, 8)
            return self._texts(count)
        code = self._scalar(kind)
        width = struct.calcsize(code)
        self._check_count(count, width)
        values = np.frombuffer(self._bytes(count * width), np.dtype(code).newbyteorder("<"))
        if code == "f":
            return [_decimal(value) for value in values]
        found: list[Any] = values.tolist()
        return found

    def _texts(self, count: int) -> list[str]:
        """One loop: a vocabulary has 100,000s of them."""
        texts: list[str] = []
        for _ in range(count):
            begin = self._at + _LENGTH.size
            self._check_count(1, _LENGTH.size)
            (size,) = _LENGTH.unpack_from(self._content, self._at)
            self._at = begin
            self._check_count(size, 1)
            self._at += size
            if self._with_texts:
                texts.append(self._content[begin : self._at].decode())
        return texts

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"it has a value of the unknown type {kind}")
        return _SCALARS[kind]

    def _number(self, code: str) -> Any:
        width = struct.calcsize(code)
        begin = self._skip(width)
        (value,) = struct.unpack_from(f"<{code}", self._content, begin)
        return _decimal(np.float32(value)) if code == "f" else value

    def _name(self) -> str:
        name = self._text()
        if not name.isprintable():  # messages repeat names
            raise ValueError(f"it has the name {shortened(ascii(name))}")
        return name

    def _text(self) -> str:
        return self._bytes(self._number("Q")).decode()  # UnicodeDecodeError is a ValueError

    def _bytes(self, count: int) -> bytes:
        begin = self._skip(count)
        return self._content[begin : begin + count]

    def _skip(self, count: int) -> int:
        """Where the next `count` bytes begin."""
        self._check_count(count, 1)
        begin = self._at
        self._at += count
        return begin

    def _check_count(self, count: int, width: int) -> None:
        if count * width > self._end - self._at:
            raise ValueError(
                "the header ends too early, or a count in it is wrong "
                f"(at byte {self._at:,} of {self._file_size:,})"
            )


def _decimal(value: np.float32) -> float:
    """The shortest decimal number that is stored so: 1e-05, as it was written."""
    return float(str(value))
