"""Copies between a CUDA device and registered host memory, or within the memory that a device can
access, on a stream of low priority.

There are several ways to submit the copies of a job. Which is the fastest depends on the driver,
the device and the page size, so `cuda_copier` measures them at start.
"""

import ctypes
import importlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from longshore.connectors.offloading.copies import Copier, Int64s, divide
from longshore.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

Direction: TypeAlias = Literal["to host", "to device", "within the device"]

BATCH_RUNTIME_VERSION: Final = 12_080
"""The first CUDA runtime with cudaMemcpyBatchAsync. Version 13 has other arguments."""

MEASURED_BYTES: Final = 16 << 20
"""Copied per measurement."""

NUM_REPEATS: Final = 3

MAX_MEASURE_S: Final = 0.4
"""Per direction, apart from the compilation of the kernel. What is left then is not measured."""

MIN_KERNEL_GAIN: Final = 2.0
"""The kernel must be faster by this factor, because it takes multiprocessors from the steps: beside
it, decodes of an 8B on an H200 took 1.6 times as long, and 1.02 times beside the other ways."""

BATCH_BYTES: Final = 2 << 20
"""Copies submitted at a time, while those before are running."""

MAX_PIECES: Final = 1 << 15
"""Of one launch of the kernel."""


class Submission(Protocol):
    """A way to submit copies on the current stream. `name` is for the log."""

    name: str

    def submit(self, targets: Int64s, sources: Int64s, sizes: Int64s) -> None:
        """As `Copier.copy`, without waiting for the copies; all sizes are positive, and there is
        at least one. The arrays may be overwritten afterwards. Raises an error if the copies are
        not possible; some of them may have been submitted."""


class CudaCopier:
    """The copies of a job, submitted in one way to a stream that only this object uses.

    on_stream: makes the stream, and its device, current in the calling thread.
    wait:      waits for the stream on the host, without the interpreter's lock.
    """

    def __init__(
        self,
        submission: Submission,
        on_stream: Callable[[], AbstractContextManager[object]],
        wait: Callable[[], object],
    ) -> None:
        self.name = submission.name
        self._submission = submission
        self._on_stream = on_stream
        self._wait = wait

    def copy(self, targets: Int64s, sources: Int64s, sizes: Int64s) -> None:
        is_copied = sizes > 0
        if not is_copied.any():
            return
        with self._on_stream():
            try:
                self._submission.submit(targets[is_copied], sources[is_copied], sizes[is_copied])
            finally:
                self._wait()  # also after a failure: what was submitted may still read and write

    def close(self) -> None:
        """Release the copier; every copy must have ended."""


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes: order of the accesses to the source, hints (unused), flags."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_STREAM_ORDER: Final = 1  # cudaMemcpySrcAccessOrderStream
_PREFER_OVERLAP: Final = 1  # cudaMemcpyFlagPreferOverlapWithCompute
_SAME_ADDRESSES: Final = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
_DEFAULT_KIND: Final = 4  # cudaMemcpyDefault: the runtime knows whose the addresses are


