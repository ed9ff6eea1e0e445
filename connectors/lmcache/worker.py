"""The worker half: moves this rank's share of each block between the KV cache and LMCache.

All of it runs on threads, because LMCache's calls block. On CUDA they use a stream of their own.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, Final

import msgspec
import torch

from longshore.connectors.base import (
    FinishedTransfers,
    KVCaches,
    QueueEvent,
    TransferQueue,
    TransferQueues,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.connectors.lmcache.messages import Commands, Found, Load, Lookup, Report, Store
from longshore.connectors.lmcache.options import check_library, read_options
from longshore.connectors.lmcache.storage import CHECKSUM_BYTES, Storage, StoredBlock
from longshore.connectors.offloading.groups import StoredGroups

NUM_LOOKUP_QUEUES: Final = 4
"""Lookups at a time: one that reads much from a slow store must not delay the others."""


class LMCacheWorker(WorkerConnector[Commands]):
    """Moves whole blocks, so it needs no layer hooks."""

    contract_version: ClassVar[int] = 1
    stores_within_step = False

    def __init__(self, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        check_library()
        self._worker_config = config
        self._options = read_options(config)
        self._groups = StoredGroups(config, None, connector="lmcache").groups
        self._storage: Storage | None = None
        self._stream: torch.cuda.Stream | None = None
        self._lock = threading.Lock()  # of what the threads write
        self._locked: dict[int, list[StoredBlock]] = {}  # by lookup id
        self._received: list[str] = []
        self._failed: list[int] = []
        self._found: list[Found] = []
        self._stored: list[int] = []

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        self._blocks = [group.blocks for group in kv_caches.groups]
        sizes = [group.size_bytes for group in kv_caches.groups]
        self._storage = Storage(self._options, self._worker_config, self._groups, sizes)
        if kv_caches.device.type == "cuda":
            self._stream = torch.cuda.Stream(kv_caches.device)  # type: ignore[no-untyped-call]  # of torch
        self._lookup_queues = [
            queues.open(f"lmcache-lookups-{index}", on_host=True)
            for index in range(NUM_LOOKUP_QUEUES)
        ]
        self._load_queue = queues.open("lmcache-loads", on_host=True)
        self._store_queue = queues.open("lmcache-stores", on_host=True)
        self._wake = queues.wake

    def bind_connector_metadata(self, data: bytes) -> Commands:
        return msgspec.msgpack.decode(data, type=Commands)

    def start_load_kv(self, metadata: Commands) -> None:
        for lookup in metadata.lookups:
            queue = self._lookup_queues[lookup.lookup_id % NUM_LOOKUP_QUEUES]
            queue.submit(partial(self._look_up, lookup), partial(self._lookup_ended, lookup))
        for load in metadata.loads:
            self._load_queue.submit(partial(self._load, load), partial(self._load_ended, load))
        for lookup_id in metadata.released:
            self._load_queue.submit(partial(self._release, lookup_id))
        for store in metadata.stores:
            self._store_queue.submit(partial(self._store, store), partial(self._store_ended, store))

    # On the threads of the queues

    def _look_up(self, lookup: Lookup) -> None:
        assert self._storage is not None
        found = self._storage.lock(lookup.groups)
        locked = [
            StoredBlock(group, hashes[index])
            for group, (hashes, indices) in enumerate(zip(lookup.groups, found, strict=True))
            for index in indices
        ]
        with self._lock:
            self._locked[lookup.lookup_id] = locked
            self._found.append(Found(lookup.lookup_id, found))

    def _lookup_ended(self, lookup: Lookup, event: QueueEvent) -> None:
        if event.error is not None:
            with self._lock:
                self._found.append(Found(lookup.lookup_id, [[] for _ in lookup.groups]))
        self._wake()

    def _load(self, load: Load) -> None:
        assert self._storage is not None
        with self._lock:
            locked = self._locked.pop(load.lookup_id, [])
        wanted = [StoredBlock(group, key_hash) for group, _, key_hash in load.blocks]
        failed: list[int] = []
        bad: list[StoredBlock] = []
        try:
            held = set(locked).intersection(wanted)
            contents = dict(zip(held, self._storage.read(list(held)), strict=True))
            with self._copies():
                for stored, (group, block_id, _) in zip(wanted, load.blocks, strict=True):
                    content = contents.get(stored)
                    if content is None:
                        failed.append(block_id)
                        bad.append(stored)
                    else:
                        self._blocks[group][block_id].copy_(content, non_blocking=True)
        finally:
            self._storage.release(locked)
        with self._lock:
            self._failed += failed
        self._storage.delete(bad)

    def _load_ended(self, load: Load, event: QueueEvent) -> None:
        with self._lock:
            self._received.append(load.request_id)
            if event.error is not None:
                self._failed += [block_id for _, block_id, _ in load.blocks]
        self._wake()

    def _release(self, lookup_id: int) -> None:
        assert self._storage is not None
        with self._lock:
            locked = self._locked.pop(lookup_id, [])
        self._storage.release(locked)

    def _store(self, store: Store) -> None:
        assert self._storage is not None
        for group, blocks in enumerate(self._blocks):
            ids = {key_hash: block_id for of, block_id, key_hash in store.blocks if of == group}
            if not ids:
                continue
            contents = self._storage.reserve(group, list(ids))
            with self._copies():
                for key_hash, content in contents.items():
                    target = content[:-CHECKSUM_BYTES]
                    target.copy_(blocks[ids[key_hash]], non_blocking=True)
            self._storage.publish(group, contents)

    def _store_ended(self, store: Store, event: QueueEvent) -> None:
        with self._lock:
            self._stored.append(store.hold_id)
        self._wake()

    @contextmanager
    def _copies(self) -> Iterator[None]:
        """Copies within have ended at its end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    # On the loop thread

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        with self._lock:
            received, self._received = self._received, []
            failed, self._failed = self._failed, []
        return FinishedTransfers(received=received, failed_block_ids=failed)

    def build_connector_worker_meta(self) -> bytes:
        with self._lock:
            report = Report(self._found, self._stored)
            self._found, self._stored = [], []
        return b"" if report == Report() else msgspec.msgpack.encode(report)

    def shutdown(self) -> None:
        if self._storage is None:
            return
        queues: list[TransferQueue] = [*self._lookup_queues, self._load_queue, self._store_queue]
        for queue in queues:
            queue.submit(lambda: None).wait()  # after everything that was submitted before
        self._storage.close()
