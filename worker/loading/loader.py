"""Loads a model's weights from the files of a checkpoint.

Each tensor is read once, some rows at a time, into its memory and in the model's dtype. A rank
reads only its part of a tensor. That the checkpoint fits the model is checked before anything is
read (`checkpoint.py`); `check_weights` checks it before memory is allocated.
"""

import logging
import time
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor
from tqdm import tqdm

from longshore.worker.errors import UnsupportedModel
from longshore.worker.layers.stored_tensor import StoredTensor, StoredTensors
from longshore.worker.loading.checkpoint import Checkpoint, match_checkpoint
from longshore.worker.loading.loadable_model import LoadableModel
from longshore.worker.loading.stored_weights import ReadTensor, StoredWeights
from longshore.worker.process.byte_size import byte_size

logger = logging.getLogger(__name__)

_CHUNK: Final = 1 << 24  # elements that are in memory twice: as they were read, in float32


def load_weights(
    model: LoadableModel, weights: StoredWeights, *, show_progress: bool | None = None
) -> None:
    """Copy every tensor of a checkpoint, or this rank's part, into `model`.

    show_progress: None shows a progress bar if stderr is a terminal.
    Raises BrokenCheckpoint naming files and tensors that are missing, truncated or have the wrong
    shape, and UnsupportedModel for tensors that the model does not use.
    """
    started = time.monotonic()
    num_tensors, num_bytes = _fill(model, weights, show_progress)
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


def check_weights(model: LoadableModel, weights: StoredWeights) -> int:
    """Check that the checkpoint fits `model`, as `load_weights` does, without
    touching the model's memory: it may be on torch's device `meta`. Returns `weight_bytes`."""
    _match(model, weights)
    return weight_bytes(model)


def _match(model: LoadableModel, weights: StoredWeights) -> tuple[Checkpoint, StoredTensors]:
    """Where the model's tensors are, and the destinations of those that it needs. Raises
    BrokenCheckpoint or UnsupportedModel."""
    tensors = model.checkpoint_tensors()
    shapes = {name: stored.shape for name, stored in tensors.items()}
    return match_checkpoint(weights, shapes, model.is_redundant), tensors


def _fill(
    model: LoadableModel, weights: StoredWeights, show_progress: bool | None
) -> tuple[int, int]:
    """Returns the number of tensors and the bytes that this rank has loaded. Keeps no reference to
    the filled memory, because the model may replace it with packed weights."""
    checkpoint, tensors = _match(model, weights)
    bar = tqdm(
        total=len(tensors),
        desc=f"Loading {weights.model_dir.name}",
        unit="tensor",
        disable=None if show_progress is None else not show_progress,
    )
    num_bytes = 0
    with bar, weights.reader() as read:
        for name, stored in checkpoint.names.items():
            if name in tensors:
                num_bytes += _copy_tensor(read, stored, tensors[name])
                bar.update()
        _check_copies(model, checkpoint, read, tensors)
    return len(tensors), num_bytes


def _copy_tensor(read: ReadTensor, name: str, stored: StoredTensor) -> int:
    """Copy one tensor into the model; returns the bytes loaded. name: in the checkpoint."""
    for target, index in _chunks(stored):
        target.copy_(read(name, index))
    return sum(target.nbytes for target, _ in stored.parts)


def _check_copies(
    model: LoadableModel, checkpoint: Checkpoint, read: ReadTensor, tensors: StoredTensors
) -> None:
    for name, stored in checkpoint.names.items():
        original = None if name in tensors else model.copy_of(name)
        if original not in tensors:
            continue
        weight = checkpoint.weights.tensors[stored]
        if weight.shape != tensors[original].shape or not _is_copy(read, stored, tensors[original]):
            other = checkpoint.layout.stored_name(original)
            raise UnsupportedModel(
                f"{weight.path}: {stored} differs from {other}, but config.json ties the two, so "
                "one of them would be ignored. Set tie_word_embeddings to false in config.json to "
                f"use {stored}, or remove it from the file."
            )


def _is_copy(read: ReadTensor, name: str, original: StoredTensor) -> bool:
    return all(
        torch.equal(read(name, index).to(target.device, target.dtype), target)
        for target, index in _chunks(original)
    )


def _chunks(stored: StoredTensor) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """The parts of a tensor, some rows at a time: a bound of the memory that reading needs, which
    the checks before it do not count."""
    for target, index in stored.parts:
        bounds = [range(size)[part] for size, part in zip(stored.shape, index, strict=False)]
        shape = (*map(len, bounds), *stored.shape[len(index) :])
        if not index or shape != target.shape:  # another one broadcasts to the target
            yield target, index
            continue
        step = max(1, _CHUNK * len(target) // max(1, target.numel()))
        for first in range(0, len(target), step):
            rows = bounds[0][first : first + step]
            yield (
                target[first : first + step],
                (slice(rows.start, rows.stop, rows.step), *index[1:]),
            )
