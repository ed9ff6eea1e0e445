"""A Hugging Face model folder for a GGUF file: JSON files made of its metadata, and links to it.

All other code works with such folders. They are kept in the state directory, by a digest of what is
in them and of the file's path, size, time and header, and compared with it before they are used
again. Those that no longer belong to a file are removed, unless a process uses them.
"""

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from longshore.deploy.model.gguf_config import GgufModel, config_of
from longshore.deploy.model.gguf_tokenizer import (
    GgufVocabulary,
    end_token_ids,
    tokenizer_of,
    tokenizer_settings,
)
from longshore.deploy.model.kept_folder import hold, kept_folder, remove_unless_held
from longshore.protocol.errors import ConfigError
from longshore.protocol.gguf_header import GgufHeader
from longshore.worker.errors import BrokenCheckpoint, some_of
from longshore.worker.loading.gguf_files import (
    GGUF_SUFFIX,
    check_bounds,
    read_header,
    read_vector,
    type_name,
)
from longshore.worker.loading.gguf_tensors import UNUSED

logger = logging.getLogger(__name__)

_FOLDER: Final = "gguf"
_PART: Final = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_IMAGES: Final = "mmproj"
"""How files with the encoder of images are called, which other files do not need."""
_POOLINGS: Final = {1: "mean", 2: "cls", 3: "lasttoken"}
_SAMPLING: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def is_gguf_model(path: Path) -> bool:
    """Whether a GGUF file has the weights of a model, or of a part of it, by its name."""
    return not path.name.startswith(_IMAGES)


def gguf_name(path: Path) -> str:
    """The name of a file without its suffix, and without the number of its part."""
    part = _PART.fullmatch(path.name)
    return path.stem if part is None else part["name"]


def gguf_folder(path: Path, state_dir: Path | None = None) -> Path:
    """path: a GGUF file, a part of one, or a folder with one.

    Raises ConfigError if there is no such file or several, if it is damaged, or if its model is not
    supported.
    """
    # Links are not followed: what they lead to may have another name, as in the hub's cache.
    files = [file.absolute() for file in _files(path)]
    headers = {file: read_header(file, with_texts=file == files[0]) for file in files}
    _check_parts(headers)
    try:
        texts = {
            name: json.dumps(content, ensure_ascii=False, allow_nan=False)
            for name, content in _contents(headers).items()
        }
    except ValueError as error:
        raise BrokenCheckpoint(
            f"{files[0]} has a number that is infinite or nan. Fetch the file again."
        ) from error
    digest = hashlib.sha256()
    for name, text in texts.items():
        digest.update(hashlib.sha256(f"{name}\0{text}".encode()).digest())
    for file, header in headers.items():
        digest.update(_identity(file, header))

    def is_whole(folder: Path) -> bool:
        return all(
            (folder / name).read_text(encoding="utf-8") == text for name, text in texts.items()
        ) and all((folder / file.name).readlink() == file for file in files)

    def make(folder: Path) -> None:
        for name, text in texts.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        for file in files:
            (folder / file.name).symlink_to(file)

    key = f"{gguf_name(files[0])}-{digest.hexdigest()[:32]}"  # the name is for logs
    folder = kept_folder(state_dir, _FOLDER, key, make, is_whole)
    hold(folder)
    _remove_others(folder, files)
    return folder


def _remove_others(folder: Path, files: Collection[Path]) -> None:
    """Remove kept folders of these files before they were replaced, and of files that are gone."""
    for other in folder.parent.glob("[!.]*"):
        try:
            sources = {link.readlink() for link in other.glob(f"*{GGUF_SUFFIX}")}
        except OSError:  # it is not such a folder, or another process removes it
            continue
        is_old = sources == set(files) and other != folder
        if (is_old or not all(map(os.path.exists, sources))) and remove_unless_held(other):
            logger.debug("removed %s: its GGUF file was replaced or removed", other)


