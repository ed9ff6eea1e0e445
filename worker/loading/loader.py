"""Loads a model's weights from safetensors files: one file, or shards listed by an index.

Files are memory-mapped, so each tensor is read once, directly into its memory and in the model's
dtype. A rank reads only its part of a tensor. Every tensor of the model must be in the checkpoint
with the expected shape, and every tensor of the checkpoint must be used. This is checked for the
whole model before anything is read; `check_weights` checks it before memory is allocated.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from longshore.protocol.errors import shortened
from longshore.protocol.model_files import exists, open_regular
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.layers.stored_tensor import StoredTensor, StoredTensors
from longshore.worker.loading.bare_checkpoint import as_stored
from longshore.worker.loading.loadable_model import LoadableModel
from longshore.worker.loading.tensor_names import INDEX_FILE, SINGLE_FILE
from longshore.worker.models.json_fields import read_json_object
from longshore.worker.process.byte_size import byte_size

logger = logging.getLogger(__name__)

_MAX_NAMED: Final = 4
_FLOATS: Final = ("F32", "BF16", "F16")


def load_weights(
    model: LoadableModel, model_dir: Path, *, show_progress: bool | None = None
) -> None:
    """Copy every tensor of the checkpoint in `model_dir`, or this rank's part, into `model`.

    show_progress: None shows a progress bar if stderr is a terminal.
    Raises BrokenCheckpoint naming files and tensors that are missing, truncated or have the wrong
    shape, and UnsupportedModel for tensors that the model does not use.
    """
    started = time.monotonic()
    num_tensors, num_bytes = _fill(model, model_dir, show_progress)
    filled = time.monotonic()
    logger.debug(
        "loaded %d tensors, %s, in %.1f s; packing weights for this device",
        num_tensors,
        byte_size(num_bytes),
        filled - started,
    )
    model.loaded()
    logger.debug("packed weights in %.1f s", time.monotonic() - filled)


def fill_at_random(model: LoadableModel) -> None:
    """Fill the model with random values instead of a checkpoint's: matrices from N(0, 0.02),
    vectors, such as the weights of norms, with ones. The same in every process."""
    generators: dict[torch.device, torch.Generator] = {}
    for stored in model.checkpoint_tensors().values():
        for target, _ in stored.parts:
            if target.dim() < 2:
                target.fill_(1.0)
                continue
            if target.device not in generators:
                generators[target.device] = torch.Generator(target.device).manual_seed(0)
            target.normal_(0.0, 0.02, generator=generators[target.device])
    model.loaded()


def weight_bytes(model: LoadableModel) -> int:
    """Bytes of the weights of this rank; the model may be on torch's device `meta`."""
    tensors = model.checkpoint_tensors().values()
    return sum(target.nbytes for stored in tensors for target, _ in stored.parts)


def check_weights(model: LoadableModel, model_dir: Path) -> int:
    """Check that the checkpoint in `model_dir` fits `model`, as `load_weights` does, without
    touching the model's memory: it may be on torch's device `meta`. Returns `weight_bytes`."""
    model, _, _ = _match(model, model_dir)
    return weight_bytes(model)


def _match(
    model: LoadableModel, model_dir: Path
) -> tuple[LoadableModel, dict[Path, set[str]], StoredTensors]:
    """The model under the names of the checkpoint, the tensors in each file, and the destinations
    of those that the model needs. Raises BrokenCheckpoint or UnsupportedModel."""
    files = find_tensors(model_dir)
    found = {name for names in files.values() for name in names}
    model = as_stored(model, found)
    tensors = model.checkpoint_tensors()
    _check_names(model_dir, model, wanted=tensors.keys(), found=found)
    for path, names in files.items():
        with open_safetensors(path) as file:
            for name in sorted(names & tensors.keys()):
                _check_tensor(path, file, name, tensors[name])
    return model, files, tensors


def _fill(model: LoadableModel, model_dir: Path, show_progress: bool | None) -> tuple[int, int]:
    """Returns the number of tensors and the bytes that this rank has loaded. Keeps no reference to
    the filled memory, because the model may replace it with packed weights."""
    model, files, tensors = _match(model, model_dir)
    bar = tqdm(
        total=len(tensors),
        desc=f"Loading {model_dir.name}",
        unit="tensor",
        disable=None if show_progress is None else not show_progress,
    )
    num_bytes = 0
    with bar:
        for path, names in files.items():
            with open_safetensors(path) as file:
                for name in sorted(names & tensors.keys()):
                    num_bytes += _copy_tensor(file, name, tensors[name])
                    bar.update()
    _check_copies(model, files, tensors)
    return len(tensors), num_bytes


