"""Copies between the blocks of the device and host memory: neighbours are joined, and all copies of
a job are submitted together.

A `Copier` gets addresses, so that one interface serves a CPU (threads with memory copies, which do
not hold the interpreter's lock) and CUDA (the runtime's batched or single asynchronous copies).
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Int64s: TypeAlias = npt.NDArray[np.int64]

MIN_THREAD_BYTES: Final = 1 << 20
"""Bytes for which another thread is woken up."""

BATCH_RUNTIME_VERSION: Final = 12_080
"""The first CUDA runtime with cudaMemcpyBatchAsync. Version 13 has other arguments."""


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


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes: order of the accesses to the source, hints (unused), flags."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_STREAM_ORDER: Final = 1  # cudaMemcpySrcAccessOrderStream
_DEFAULT_KIND: Final = 4  # cudaMemcpyDefault: the runtime knows whose the addresses are


class CudaCopier:
    """The CUDA runtime's copies on a stream of its own, of the lowest priority. Host memory must be
    registered, or each copy waits. All copies of a job are one call if the runtime has batches.

    library:     the runtime, a ctypes library.
    on_device:   makes the stream's device the current one of the calling thread.
    synchronize: waits for the stream.
    """

    def __init__(
        self,
        library: Any,
        stream: int,
        on_device: Callable[[], AbstractContextManager[object]],
        synchronize: Callable[[], object],
    ) -> None:
        self._library = library
        self._stream = ctypes.c_void_p(stream)
        self._on_device = on_device
        self._synchronize = synchronize
        version = ctypes.c_int()
        self._check(library.cudaRuntimeGetVersion(ctypes.byref(version)))
        self._version = version.value
        self.has_batches = self._version >= BATCH_RUNTIME_VERSION
        self.name = "one batch per job" if self.has_batches else "one copy per run of blocks"

    def copy(self, targets: Int64s, sources: Int64s, sizes: Int64s) -> None:
        if len(sizes) == 0:
            return
        with self._on_device():
            if self.has_batches:
                self._copy_batch(targets, sources, sizes)
            else:
                self._copy_each(targets, sources, sizes)
            self._synchronize()

    def _copy_batch(self, targets: Int64s, sources: Int64s, sizes: Int64s) -> None:
        arrays = [np.ascontiguousarray(each) for each in (targets, sources, sizes)]
        addresses = [ctypes.c_void_p(each.ctypes.data) for each in arrays]
        attributes, first, failed = _Attributes(order=_STREAM_ORDER), ctypes.c_size_t(), None
        arguments = [
            *addresses,
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
        ]
        if self._version < 13_000:
            failed = ctypes.c_size_t()
            arguments.append(ctypes.byref(failed))
        self._check(self._library.cudaMemcpyBatchAsync(*arguments, self._stream))

    def _copy_each(self, targets: Int64s, sources: Int64s, sizes: Int64s) -> None:
        for target, source, size in zip(
            targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
        ):
            self._check(
                self._library.cudaMemcpyAsync(
                    ctypes.c_void_p(target),
                    ctypes.c_void_p(source),
                    ctypes.c_size_t(size),
                    ctypes.c_int(_DEFAULT_KIND),
                    self._stream,
                )
            )

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"the CUDA runtime reported error {status}")

    def close(self) -> None:
        """Every copy has ended."""


def cuda_copier(device: torch.device) -> CudaCopier:
    """On a new stream. Raises OSError if the runtime that torch uses cannot be found."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # of torch
    return CudaCopier(
        ctypes.CDLL(_runtime_path()),
        stream.cuda_stream,
        lambda: torch.cuda.device(device),
        stream.synchronize,
    )


def _runtime_path() -> str:
    """Of the CUDA runtime that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "/libcudart.so" in path:
            return path
    raise OSError("this process has not loaded the CUDA runtime (libcudart.so)")
