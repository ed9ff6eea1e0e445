"""How fast this machine moves KV blocks: within host memory, and to and from a disk.

Rates are in decimal gigabytes per second, each direction alone. Loading a block is faster than
computing it as long as the engine computes fewer prompt tokens per second than the tier delivers.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich.table import Table

from longshore.connectors.base.checksum import block_checksum
from longshore.connectors.offloading.copies import HostCopier
from longshore.connectors.offloading.copy_method import measure_host_copies
from longshore.connectors.offloading.disk.identity import StoreIdentity
from longshore.connectors.offloading.disk.index import HEADER_BYTES, RECORD_BYTES
from longshore.connectors.offloading.disk.results import BlockRead, BlockWrite, Outcome
from longshore.connectors.offloading.disk.segments import aligned_memory, whole_pages
from longshore.connectors.offloading.disk.store import DiskStore
from longshore.protocol.errors import ConfigError

MEASURED_BYTES: Final = 64 << 20
"""Moved per measurement; a block if that is larger."""

NUM_REPEATS: Final = 5

IDENTITY: Final = StoreIdentity(
    model_name="measurement",
    model_fingerprint="",
    kv_layout="",
    dtype="",
    hash_seed="",
    block_size=1,
    groups="",
    parallel_layout="",
    num_ranks=1,
)
"""Of stores that are measured and removed."""


class StoredBlocks:
    """Blocks in page-aligned memory, to write to a store and to read back.

    memory: (num_blocks * slot_bytes,) uint8, random.
    data:   the `block_bytes` bytes of each block.
    """

    def __init__(
        self, num_blocks: int, block_bytes: int, slots: Sequence[int] | None = None
    ) -> None:
        """slots: of each block in the store; by default in order."""
        self.slot_bytes = size = whole_pages(block_bytes)
        self.memory = aligned_memory(num_blocks * size)
        self.memory[:] = np.random.default_rng(1).integers(0, 256, len(self.memory), np.uint8)
        self.data = [self.memory[i * size : i * size + block_bytes] for i in range(num_blocks)]
        self.keys = [number.to_bytes(32, "little") for number in range(num_blocks)]
        self.slots = range(num_blocks) if slots is None else slots

    @property
    def capacity_bytes(self) -> int:
        """Capacity of a store with a slot for each block."""
        return HEADER_BYTES + len(self.data) * (self.slot_bytes + RECORD_BYTES)

    def checksums(self, digest: bytes) -> list[int]:
        blocks = zip(self.keys, self.data, strict=True)
        return [block_checksum(data, digest, key) for key, data in blocks]

    def writes(self, digest: bytes) -> list[BlockWrite]:
        """digest: of the store's identity."""
        columns = (self.keys, self.slots, self.data, self.checksums(digest))
        return [BlockWrite(*each) for each in zip(*columns, strict=True)]

    def reads(self) -> list[BlockRead]:
        columns = zip(self.keys, self.slots, self.data, strict=True)
        return [BlockRead(*each) for each in columns]


class Rate(msgspec.Struct, frozen=True):
    """One measurement.

    method:       how the bytes were moved.
    gb_per_s:     the median, in 10^9 bytes per second.
    tokens_per_s: tokens per second of a load at this rate; None if it is no load.
    """

    what: str
    method: str
    gb_per_s: float
    tokens_per_s: float | None = None


class Bandwidth(msgspec.Struct, frozen=True):
    block_bytes: int
    block_tokens: int
    rates: tuple[Rate, ...]


def measure_bandwidth(block_bytes: int, block_tokens: int, path: Path | None) -> Bandwidth:
    """Takes a few seconds.

    path: folder on the disk to measure; a temporary store in it is removed afterwards. None: no
          disk is measured.

    Raises ConfigError if the folder cannot be used.
    """
    rates = [*_host_rates(block_bytes)]
    if path is not None:
        rates += _disk_rates(block_bytes, path)
    tokens_per_gb = 1e9 / block_bytes * block_tokens
    return Bandwidth(
        block_bytes,
        block_tokens,
        tuple(
            Rate(what, method, rate, rate * tokens_per_gb if what in _LOADS else None)
            for what, method, rate in rates
        ),
    )


_LOADS: Final = {"load from host memory", "swap out and in", "load from disk"}
"""What can take the place of computing a prompt."""


