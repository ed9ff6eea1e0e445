"""The lower tiers in a worker: their I/O, opened at startup."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from longshore.connectors.base import WorkerConnectorConfig
from longshore.connectors.offloading.disk.identity import StoreIdentity
from longshore.connectors.offloading.disk.results import BlockRead, BlockWrite, Outcome
from longshore.connectors.offloading.disk.store import DiskStore
from longshore.connectors.offloading.disk_tier import CLEAR, DiskContents
from longshore.connectors.offloading.host_spec import CPUOffloadingSpec
from longshore.connectors.offloading.pace import Pace
from longshore.connectors.offloading.remote.address import RemoteAddress
from longshore.connectors.offloading.remote.breaker import BreakerState
from longshore.connectors.offloading.remote.store import (
    RemoteLimits,
    RemoteRead,
    RemoteStore,
    RemoteWrite,
)
from longshore.connectors.offloading.remote_tier import RemoteAnswer, RemoteHealth, RemoteQuery
from longshore.connectors.offloading.tiers import TierFaults, TierWorker
from longshore.connectors.options import parse_size
from longshore.protocol.events import Medium

logger = logging.getLogger(__name__)

LOOKUP_LIMIT_S: Final = 0.8
"""Of all lookups of a request in a store, a little less than the default of `min_load_wait_s`. What
is not known by then counts as absent; the leading blocks are looked up first."""

READ_BLOCKS: Final = 32
"""Blocks that are read from disk before the time is looked at."""

ENTRIES_PER_MESSAGE: Final = 16_384
"""Entries of the disk's index per message to the scheduler, so that none is too large."""


def open_tiers(
    spec: CPUOffloadingSpec, config: WorkerConnectorConfig, wake: Callable[[], None]
) -> list[TierWorker]:
    """Open the lower tiers, in the order of `CPUOffloadingSpec`. Raises ConfigError or
    DiskStoreError.

    wake: has `take_messages` called soon.
    """
    workers: list[TierWorker] = []
    try:
        if spec.has_disk:
            workers.append(DiskTierWorker(_open_disk(spec, config), wake))
        if spec.remote is not None:
            workers.append(RemoteTierWorker(_open_remote(spec, spec.remote, config), wake))
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    return workers


