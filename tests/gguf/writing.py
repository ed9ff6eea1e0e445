"""Other files made of a GGUF file, with the package's writer."""

from collections.abc import Collection
from pathlib import Path

import gguf
import numpy as np


def changed(path: Path, target: Path, *, quantise: bool = False, **changes: object) -> Path:
    """A copy of a file with other metadata, by keys with `__` for a dot; None removes one.

    quantise: matrices are stored as Q8_0.
    """
    reader = gguf.GGUFReader(path)
    values = {name.replace("__", "."): value for name, value in changes.items()}
    architecture = "general.architecture"
    name = values.pop(architecture, reader.fields[architecture].contents())
    writer = gguf.GGUFWriter(target, str(name))
    _copy_metadata(reader, writer, without=values.keys())
    for name, value in values.items():
        match value:
            case str():
                writer.add_string(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case list():
                writer.add_array(name, value)
    for tensor in reader.tensors:
        values_of = np.array(tensor.data)
        kind = None
        if quantise and values_of.ndim > 1 and values_of.shape[-1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            values_of = gguf.quants.quantize(values_of, kind)
        writer.add_tensor(tensor.name, values_of, raw_dtype=kind)
    _write(writer)
    return target


def split(path: Path, folder: Path, count: int) -> list[Path]:
    """The parts of a file, as llama.cpp's `gguf-split` writes them: only the first one has the
    metadata."""
    reader = gguf.GGUFReader(path)
    parts = []
    for number in range(count):
        part = folder / f"{path.stem}-{number + 1:05}-of-{count:05}.gguf"
        writer = gguf.GGUFWriter(part, reader.fields["general.architecture"].contents())
        if number == 0:
            _copy_metadata(reader, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        _write(writer)
        parts.append(part)
    return parts


def _copy_metadata(
    reader: gguf.GGUFReader, writer: gguf.GGUFWriter, without: Collection[str] = ()
) -> None:
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in without:
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, inner)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
