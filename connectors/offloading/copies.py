"""Copies between the blocks of the device and host memory: neighbours are joined, and all copies of
a job are submitted together.

A `Copier` gets addresses, so that one interface serves a CPU (threads with memory copies, which do
not hold the interpreter's lock) and CUDA (`cuda_copies.py`).
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]

MIN_THREAD_BYTES: Final = 1 << 20
"""Bytes for which another thread is woken up."""


class Copies(NamedTuple):
    """Copies between device and host, one entry per copy.

    device: (n,) offset in bytes from the first block of the cache.
    host:   (n,) offset in bytes from the first slot.
    sizes:  (n,) bytes.
    """

    device: Int64s
    host: Int64s
    sizes: Int64s

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())


def joined(copies: Copies) -> Copies:
    """Join copies that are neighbours on both sides."""
    device, host, sizes = copies
    if len(sizes) < 2:
        return copies
    follows = (device[1:] == device[:-1] + sizes[:-1]) & (host[1:] == host[:-1] + sizes[:-1])
    firsts = np.flatnonzero(np.concatenate(([True], ~follows)))
    return Copies(device[firsts], host[firsts], np.add.reduceat(sizes, firsts))


def divided_at(copies: Copies, border_bytes: int) -> Copies:
    """Divide the copies that cross a multiple of `border_bytes` in host memory."""
    device, host, sizes = copies
    index, offsets, parts = divide(host, sizes, border_bytes)
    return Copies(device[index] + offsets, host[index] + offsets, parts)


def divide(starts: Int64s, sizes: Int64s, border_bytes: int) -> tuple[Int64s, Int64s, Int64s]:
    """Divide the ranges of `sizes[i]` bytes from `starts[i]` at all multiples of `border_bytes`.

    Returns, for each part in order, the index of its range, its offset in it, and its size. Empty
    ranges have no part.
    """
    first = starts // border_bytes
    num_parts = np.where(sizes > 0, (starts + sizes - 1) // border_bytes - first + 1, 0)
    index = np.repeat(np.arange(len(sizes)), num_parts)
    within = np.arange(len(index)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    borders = (first[index] + within) * border_bytes
    begins = np.maximum(starts[index], borders)
    ends = np.minimum(starts[index] + sizes[index], borders + border_bytes)
    return index, begins - starts[index], ends - begins


class Copier(Protocol):
    """Copies in one direction. `name` is for the log."""

    name: str

    def copy(self, targets: Int64s, sources: Int64s, sizes: Int64s) -> None:
        """Copy `sizes[i]` bytes from address `sources[i]` to `targets[i]`. No target overlaps
        another range. Returns when all bytes have been copied. Thread-safe."""

    def close(self) -> None: ...


class HostCopier:
    """Memory copies in this process, in a fixed number of threads."""

    def __init__(self, num_threads: int = 1) -> None:
        self.name = f"memory copies, threads: {num_threads}"
        self._num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        if num_threads > 1:
            self._pool = ThreadPoolExecutor(num_threads - 1, thread_name_prefix="host-copies")

    def copy(self, targets: Int64s, sources: Int64s, sizes: Int64s) -> None:
        num_parts = min(self._num_threads, max(1, int(sizes.sum()) // MIN_THREAD_BYTES))
        if self._pool is None or num_parts == 1:
            _move(targets, sources, sizes)
            return
        own, *others = _parts(targets, sources, sizes, num_parts)
        pending = [self._pool.submit(_move, *part) for part in others]
        try:
            _move(*own)
        finally:
            for each in pending:
                each.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _move(targets: Int64s, sources: Int64s, sizes: Int64s) -> None:
    move = ctypes.memmove
    for target, source, size in zip(
        targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
    ):
        move(target, source, size)


def _parts(
    targets: Int64s, sources: Int64s, sizes: Int64s, num_parts: int
) -> list[tuple[Int64s, Int64s, Int64s]]:
    """Parts with equal numbers of bytes; a copy on a border is divided."""
    ends = np.cumsum(sizes)
    starts = ends - sizes
    borders = np.linspace(0, int(ends[-1]), num_parts + 1).astype(np.int64)
    parts = []
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        first = int(np.searchsorted(ends, begin, side="right"))
        last = int(np.searchsorted(starts, end, side="left"))
        cut = np.clip(begin - starts[first:last], 0, None)
        left = np.minimum(ends[first:last], end) - starts[first:last] - cut
        parts.append((targets[first:last] + cut, sources[first:last] + cut, left))
    return parts