class DiskTierWorker:
    """See TierWorker. Says once what the disk contains."""

    name = "disk"
    waits_for_writes = True
    medium: Medium = "DISK"

    def __init__(self, store: DiskStore, wake: Callable[[], None]) -> None:
        self._store = store
        self._wake = wake
        self._messages = deque(_contents_of(store))
        wake()

    def read(self, batch: Sequence[BlockRead], ends_s: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        size = len(batch) if ends_s == math.inf else READ_BLOCKS
        while len(outcomes) < len(batch) and time.monotonic() < ends_s:
            outcomes += self._store.read(batch[len(outcomes) : len(outcomes) + size])
        return outcomes + [Outcome.LATE] * (len(batch) - len(outcomes))

    def write(self, batch: Sequence[BlockWrite]) -> list[Outcome]:
        return self._store.write(batch)

    def run(self, command: bytes) -> None:
        if command != CLEAR:
            raise ValueError(f"unknown command {command!r}")
        self._store.delete([key for key, _ in self._store.entries()])
        logger.info("disk tier: all blocks were deleted")

    def take_messages(self) -> list[bytes]:
        if not self._messages:
            return []
        message = self._messages.popleft()
        if self._messages:
            self._wake()
        return [message]

    def interrupt(self) -> None:
        """Disks are quick."""

    def close(self) -> None:
        self._store.close()


class RemoteTierWorker:
    """See TierWorker. Answers what the store contains."""

    name = "remote"
    medium: Medium = "STORAGE"
    waits_for_writes = False  # a request waits for the answers, and writes can be slow

    def __init__(self, store: RemoteStore, wake: Callable[[], None]) -> None:
        self._store = store
        self._lookups = Pace("lookups in the remote tier")
        self._wake = wake
        self._answers: deque[bytes] = deque()
        self._said = TierFaults()

    def read(self, batch: Sequence[BlockRead], ends_s: float) -> list[Outcome]:
        return self._store.get([RemoteRead(read.key, read.buffer) for read in batch], ends_s)

    def write(self, batch: Sequence[BlockWrite]) -> list[Outcome]:
        return self._store.put(
            [RemoteWrite(write.key, write.buffer, write.checksum) for write in batch]
        )

    def run(self, command: bytes) -> None:
        query = msgspec.msgpack.decode(command, type=RemoteQuery)
        present = bytes(len(query.keys))
        if self._lookups.may_begin():
            ends_s = time.monotonic() + LOOKUP_LIMIT_S
            present = bytes(self._store.exists(query.keys, leading=query.is_prefix, ends_s=ends_s))
            self._lookups.ended(is_late=time.monotonic() >= ends_s and not any(present))
        if query.is_prefix:
            present = present[: present.find(0) + 1] or present
        self._answers.append(msgspec.msgpack.encode(RemoteAnswer(query.query_id, present)))
        self._wake()

    def take_messages(self) -> list[bytes]:
        messages = [self._answers.popleft() for _ in range(len(self._answers))]
        faults = self._faults()
        if faults != self._said:
            self._said = faults
            messages.append(msgspec.msgpack.encode(RemoteHealth(faults)))
        return messages

    def _faults(self) -> TierFaults:
        stats = self._store.stats()
        num_open = sum(state is not BreakerState.CLOSED for state in (stats.reads, stats.writes))
        return TierFaults(stats.num_failed, stats.num_rejected, stats.num_opened, num_open)

    def interrupt(self) -> None:
        self._store.interrupt()

    def close(self) -> None:
        self._store.close()


def store_identity(spec: CPUOffloadingSpec, config: WorkerConnectorConfig) -> StoreIdentity:
    """What stored blocks of this engine depend on."""
    identity = config.identity
    assert identity is not None
    return StoreIdentity(
        model_name=config.model_name,
        model_fingerprint=identity.model_fingerprint,
        kv_layout=config.kv_layout,
        dtype=config.kv_dtype,
        hash_seed=identity.hash_seed_digest,
        block_size=spec.groups.groups[0].block_size,
        groups=config.namespace,
        parallel_layout=", ".join(f"{size} bytes" for size in config.rank_block_bytes),
        num_ranks=config.num_ranks,
    )


def _open_disk(spec: CPUOffloadingSpec, config: WorkerConnectorConfig) -> DiskStore:
    """The store of this rank. Raises ConfigError or DiskStoreError."""
    assert spec.options.disk_path is not None
    store = DiskStore.open(
        Path(spec.options.disk_path).expanduser(),
        store_identity(spec, config),
        slot_bytes=spec.groups.factor * config.rank_block_bytes[config.rank],
        capacity_bytes=spec.disk_bytes // config.num_ranks,
        rank=config.rank,
        io=spec.options.disk_io,
    )
    for other in store.others():
        logger.info(
            "disk tier %s: ignored %.2f GiB of %s",
            spec.options.disk_path,
            other.size_bytes / 2**30,
            other.name,
        )
    return store


def _open_remote(
    spec: CPUOffloadingSpec, address: RemoteAddress, config: WorkerConnectorConfig
) -> RemoteStore:
    """The store of this rank. Raises ConfigError."""
    options = spec.options
    return RemoteStore(
        address,
        store_identity(spec, config),
        rank=config.rank,
        limits=RemoteLimits(
            timeout_s=options.remote_timeout_ms / 1000,
            max_bytes_in_flight=parse_size(
                "remote_max_bytes_in_flight", options.remote_max_bytes_in_flight
            ),
            concurrency=options.remote_concurrency,
            ttl_s=options.remote_ttl_s,
            negative_ttl_s=options.remote_negative_ttl_s,
            failure_threshold=options.remote_failure_threshold,
            retry_s=options.remote_retry_s,
        ),
    )


def _contents_of(store: DiskStore) -> Iterator[bytes]:
    """Messages with all entries of the store."""
    entries = list(store.entries())
    for first in range(0, max(len(entries), 1), ENTRIES_PER_MESSAGE):
        part = entries[first : first + ENTRIES_PER_MESSAGE]
        yield msgspec.msgpack.encode(
            DiskContents(
                store.capacity_slots,
                [key for key, _ in part],
                np.array([slot for _, slot in part], np.int64).tobytes(),
                is_last=first + ENTRIES_PER_MESSAGE >= len(entries),
            )
        )
