"""Weights that wait in host memory while a rank sleeps.

The memory of a tensor is freed and allocated again beneath it, so that no tensor, and no view of
one, has to be replaced in the model. Host memory is pinned, which makes both copies several times
faster.
"""

import gc
import logging
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Final

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 256 << 20
"""Host memory is allocated in pieces of a power of two, to which torch rounds up pinned memory."""

_SKIPPED: Final = (type, ModuleType, CodeType, logging.Logger)


class HostWeights:
    """The memory of all tensors of a model on a device. Nothing may use them from the constructor
    until the end of `restore`."""

    def __init__(self, model: object, device: torch.device) -> None:
        self._device = device
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in tensors_of(model)
            if tensor.device == device and tensor.untyped_storage().nbytes()
        }
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        self.num_bytes = sum(size for _, size in self._storages)
        self._chunks = [self._host_memory() for _ in range(0, self.num_bytes, CHUNK_BYTES)]
        self._copy(to_host=True)
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Bring everything back to the device, bit by bit as it was. May be called once."""
        for storage, size in self._storages:
            storage.resize_(size)
        self._copy(to_host=False)
        self._storages, self._chunks = [], []
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)  # not in builds for CPUs
        if empty_host_cache is not None:
            empty_host_cache()

    def _host_memory(self) -> Tensor:
        size = min(CHUNK_BYTES, self.num_bytes)
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _copy(self, *, to_host: bool) -> None:
        """The storages one after the other, as one run of bytes over all chunks."""
        position = 0
        for storage, size in self._storages:
            memory = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            start = 0
            while start < size:
                chunk, offset = self._chunks[position // CHUNK_BYTES], position % CHUNK_BYTES
                count = min(size - start, len(chunk) - offset)
                on_device, on_host = memory[start : start + count], chunk[offset : offset + count]
                target, source = (on_host, on_device) if to_host else (on_device, on_host)
                target.copy_(source, non_blocking=True)
                start += count
                position += count
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def tensors_of(root: object) -> Iterator[Tensor]:
    """All tensors that can be reached from an object, also through the variables of closures, but
    not through classes, modules and global variables."""
    seen: set[int] = set()
    found = [root]
    while found:
        item = found.pop()
        if id(item) in seen or isinstance(item, _SKIPPED):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, FunctionType):
            found += [cell.cell_contents for cell in item.__closure__ or ()]
        else:
            found += gc.get_referents(item)