def _host_rates(block_bytes: int) -> Iterator[tuple[str, str, float]]:
    num_blocks = max(2, MEASURED_BYTES // block_bytes)
    device = np.ones((num_blocks, block_bytes), np.uint8)
    host = np.zeros_like(device)
    order = np.random.default_rng(0).permutation(num_blocks).astype(np.int64) * block_bytes
    on_device = device.ctypes.data + order
    on_host = host.ctypes.data + np.arange(num_blocks, dtype=np.int64) * block_bytes
    sizes = np.full(num_blocks, block_bytes, np.int64)
    first_on_host, first_on_device, num_bytes = (
        np.array([each], np.int64) for each in (host.ctypes.data, device.ctypes.data, device.nbytes)
    )
    plain = HostCopier()
    chosen = measure_host_copies(block_bytes)
    copier = HostCopier(chosen.num_threads)

    def checksums() -> None:
        for block in host:
            block_checksum(block, bytes(16), b"block")

    def rate(move: Callable[[], object]) -> float:
        return device.nbytes / _median_s(move) / 1e9

    yield "memcpy", plain.name, rate(lambda: plain.copy(first_on_host, first_on_device, num_bytes))
    store = rate(lambda: copier.copy(on_host, on_device, sizes))
    load = rate(lambda: copier.copy(on_device, on_host, sizes))
    yield "store in host memory", copier.name, store
    yield "load from host memory", copier.name, load
    yield "swap out and in", "store, then load", 1 / (1 / store + 1 / load)
    yield "checksum", "XXH3, one thread", rate(checksums)
    copier.close()


def _disk_rates(block_bytes: int, path: Path) -> Iterator[tuple[str, str, float]]:
    num_blocks = max(2, MEASURED_BYTES // block_bytes)
    blocks = StoredBlocks(num_blocks, block_bytes)
    with _open_store(path, blocks) as store:
        writes, reads = blocks.writes(store.identity_digest), blocks.reads()
        for what, move in (
            ("write to disk", lambda: store.write(writes)),
            ("load from disk", lambda: store.read(reads)),
        ):
            seconds = _median_s(lambda move=move: _check_all(path, move()))  # type: ignore[misc]
            yield what, store.io_name, num_blocks * block_bytes / seconds / 1e9


@contextmanager
def _open_store(path: Path, blocks: StoredBlocks) -> Iterator[DiskStore]:
    slot_bytes, capacity_bytes = blocks.slot_bytes, blocks.capacity_bytes
    try:
        with (
            tempfile.TemporaryDirectory(prefix="longshore-doctor-", dir=path) as folder,
            DiskStore.open(
                Path(folder), IDENTITY, slot_bytes=slot_bytes, capacity_bytes=capacity_bytes
            ) as store,
        ):
            yield store
    except OSError as error:
        raise ConfigError(
            f"the disk at {path} cannot be measured: {error}. Give --path an existing folder that "
            "you can write to."
        ) from error


def _check_all(path: Path, outcomes: Sequence[Outcome]) -> None:
    num_failed = sum(outcome is not Outcome.OK for outcome in outcomes)
    if num_failed:
        raise ConfigError(
            f"{num_failed} of {len(outcomes)} blocks could not be written to or read from {path}; "
            "the log says why. Free some space, or give --path another folder."
        )


def _median_s(move: Callable[[], object]) -> float:
    move()  # touches the memory
    times = []
    for _ in range(NUM_REPEATS):
        started_s = time.perf_counter()
        move()
        times.append(time.perf_counter() - started_s)
    return sorted(times)[NUM_REPEATS // 2]


def bandwidth_table(bandwidth: Bandwidth) -> Table:
    """Make a table for a terminal of 80 columns or more."""
    lines = Table(
        title=f"Blocks of {bandwidth.block_bytes:,} bytes, {bandwidth.block_tokens} tokens",
        title_justify="left",
        caption="A load is faster than computing the prompt if the engine computes fewer tokens "
        "per second than the last column.",
        caption_justify="left",
    )
    lines.add_column("")
    lines.add_column("method", overflow="fold")
    lines.add_column("GB/s", justify="right")
    lines.add_column("tokens/s", justify="right")
    for rate in bandwidth.rates:
        tokens = "" if rate.tokens_per_s is None else f"{rate.tokens_per_s:,.0f}"
        lines.add_row(rate.what, rate.method, f"{rate.gb_per_s:.2f}", tokens)
    return lines
