"""The worker half: calls the client of the store on threads."""

from collections.abc import Sequence
from typing import ClassVar

from longshore.connectors.base.lookup_worker import LookupWorker
from longshore.connectors.base.prefix_store.messages import (
    Commands,
    Found,
    Load,
    Lookup,
    Store,
)
from longshore.connectors.base.prefix_store.store import PrefixStore
from longshore.connectors.base.worker_half import KVCaches


class PrefixStoreWorker(LookupWorker[Lookup, Load, Store]):
    commands_type = Commands
    queue_prefix: ClassVar[str] = "prefix"

    _store: PrefixStore

    def make_store(self, kv_caches: KVCaches) -> PrefixStore:
        """Connect to the store. Raises ConfigError."""
        raise NotImplementedError

    def open_store(self, kv_caches: KVCaches) -> None:
        self._store = self.make_store(kv_caches)

    def close_store(self) -> None:
        self._store.close()

    def look_up(self, lookup: Lookup) -> Found:
        return Found(lookup.lookup_id, self._store.lookup(lookup.lookup_id, lookup.prefix))

    def nothing_found(self, lookup: Lookup) -> Found:
        return Found(lookup.lookup_id, 0)

    def load(self, load: Load) -> Sequence[int]:
        return self._store.load(load.lookup_id, load.first_block, load.block_ids)

    def blocks_of(self, load: Load) -> Sequence[int]:
        return load.block_ids

    def release(self, lookup_id: int) -> None:
        self._store.release(lookup_id)

    def store(self, store: Store) -> None:
        self._store.store(store)
