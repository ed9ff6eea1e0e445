"""The worker half: moves this rank's share of each block between the KV cache and LMCache.

All of it runs on threads, because LMCache's calls block. On CUDA they use a stream of their own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Final

import torch

from longshore.connectors.base import KVCaches, WorkerConnectorConfig
from longshore.connectors.base.groups import StoredGroups
from longshore.connectors.base.lookup_worker import LookupWorker
from longshore.connectors.lmcache.messages import Commands, Found, Load, Lookup, Store
from longshore.connectors.lmcache.options import check_library, read_options
from longshore.connectors.lmcache.storage import CHECKSUM_BYTES, Storage, StoredBlock

NUM_LOOKUP_QUEUES: Final = 4
"""Lookups at a time: one that reads much from a slow store must not delay the others."""


class LMCacheWorker(LookupWorker[Lookup, Load, Store]):
    commands_type = Commands
    queue_prefix: ClassVar[str] = "lmcache"
    num_lookup_queues: ClassVar[int] = NUM_LOOKUP_QUEUES

    def __init__(self, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        check_library()
        self._options = read_options(config)
        self._groups = StoredGroups(config, None, connector="lmcache").groups
        self._storage: Storage
        self._stream: torch.cuda.Stream | None = None
        self._locked: dict[int, list[StoredBlock]] = {}  # by lookup id

    def open_store(self, kv_caches: KVCaches) -> None:
        self._blocks = [group.blocks for group in kv_caches.groups]
        sizes = [group.size_bytes for group in kv_caches.groups]
        self._storage = Storage(self._options, self.config, self._groups, sizes)
        if kv_caches.device.type == "cuda":
            self._stream = torch.cuda.Stream(kv_caches.device)  # type: ignore[no-untyped-call]  # of torch

    def close_store(self) -> None:
        self._storage.close()

    def look_up(self, lookup: Lookup) -> Found:
        found = self._storage.lock(lookup.groups)
        locked = [
            StoredBlock(group, hashes[index])
            for group, (hashes, indices) in enumerate(zip(lookup.groups, found, strict=True))
            for index in indices
        ]
        with self._lock:
            self._locked[lookup.lookup_id] = locked
        return Found(lookup.lookup_id, found)

    def nothing_found(self, lookup: Lookup) -> Found:
        return Found(lookup.lookup_id, [[] for _ in lookup.groups])

    def load(self, load: Load) -> Sequence[int]:
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
        self._storage.delete(bad)
        return failed

    def blocks_of(self, load: Load) -> Sequence[int]:
        return [block_id for _, block_id, _ in load.blocks]

    def release(self, lookup_id: int) -> None:
        with self._lock:
            locked = self._locked.pop(lookup_id, [])
        self._storage.release(locked)

    def store(self, store: Store) -> None:
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

    @contextmanager
    def _copies(self) -> Iterator[None]:
        """Copies within have ended at its end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()
