"""Loads a model's weights from the files of a checkpoint.

Each tensor is read once, some rows at a time, into its memory and in the model's dtype. A rank
reads only its part of a tensor. That the checkpoint fits the model is checked before anything is
read (`checkpoint.py`); `check_weights` checks it before memory is allocated.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from torch import Tensor
from tqdm import tqdm

from longshore.worker.errors import UnsupportedModel
from longshore.worker.layers.matrix_memory import MatrixMemory, Source
from longshore.worker.layers.stored_tensor import StoredTensor, StoredTensors
from longshore.worker.loading.checkpoint import Checkpoint, match_checkpoint
from longshore.worker.loading.loadable_model import LoadableModel
from longshore.worker.loading.stored_weights import StoredWeights, WeightReader
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
    """Bytes of the weights of this rank as floats; the model may be on torch's device `meta`."""
    tensors = model.checkpoint_tensors().values()
    return sum(target.nbytes for stored in tensors for target, _ in stored.parts)


def check_weights(model: LoadableModel, weights: StoredWeights) -> int:
    """Check that the checkpoint fits `model`, as `load_weights` does, without touching the model's
    memory: it may be on torch's device `meta`. Returns the bytes of this rank's weights, of which
    some may stay quantised."""
    checkpoint, tensors = _match(model, weights)
    memories = Memories(model)
    num_bytes = 0
    with weights.reader() as read:
        for name, stored in checkpoint.names.items():
            for target, index in tensors[name].parts if name in tensors else ():
                memory, shape = memories.of(target), tensors[name].shape
                found = _quantised(memory, read, stored, shape, target, index)
                if memory is None or found is None:
                    num_bytes += target.nbytes
                else:
                    num_bytes += memory.num_bytes(found)
    return num_bytes


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
    memories = Memories(model)
    num_bytes = 0
    with bar, weights.reader() as read:
        for name, stored in checkpoint.names.items():
            if name in tensors:
                num_bytes += _copy_tensor(memories, read, stored, tensors[name])
                bar.update()
        _pack(model.memories, read)
        _check_copies(model, checkpoint, read, tensors)
    return len(tensors), num_bytes


def _pack(memories: Sequence[MatrixMemory], read: WeightReader) -> None:
    """Pack what stays quantised, for a CPU a matrix per thread. The operations are so small that
    dividing each of them among threads costs more than it gives, above all on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        packs = [each.read for each in memories if each.is_quantised and each.read is not None]
        if any(each.is_on_gpu for each in memories):  # one stream, in the order of this thread
            for pack in packs:
                pack(read.rows)
            return
        with ThreadPoolExecutor(num_threads) as threads:
            for packed in [threads.submit(pack, read.rows) for pack in packs]:
                packed.result()
    finally:
        torch.set_num_threads(num_threads)


class Memories:
    """Finds the matrix of which a target is a part."""

    def __init__(self, model: LoadableModel) -> None:
        self._by_storage = {_storage(memory.tensor): memory for memory in model.memories}

    def of(self, target: Tensor) -> MatrixMemory | None:
        return self._by_storage.get(_storage(target))


def _storage(tensor: Tensor) -> int:
    """The same for all views of a tensor, also on the device `meta`."""
    return tensor.untyped_storage()._cdata


def _copy_tensor(memories: Memories, read: WeightReader, name: str, stored: StoredTensor) -> int:
    """Copy one tensor into the model, or note where rows that stay quantised are; returns their
    bytes. name: in the checkpoint."""
    num_bytes = 0
    for target, index in stored.parts:
        memory = memories.of(target)
        found = _quantised(memory, read, name, stored.shape, target, index)
        if memory is not None and found is not None:
            memory.add(found)
            num_bytes += memory.num_bytes(found)
            continue
        num_bytes += target.nbytes
        if memory is not None:
            target = memory.target(target)
        for part, part_index in _chunks(stored.shape, target, index):
            part.copy_(read(name, part_index))
    return num_bytes


def _quantised(
    memory: MatrixMemory | None,
    read: WeightReader,
    name: str,
    shape: tuple[int, ...],
    target: Tensor,
    index: tuple[slice, ...],
) -> Source | None:
    """The rows of a matrix that are `stored[index]`, if they can stay quantised. shape: of what is
    stored under this name."""
    form = None if memory is None else read.form(name)
    if memory is None or form is None or not (form.packing.number or memory.is_on_gpu):
        return None
    rows = memory.rows_of(target, form.column_dim)
    parts = [slice(*part.indices(size)) for part, size in zip(index, shape, strict=False)]
    parts += [slice(0, size) for size in shape[len(index) :]]
    columns = parts.pop(form.column_dim)
    span = form.packing.span
    if rows is None or columns.start % span or columns.stop % span:
        return None
    grid = list(shape)
    grid.pop(form.column_dim)
    stored_rows = torch.arange(math.prod(grid)).view(grid)[tuple(parts)]
    if stored_rows.shape != rows.shape:
        return None
    return Source(form.packing, name, rows, stored_rows, columns)


def _check_copies(
    model: LoadableModel, checkpoint: Checkpoint, read: WeightReader, tensors: StoredTensors
) -> None:
    for name, stored in checkpoint.names.items():
        original = None if name in tensors else model.copy_of(name)
        if original not in tensors:
            continue
        weight = checkpoint.weights.tensors[stored]
        other = checkpoint.layout.stored_name(original)
        if weight.shape != tensors[original].shape or not _is_copy(
            read, stored, other, tensors[original]
        ):
            raise UnsupportedModel(
                f"{weight.path}: {stored} differs from {other}, but config.json ties the two, so "
                "one of them would be ignored. Set tie_word_embeddings to false in config.json to "
                f"use {stored}, or remove it from the file."
            )


def _is_copy(read: WeightReader, name: str, original: str, stored: StoredTensor) -> bool:
    return all(
        torch.equal(*(read(each, index).to(target.dtype) for each in (name, original)))
        for part in stored.parts
        for target, index in _chunks(stored.shape, *part)
    )


def _chunks(
    shape: tuple[int, ...], target: Tensor, index: tuple[slice, ...]
) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """A part of a stored tensor, some rows at a time: a bound of the memory that reading needs,
    which the checks before it do not count."""
    bounds = [range(size)[part] for size, part in zip(shape, index, strict=False)]
    wanted = (*map(len, bounds), *shape[len(index) :])
    if not index or wanted != target.shape:  # another one broadcasts to the target
        yield target, index
        return
    step = max(1, _CHUNK * len(target) // max(1, target.numel()))
    for first in range(0, len(target), step):
        rows = bounds[0][first : first + step]
        yield (
            target[first : first + step],
            (slice(rows.start, rows.stop, rows.step), *index[1:]),
        )
