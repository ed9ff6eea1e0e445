"""Which way of copying blocks within host memory is the fastest on this machine: measured once, and
kept in the state directory."""

import logging
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from longshore.connectors.offloading.copies import Copier, HostCopier
from longshore.protocol.model_files import read_bytes

logger = logging.getLogger(__name__)

COPY_METHODS_FILE: Final = "copy-methods.json"

MEASURED_BYTES: Final = 16 << 20
"""Copied per measurement: more than a core's caches, and little enough for a start."""

MAX_MEASURED_BLOCKS: Final = 1024
NUM_REPEATS: Final = 3
MAX_MEASURE_S: Final = 0.2

MIN_GAIN: Final = 1.25
"""More threads must be faster by this factor: they take cores from the steps."""


class HostCopySpeed(msgspec.Struct, frozen=True):
    """A choice. bytes_per_s: of `num_threads` threads that copy blocks of one size."""

    num_threads: int
    bytes_per_s: float


def choose_host_copies(block_bytes: int, state_dir: Path | None) -> HostCopySpeed:
    """The choice for blocks of this size: known from an earlier start, or measured now.

    state_dir: where choices are kept; None: nowhere.
    """
    key = f"{machine_name()}, torch {torch.__version__}, blocks of {block_bytes} bytes"
    known = _read(state_dir)
    if key in known:
        speed = known[key]
        logger.info("host copies: %d threads, %.1f GB/s, as measured earlier", *_shown(speed))
        return speed
    started_s = time.perf_counter()
    speed = measure_host_copies(block_bytes)
    elapsed_s = time.perf_counter() - started_s
    logger.info("host copies: %d threads, %.1f GB/s, measured in %.2f s", *_shown(speed), elapsed_s)
    _write(state_dir, known | {key: speed})
    return speed


def measure_host_copies(block_bytes: int, candidates: Sequence[int] | None = None) -> HostCopySpeed:
    """Measure scattered copies of blocks with every candidate, numbers of threads. Takes at most
    about MAX_MEASURE_S: the last candidates are left out on a slow machine."""
    num_blocks = min(max(2, MEASURED_BYTES // block_bytes), MAX_MEASURED_BLOCKS)
    source = np.ones((num_blocks, block_bytes), np.uint8)
    target = np.zeros_like(source)
    order = np.random.default_rng(0).permutation(num_blocks).astype(np.int64) * block_bytes
    sources = source.ctypes.data + order
    targets = target.ctypes.data + np.roll(order, 1)
    sizes = np.full(num_blocks, block_bytes, np.int64)
    deadline_s = time.perf_counter() + MAX_MEASURE_S
    best = HostCopySpeed(1, 0.0)
    for num_threads in candidates or thread_counts():
        if best.bytes_per_s and time.perf_counter() > deadline_s:
            break
        copier: Copier = HostCopier(num_threads)
        seconds = min(_seconds(copier, targets, sources, sizes) for _ in range(NUM_REPEATS))
        copier.close()
        speed = HostCopySpeed(num_threads, source.nbytes / seconds)
        if speed.bytes_per_s > best.bytes_per_s * (MIN_GAIN if best.bytes_per_s else 1):
            best = speed
    return best


def thread_counts() -> list[int]:
    """1, 2, 4, … up to half of this process's processors."""
    num_processors = len(os.sched_getaffinity(0))
    return [1 << power for power in range(4) if 1 << power <= max(1, num_processors // 2)]


def machine_name() -> str:
    """Tells machines apart that share a state directory."""
    processor = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass
    return f"{platform.node()}, {processor}, {len(os.sched_getaffinity(0))} processors"


def _seconds(copier: Copier, *copies: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    started_s = time.perf_counter()
    copier.copy(*copies)
    return time.perf_counter() - started_s


def _shown(speed: HostCopySpeed) -> tuple[int, float]:
    return speed.num_threads, speed.bytes_per_s / 1e9


def _read(state_dir: Path | None) -> dict[str, HostCopySpeed]:
    """A file that cannot be read is not used; the measurement is repeated."""
    if state_dir is None:
        return {}
    try:
        data = read_bytes(state_dir / COPY_METHODS_FILE)
        return msgspec.json.decode(data, type=dict[str, HostCopySpeed])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be read: %s", state_dir / COPY_METHODS_FILE, error)
        return {}


def _write(state_dir: Path | None, choices: dict[str, HostCopySpeed]) -> None:
    if state_dir is None:
        return
    path = state_dir / COPY_METHODS_FILE
    own = path.with_name(f"{path.name}.{os.getpid()}")  # ranks may write at the same time
    try:
        own.write_bytes(msgspec.json.format(msgspec.json.encode(choices)))
        own.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)