class BatchSubmission:
    """A cudaMemcpyBatchAsync for about every BATCH_BYTES of a job.

    Called through ctypes with arrays: cuda-bindings takes lists of Python integers, which takes
    longer than the copies if the pages are small.
    """

    name = "batches of copies"

    def __init__(self, library: Any, stream: int) -> None:
        """library: the CUDA runtime, a ctypes library. Raises RuntimeError if it has no batches."""
        self._library, self._stream = library, ctypes.c_void_p(stream)
        version = ctypes.c_int()
        check(library, library.cudaRuntimeGetVersion(ctypes.byref(version)))
        self._version = version.value
        if self._version < BATCH_RUNTIME_VERSION:
            raise RuntimeError(
                f"the CUDA runtime {self._version} has no cudaMemcpyBatchAsync, "
                f"which {BATCH_RUNTIME_VERSION} has"
            )

    def submit(self, targets: Int64s, sources: Int64s, sizes: Int64s) -> None:
        arrays = [np.ascontiguousarray(each) for each in (targets, sources, sizes)]
        most = max(1, BATCH_BYTES // int(sizes.max()))
        for first in range(0, len(sizes), most):
            self._submit([each[first : first + most] for each in arrays])

    def _submit(self, arrays: Sequence[Int64s]) -> None:
        """arrays: contiguous targets, sources and sizes."""
        addresses = [ctypes.c_void_p(each.ctypes.data) for each in arrays]
        attributes = _Attributes(order=_STREAM_ORDER, flags=_PREFER_OVERLAP)
        first, failed = ctypes.c_size_t(), ctypes.c_size_t()
        arguments = [
            *addresses,
            ctypes.c_size_t(len(arrays[0])),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
        ]
        if self._version < 13_000:
            arguments.append(ctypes.byref(failed))
        check(self._library, self._library.cudaMemcpyBatchAsync(*arguments, self._stream))


class RunSubmission:
    """One cudaMemcpyAsync per run of neighbouring blocks."""

    name = "one copy per run of blocks"

    def __init__(self, library: Any, stream: int) -> None:
        """library: the CUDA runtime, a ctypes library."""
        self._library, self._stream = library, ctypes.c_void_p(stream)

    def submit(self, targets: Int64s, sources: Int64s, sizes: Int64s) -> None:
        for target, source, size in zip(
            targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
        ):
            check(
                self._library,
                self._library.cudaMemcpyAsync(
                    ctypes.c_void_p(target),
                    ctypes.c_void_p(source),
                    ctypes.c_size_t(size),
                    ctypes.c_int(_DEFAULT_KIND),
                    self._stream,
                ),
            )


class KernelSubmission:
    """A Triton kernel per job that reads and writes registered host memory.

    device: of the blocks. In tests a CPU, with Triton's interpreter.
    wait:   waits for the stream, between the launches of a large job.
    """

    name = "a kernel per job"

    def __init__(self, device: torch.device, wait: Callable[[], object]) -> None:
        """Raises ImportError without Triton."""
        self._kernel = importlib.import_module("longshore.connectors.offloading.copy_kernel")
        self._wait = wait
        is_cuda = device.type == "cuda"
        self._staged = torch.empty((MAX_PIECES, 3), dtype=torch.int64, pin_memory=is_cuda)
        self._pieces = torch.empty((MAX_PIECES, 3), dtype=torch.int64, device=device)

    def submit(self, targets: Int64s, sources: Int64s, sizes: Int64s) -> None:
        word_bytes = common_word_bytes(targets, sources, sizes)
        piece_bytes = self._kernel.PIECE_BYTES.value
        index, offsets, parts = divide(np.zeros_like(sizes), sizes, piece_bytes)
        pieces = np.stack((targets[index] + offsets, sources[index] + offsets, parts), axis=1)
        for first in range(0, len(pieces), MAX_PIECES):
            if first > 0:
                self._wait()  # until the launch before has read its addresses
            some = torch.from_numpy(pieces[first : first + MAX_PIECES])
            self._staged[: len(some)].copy_(some)
            on_device = self._pieces[: len(some)]
            on_device.copy_(self._staged[: len(some)], non_blocking=True)
            self._kernel.copy_pieces(on_device, word_bytes)


def common_word_bytes(*numbers: Int64s) -> int:
    """The largest of 8, 4, 2 and 1 that divides all numbers."""
    bits = int(np.bitwise_or.reduce(np.concatenate(numbers)))
    return next(size for size in (8, 4, 2, 1) if bits % size == 0)


def check(library: Any, status: int) -> None:
    """Raise RuntimeError for an error of the CUDA runtime."""
    if status != 0:
        library.cudaGetLastError()  # resets it; else torch would report it for its next kernel
        raise RuntimeError(f"the CUDA runtime reported error {status}")


# The choice


def cuda_copier(device: torch.device, page_bytes: int, direction: Direction) -> Copier:
    """The fastest copier for pages of this size, on a new stream. Raises ConfigError if no way of
    copying works."""
    copiers = cuda_copiers(device)
    source, target = (
        torch.empty(MEASURED_BYTES, dtype=torch.uint8, device=device)
        if is_on_device
        else torch.empty(MEASURED_BYTES, dtype=torch.uint8, pin_memory=True)
        for is_on_device in (direction != "to device", direction != "to host")
    )
    return fastest(copiers, source, target, page_bytes, direction)


def cuda_copiers(device: torch.device) -> Mapping[str, Callable[[], CudaCopier]]:
    """What makes the copiers of all ways of copying, by name; they share a new stream, so only one
    may be in use. Making one raises an error if it cannot work here."""
    # The default priority is the lowest; the stream of the steps has a higher one.
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # of torch

    def wait() -> None:
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # of torch
        ended.record(stream)
        ended.synchronize()  # does not occupy a processor

    def copier(make: Callable[[], Submission]) -> Callable[[], CudaCopier]:
        return lambda: CudaCopier(make(), lambda: torch.cuda.stream(stream), wait)

    handle = stream.cuda_stream
    return {
        BatchSubmission.name: copier(lambda: BatchSubmission(load_runtime(), handle)),
        RunSubmission.name: copier(lambda: RunSubmission(load_runtime(), handle)),
        KernelSubmission.name: copier(lambda: mapped_kernel(load_runtime(), device, wait)),
    }


def mapped_kernel(
    library: Any, device: torch.device, wait: Callable[[], object]
) -> KernelSubmission:
    """Raises RuntimeError if the device has other addresses for registered host memory."""
    is_same, index = ctypes.c_int(), 0 if device.index is None else device.index
    status = library.cudaDeviceGetAttribute(ctypes.byref(is_same), _SAME_ADDRESSES, index)
    check(library, status)
    if not is_same.value:
        raise RuntimeError("registered host memory has another address on the device")
    return KernelSubmission(device, wait)


def fastest(
    copiers: Mapping[str, Callable[[], Copier]],
    source: Tensor,
    target: Tensor,
    page_bytes: int,
    direction: Direction,
) -> Copier:
    """Copy scattered pages from `source` to `target` with every copier. One that raises, or whose
    copy is wrong, is not used, and a warning names it. Raises ConfigError if none is left."""
    best: Copier | None = None
    best_rate = 0.0
    rates: list[str] = []
    deadline_s = time.perf_counter() + MAX_MEASURE_S
    for name, make in copiers.items():
        if best is not None and time.perf_counter() > deadline_s:
            rates.append(f"{name}: not measured")
            continue
        try:
            copier = make()
            rate = copied_per_s(copier, source, target, page_bytes)
        except Exception as error:
            logger.warning("copies %s: %s is not used: %s", direction, name, error)
            continue
        rates.append(f"{name}: {rate / 1e9:.1f} GB/s")
        needed = MIN_KERNEL_GAIN if name == KernelSubmission.name else 1.0
        if best is None or rate > needed * best_rate:
            best, best_rate = copier, rate
    if best is None:
        raise ConfigError(f"no way of copying blocks {direction} works; the log says why")
    logger.info(
        "copies %s, pages of %d bytes: %s (%s)", direction, page_bytes, best.name, ", ".join(rates)
    )
    return best


def copied_per_s(copier: Copier, source: Tensor, target: Tensor, page_bytes: int) -> float:
    """Bytes per second for scattered pages of two tensors of bytes with equal sizes; the best of
    NUM_REPEATS. Overwrites both tensors. Raises RuntimeError if the first copy is wrong."""
    # Repeats at a prime number of bytes, so that pages differ.
    noise = np.random.default_rng(0).integers(0, 256, 65_521, np.uint8)
    pattern = torch.from_numpy(np.resize(noise, len(source)))
    source.copy_(pattern)
    target.zero_()
    if "cuda" in {source.device.type, target.device.type}:
        torch.cuda.synchronize()
    to, starts, sizes = scattered(len(source), page_bytes)
    copies = to + target.data_ptr(), starts + source.data_ptr(), sizes
    copier.copy(*copies)
    expected = torch.zeros(len(target), dtype=torch.uint8)
    size = int(sizes[0])
    pages, copied = (each[: sizes.sum()].view(-1, size) for each in (pattern, expected))
    copied[torch.from_numpy(to // size)] = pages[torch.from_numpy(starts // size)]
    if not torch.equal(target.cpu(), expected):
        raise RuntimeError("its copies are wrong")
    seconds = []
    for _ in range(NUM_REPEATS):
        started_s = time.perf_counter()
        copier.copy(*copies)
        seconds.append(time.perf_counter() - started_s)
    return int(sizes.sum()) / min(seconds)


def scattered(num_bytes: int, page_bytes: int) -> tuple[Int64s, Int64s, Int64s]:
    """Copies of all whole pages, in random order and to other places: offset to write, offset to
    read, and size of each. A page that is larger than the memory is as large as the memory."""
    size = min(page_bytes, num_bytes)
    starts = np.random.default_rng(0).permutation(num_bytes // size).astype(np.int64) * size
    return np.roll(starts, 1), starts, np.full(len(starts), size, np.int64)


def load_runtime() -> Any:
    """The CUDA runtime that torch uses, a ctypes library. Raises OSError if it is not loaded."""
    return ctypes.CDLL(_runtime_path())


def _runtime_path() -> str:
    """Of the CUDA runtime that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "/libcudart.so" in path:
            return path
    raise OSError("this process has not loaded the CUDA runtime (libcudart.so)")
