"""Fills a model from safetensors files: one, or shards listed by an index.

Files are mapped, so a tensor is read once, straight into its place, in the dtype the model runs
in. Every tensor of the model must be found, with its shape, and every one of the checkpoint used.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.models.json_fields import read_json_object

logger = logging.getLogger(__name__)

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_MAX_NAMED: Final = 4


class LoadableModel(Protocol):
    """What the loader needs of a model."""

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Where each tensor goes, by the checkpoint's name."""
        ...

    def is_redundant(self, name: str) -> bool:
        """The checkpoint may contain `name`; it is not needed."""
        ...

    def copy_of(self, name: str) -> str | None:
        """The tensor that a redundant one must be equal to; None if it does not matter."""
        ...


def load_weights(
    model: LoadableModel, model_dir: Path, *, show_progress: bool | None = None
) -> None:
    """Copy every tensor of the checkpoint in `model_dir` into `model`.

    show_progress: None shows a bar when stderr is a terminal.
    Raises BrokenCheckpoint naming files and tensors that are missing, truncated, or have the wrong
    shape, and UnsupportedModel for tensors that have no place in the model.
    """
    started = time.monotonic()
    places = model.checkpoint_tensors()
    files = find_tensors(model_dir)
    found = {name for names in files.values() for name in names}
    _check_names(model_dir, model, wanted=places.keys(), found=found)
    bar = tqdm(
        total=len(places),
        desc=f"Loading {model_dir.name}",
        unit="tensor",
        disable=None if show_progress is None else not show_progress,
    )
    num_bytes = 0
    with bar:
        for path, names in files.items():
            with _open_safetensors(path) as file:
                for name in sorted(names & places.keys()):
                    num_bytes += _copy_tensor(path, file, name, places[name])
                    bar.update()
    _check_copies(model, files, places)
    logger.info(
        "loaded %d tensors, %.2f GiB, in %.1f s",
        len(places),
        num_bytes / 2**30,
        time.monotonic() - started,
    )


def find_tensors(model_dir: Path) -> dict[Path, set[str]]:
    """The checkpoint's files and the tensors to take from each.

    Raises BrokenCheckpoint when a file is missing, truncated, or lacks a tensor the index promises.
    """
    single = model_dir / SINGLE_FILE
    if single.exists():
        return {single: _tensor_names(single)}
    index = model_dir / INDEX_FILE
    if not index.exists():
        raise BrokenCheckpoint(
            f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE}. "
            "Weights are read from safetensors files only; convert other formats first."
        )
    weight_map = read_json_object(index).table("weight_map")
    if weight_map is None or not weight_map.values:
        raise BrokenCheckpoint(f"{index} has no weight_map, so no tensor can be found.")
    promised: dict[Path, set[str]] = {}
    for name, file_name in weight_map.values.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise weight_map.wrong(name, "the name of a file in the same folder")
        promised.setdefault(model_dir / file_name, set()).add(name)
    absent = sorted(path.name for path in promised if not path.exists())
    if absent:
        raise BrokenCheckpoint(
            f"{index} names {_some(absent)}, not in the folder. Fetch the missing shards."
        )
    for path, names in promised.items():
        lacking = sorted(names - _tensor_names(path))
        if lacking:
            raise BrokenCheckpoint(
                f"{path} lacks {_some(lacking)}, which {INDEX_FILE} promises. "
                "Index and shards are of different checkpoints; fetch both again."
            )
    return promised


@contextmanager
def _open_safetensors(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise BrokenCheckpoint(
            f"{path} is no complete safetensors file: {error}. Fetch it again."
        ) from error


def _tensor_names(path: Path) -> set[str]:
    with _open_safetensors(path) as file:
        return set(file.keys())


def _check_names(
    model_dir: Path, model: LoadableModel, *, wanted: AbstractSet[str], found: set[str]
) -> None:
    missing = sorted(wanted - found)
    if missing:
        raise BrokenCheckpoint(
            f"{model_dir} lacks {_some(missing)}, which config.json calls for. "
            "The weights are incomplete, or config.json is of another model."
        )
    extra = sorted(name for name in found - wanted if not model.is_redundant(name))
    if extra:
        raise UnsupportedModel(
            f"{model_dir} has {_some(extra)}, which this model would ignore; its answers would be "
            "wrong. Check that config.json belongs to these weights."
        )


def _copy_tensor(path: Path, file: safe_open, name: str, place: Tensor) -> int:
    """Returns the bytes that `place` takes."""
    tensor = file.get_tensor(name)
    if tensor.shape != place.shape:
        raise BrokenCheckpoint(
            f"{path}: {name} has shape {tuple(tensor.shape)}, but config.json makes it "
            f"{tuple(place.shape)}. Config and weights are of different models."
        )
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedModel(
            f"{path}: {name} is {tensor.dtype}; only plain float weights are computed here. "
            "Use a checkpoint that is not quantised."
        )
    place.copy_(tensor)
    return place.numel() * place.element_size()


def _check_copies(
    model: LoadableModel, files: Mapping[Path, AbstractSet[str]], places: Mapping[str, Tensor]
) -> None:
    for path, names in files.items():
        for name in sorted(names - places.keys()):
            original = model.copy_of(name)
            if original is None:
                continue
            with _open_safetensors(path) as file:
                place = places[original]
                stored = file.get_tensor(name).to(place.device, place.dtype)
            if stored.shape != place.shape or not torch.equal(stored, place):
                raise UnsupportedModel(
                    f"{path}: {name} differs from {original}, but config.json ties the two, so one "
                    "of them would be ignored. Set tie_word_embeddings to false in config.json to "
                    f"use {name}, or remove it from the file."
                )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    hidden = len(names) - _MAX_NAMED
    return shown if hidden <= 0 else f"{shown} and {hidden} more"
