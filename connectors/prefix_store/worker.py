"""The worker half: calls the client of the store on threads."""

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import msgspec

from longshore.connectors.base import (
    FinishedTransfers,
    KVCaches,
    QueueEvent,
    TransferQueues,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.connectors.prefix_store.messages import (
    Commands,
    Found,
    Load,
    Lookup,
    Report,
    Store,
)
from longshore.connectors.prefix_store.store import PrefixStore, StoreError, TransferStuck

logger = logging.getLogger(__name__)


class PrefixStoreWorker(WorkerConnector[Commands]):
    contract_version: ClassVar[int] = 1
    stores_within_step = False

    def __init__(self, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        self._rank_config = config
        self._store: PrefixStore | None = None
        self._lock = threading.Lock()  # of what the threads write
        self._received: list[str] = []
        self._failed: list[int] = []
        self._found: list[Found] = []
        self._stored: list[int] = []
        self._stuck: TransferStuck | None = None

    def make_store(self, kv_caches: KVCaches) -> PrefixStore:
        """Connect to the store. Raises ConfigError."""
        raise NotImplementedError

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        self._store = self.make_store(kv_caches)
        self._lookup_queue = queues.open("prefix-lookups", on_host=True)
        self._load_queue = queues.open("prefix-loads", on_host=True)
        self._store_queue = queues.open("prefix-stores", on_host=True)
        self._wake = queues.wake

    def bind_connector_metadata(self, data: bytes) -> Commands:
        return msgspec.msgpack.decode(data, type=Commands)

    def start_load_kv(self, metadata: Commands) -> None:
        for lookup in metadata.lookups:
            self._lookup_queue.submit(
                partial(self._look_up, lookup), partial(self._lookup_ended, lookup)
            )
        for load in metadata.loads:
            self._load_queue.submit(partial(self._load, load), partial(self._load_ended, load))
        for lookup_id in metadata.released:
            self._load_queue.submit(partial(self._release, lookup_id), self._release_ended)
        for store in metadata.stores:
            self._store_queue.submit(
                partial(self._store_blocks, store), partial(self._store_ended, store)
            )

    # On the threads of the queues

    @property
    def _client(self) -> PrefixStore:
        assert self._store is not None
        return self._store

    def _look_up(self, lookup: Lookup) -> None:
        found = Found(lookup.lookup_id, self._client.lookup(lookup.lookup_id, lookup.prefix))
        with self._lock:
            self._found.append(found)

    def _lookup_ended(self, lookup: Lookup, event: QueueEvent) -> None:
        if event.error is not None:
            _log("lookup", event.error)
            with self._lock:
                self._found.append(Found(lookup.lookup_id, 0))
        self._wake()

    def _load(self, load: Load) -> None:
        failed = self._client.load(load.lookup_id, load.first_block, load.block_ids)
        with self._lock:
            self._failed += failed

    def _load_ended(self, load: Load, event: QueueEvent) -> None:
        with self._lock:
            if isinstance(event.error, TransferStuck):
                self._stuck = event.error
            else:
                self._received.append(load.request_id)
                self._failed += load.block_ids if event.error is not None else ()
        if event.error is not None:
            _log("load", event.error)
        self._wake()

    def _release(self, lookup_id: int) -> None:
        self._client.release(lookup_id)

    def _release_ended(self, event: QueueEvent) -> None:
        if event.error is not None:
            _log("release of a lookup", event.error)

    def _store_blocks(self, store: Store) -> None:
        self._client.store(store)

    def _store_ended(self, store: Store, event: QueueEvent) -> None:
        with self._lock:
            if isinstance(event.error, TransferStuck):
                self._stuck = event.error
            else:
                self._stored.append(store.hold_id)
        if event.error is not None:
            _log("store", event.error)
        self._wake()

    # On the loop thread

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        with self._lock:
            if self._stuck is not None:
                raise self._stuck
            received, self._received = self._received, []
            failed, self._failed = self._failed, []
        return FinishedTransfers(received=received, failed_block_ids=failed)

    def build_connector_worker_meta(self) -> bytes:
        with self._lock:
            report = Report(self._found, self._stored)
            self._found, self._stored = [], []
        return b"" if report == Report() else msgspec.msgpack.encode(report)

    def shutdown(self) -> None:
        if self._store is None:
            return
        for queue in (self._lookup_queue, self._load_queue, self._store_queue):
            queue.submit(lambda: None).wait()  # after everything that was submitted before
        self._store.close()


def _log(what: str, error: Exception) -> None:
    is_known = isinstance(error, StoreError | TransferStuck)
    logger.warning("%s failed: %s", what, error, exc_info=None if is_known else error)
