"""CPU memory in huge pages, for what steps read from beginning to end: weights and the KV cache.

With pages of 4 KiB, a virtual machine spends as long on translating addresses as on reading.
"""

import contextlib
import math
import mmap
import threading
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

HUGE_PAGE: Final = 2 << 20  # bytes
CHUNK: Final = 64 << 20
"""Bytes that are mapped at a time. Of a chunk, only the pages that are written to take memory."""

_ALIGNMENT: Final = 64  # bytes, of torch's own CPU memory


class _Arena:
    """Tensors below each other, of any size. A chunk lives as long as one of its tensors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def zeros(self, num_bytes: int) -> Tensor:
        with self._lock:
            if num_bytes > len(self._chunk) - self._used:
                if num_bytes > CHUNK // 2:
                    return mapped(num_bytes)[:num_bytes]
                self._chunk, self._used = mapped(CHUNK), 0
            start = self._used
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._chunk[start : start + num_bytes]


_arena: Final = _Arena()


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A zeroed tensor, which shares huge pages with others."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return _arena.zeros(num_bytes).view(dtype).view(*shape)


def mapped(num_bytes: int) -> Tensor:
    """At least as many zeroed bytes, from the beginning of a huge page on: (n,) uint8."""
    memory = mmap.mmap(-1, (-(-num_bytes // HUGE_PAGE) + 1) * HUGE_PAGE, mmap.MAP_PRIVATE)
    advise(memory)
    bytes_ = torch.frombuffer(memory, dtype=torch.uint8)
    start = -bytes_.data_ptr() % HUGE_PAGE
    return bytes_[start : start + len(bytes_) - HUGE_PAGE]


def advise(memory: mmap.mmap) -> None:
    """Ask for huge pages. A kernel without them gives others."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