def find_tensors(model_dir: Path) -> dict[Path, set[str]]:
    """The checkpoint's files and the tensors to read from each.

    Raises BrokenCheckpoint if a file is missing, truncated, or lacks a tensor listed in the index.
    """
    single = model_dir / SINGLE_FILE
    if exists(single):
        return {single: _tensor_names(single)}
    index = model_dir / INDEX_FILE
    if not exists(index):
        raise BrokenCheckpoint(
            f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE}. Only safetensors files are "
            "supported; convert other formats first."
        )
    weight_map = read_json_object(index).table("weight_map")
    if weight_map is None or not weight_map.values:
        raise BrokenCheckpoint(
            f"{index} has no weight_map, so no tensor can be found. Fetch the file again."
        )
    listed: dict[Path, set[str]] = {}
    for name, file_name in weight_map.values.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise weight_map.wrong(name, "the name of a file in the same folder")
        listed.setdefault(model_dir / file_name, set()).add(name)
    absent = sorted(path.name for path in listed if not path.exists())
    if absent:
        raise BrokenCheckpoint(
            f"{index} lists {_some(absent)}, not in the folder. Fetch the missing shards."
        )
    for path, names in listed.items():
        lacking = sorted(names - _tensor_names(path))
        if lacking:
            raise BrokenCheckpoint(
                f"{path} lacks {_some(lacking)}, listed in {INDEX_FILE}. "
                "Index and shards are of different checkpoints; fetch both again."
            )
    return listed


@contextmanager
def open_safetensors(path: Path) -> Iterator[safe_open]:
    """Open a safetensors file. Raises BrokenCheckpoint for errors on opening and on reading."""
    try:
        open_regular(path).close()
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise BrokenCheckpoint(
            f"{path} is not a complete safetensors file: {error}. Fetch it again."
        ) from error


def _tensor_names(path: Path) -> set[str]:
    with open_safetensors(path) as file:
        return set(file.keys())


def _check_names(
    model_dir: Path, model: LoadableModel, *, wanted: AbstractSet[str], found: set[str]
) -> None:
    missing = sorted(wanted - found)
    if missing:
        raise BrokenCheckpoint(
            f"{model_dir} lacks {_some(missing)}, which config.json requires. "
            "The weights are incomplete, or config.json belongs to another model."
        )
    extra = sorted(name for name in found - wanted if not model.is_redundant(name))
    if extra:
        raise UnsupportedModel(
            f"{model_dir} has {_some(extra)}, which this model does not use; its output would be "
            "wrong. Check that config.json belongs to these weights."
        )


def _check_tensor(path: Path, file: safe_open, name: str, stored: StoredTensor) -> None:
    view = file.get_slice(name)
    if tuple(view.get_shape()) != stored.shape:
        raise BrokenCheckpoint(
            f"{path}: {shortened(name)} has shape {tuple(view.get_shape())}, but config.json "
            f"implies {stored.shape}. Config and weights belong to different models."
        )
    if view.get_dtype() not in _FLOATS:
        raise UnsupportedModel(
            f"{path}: {shortened(name)} is stored as {view.get_dtype()}; only "
            f"{', '.join(_FLOATS)} are supported. Use a checkpoint that is not quantised."
        )


def _copy_tensor(file: safe_open, name: str, stored: StoredTensor) -> int:
    """Copy one tensor into the model; returns the bytes loaded."""
    view = file.get_slice(name)
    for target, index in stored.parts:
        target.copy_(view[index])
    return sum(target.nbytes for target, _ in stored.parts)


def _check_copies(
    model: LoadableModel, files: Mapping[Path, AbstractSet[str]], tensors: StoredTensors
) -> None:
    for path, names in files.items():
        for name in sorted(names - tensors.keys()):
            original = model.copy_of(name)
            if original not in tensors:
                continue
            with open_safetensors(path) as file:
                if not _is_copy(file, name, tensors[original]):
                    raise UnsupportedModel(
                        f"{path}: {name} differs from {original}, but config.json ties the two, so "
                        "one of them would be ignored. Set tie_word_embeddings to false in "
                        f"config.json to use {name}, or remove it from the file."
                    )


def _is_copy(file: safe_open, name: str, original: StoredTensor) -> bool:
    view = file.get_slice(name)
    return tuple(view.get_shape()) == original.shape and all(
        torch.equal(view[index].to(target.device, target.dtype), target)
        for target, index in original.parts
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(map(shortened, names[:_MAX_NAMED]))
    hidden = len(names) - _MAX_NAMED
    return shown if hidden <= 0 else f"{shown} and {hidden} more"
