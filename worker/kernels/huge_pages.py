"""CPU memory in huge pages, for what steps read from beginning to end: weights and the KV cache.

With pages of 4 KiB, a virtual machine spends as long on translating addresses as on reading.
"""

import contextlib
import ctypes
import math
import mmap
import threading
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

HUGE_PAGE: Final = 2 << 20  # bytes
CHUNK: Final = 64 << 20
"""Bytes that are allocated at a time, more than malloc keeps: only what is written takes memory."""

_ALIGNMENT: Final = 64  # bytes, of torch's own CPU memory


class _Arena:
    """Tensors below each other, of any size. A chunk lives as long as one of its tensors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, num_bytes: int) -> Tensor:
        with self._lock:
            if num_bytes > len(self._chunk) - self._used:
                if num_bytes > CHUNK // 2:
                    return _chunk(num_bytes)[:num_bytes]
                self._chunk, self._used = _chunk(CHUNK), 0
            start = self._used
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._chunk[start : start + num_bytes]


_arena: Final = _Arena()


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A zeroed tensor, which shares huge pages with others."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return _arena.empty(num_bytes).zero_().view(dtype).view(*shape)


def advise(memory: mmap.mmap) -> None:
    """Ask for huge pages. A kernel without them gives others."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def _chunk(num_bytes: int) -> Tensor:
    """At least as many bytes, from the beginning of a huge page on."""
    memory = torch.empty(num_bytes + HUGE_PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    chunk = memory[start:]
    size = len(chunk) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(chunk.data_ptr()), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE
    )
    return chunk