def _files(path: Path) -> list[Path]:
    """The file, or all parts of it in order."""
    if path.is_dir():
        path = _only_model(path)
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    names = [
        f"{part['name']}-{number:05}-of-{part['count']}{GGUF_SUFFIX}"
        for number in range(1, int(part["count"]) + 1)
    ]
    missing = [name for name in names if not path.with_name(name).exists()]
    if missing:
        raise BrokenCheckpoint(
            f"{path.parent} lacks {some_of(missing)}: the file was split, and all of its parts are "
            "needed. Fetch the missing parts."
        )
    return [path.with_name(name) for name in names]


def _only_model(folder: Path) -> Path:
    files = [file for file in sorted(folder.glob(f"*{GGUF_SUFFIX}")) if is_gguf_model(file)]
    models = sorted({gguf_name(file) for file in files})
    if len(models) != 1:
        raise ConfigError(
            f"{folder} has {len(models)} models in GGUF files ({some_of(models)}). Name the file "
            "to serve."
        )
    return files[0]


def _check_parts(headers: Mapping[Path, GgufHeader]) -> None:
    """Raise BrokenCheckpoint unless these are all parts of one file, in order."""
    for number, (file, header) in enumerate(headers.items()):
        count = header.metadata.get("split.count", 0) or 1  # 0: it was not split
        if (count, header.metadata.get("split.no", 0)) != (len(headers), number):
            raise BrokenCheckpoint(
                f"{file} is not part {number + 1} of {len(headers)} of a GGUF file, by its "
                "metadata (split.no, split.count). Fetch all parts of the model again."
            )


def _contents(headers: Mapping[Path, GgufHeader]) -> dict[str, dict[str, Any] | list[Any]]:
    """The JSON files of the folder, by name."""
    file, header = next(iter(headers.items()))
    metadata = header.metadata
    for each, its_header in headers.items():
        for tensor in its_header.tensors:
            check_bounds(each, tensor)
    tensors = {
        tensor.name: (each, tensor) for each, its in headers.items() for tensor in its.tensors
    }
    vectors: dict[str, list[float]] = {
        name: read_vector(*tensors[name]) for name in UNUSED if name in tensors
    }
    shapes = {name: tensor.shape for name, (_, tensor) in tensors.items()}
    types = Counter(
        type_name(tensor.type_id) for _, tensor in tensors.values() if len(tensor.shape) > 1
    )
    most = types.most_common(1)[0][0] if types else "F32"
    model = GgufModel(metadata, shapes, vectors, str(file))
    config = config_of(model, most)
    contents: dict[str, dict[str, Any] | list[Any]] = {"config.json": config}
    vocabulary = GgufVocabulary(metadata, str(file))
    generation: dict[str, Any] = {
        name: metadata[f"general.sampling.{key}"]
        for key, name in _SAMPLING.items()
        if f"general.sampling.{key}" in metadata
    }
    tokenizer = tokenizer_of(vocabulary)
    if tokenizer is not None:
        contents["tokenizer.json"] = tokenizer
        contents["tokenizer_config.json"] = tokenizer_settings(vocabulary, metadata)
        generation["eos_token_id"] = end_token_ids(vocabulary)
    contents["generation_config.json"] = generation
    pooling = _POOLINGS.get(model.get("pooling_type"))
    if pooling is not None:
        types_of = "sentence_transformers.models."
        contents["modules.json"] = [
            {"path": "", "type": f"{types_of}Transformer"},
            {"path": "1_Pooling", "type": f"{types_of}Pooling"},
            {"path": "2_Normalize", "type": f"{types_of}Normalize"},
        ]
        contents["1_Pooling/config.json"] = {"pooling_mode": pooling}
    return contents


def _identity(file: Path, header: GgufHeader) -> bytes:
    """Of a file: if it is replaced, so is its folder."""
    facts = file.stat()
    with file.open("rb") as opened:
        content = hashlib.sha256(opened.read(header.data_begin))
    return hashlib.sha256(
        f"{file}\0{facts.st_size}\0{facts.st_mtime_ns}\0{content.hexdigest()}".encode()
    ).digest()
