"""The worker half to `LookupConnector`: lookups, loads and stores run on threads, because they
block; what they found and did is collected for the next report."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Generic

import msgspec

from longshore.connectors.base.lookups import (
    LoadT,
    LookupCommands,
    LookupReport,
    LookupT,
    StoreT,
)
from longshore.connectors.base.worker_half import (
    FinishedTransfers,
    KVCaches,
    QueueEvent,
    TransferQueue,
    TransferQueues,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.protocol.errors import LongshoreError

logger = logging.getLogger(__name__)


class TransferStuck(LongshoreError):
    """What copies blocks cannot be ended and may still use them; only a new process ends it."""


class LookupWorker(
    WorkerConnector[LookupCommands[LookupT, LoadT, StoreT]], ABC, Generic[LookupT, LoadT, StoreT]
):
    """Moves whole blocks, so it needs no layer hooks.

    commands_type:     what the scheduler half sends, a LookupCommands. Its lookups have a
                       `lookup_id`, its loads a `request_id`, its stores a `hold_id`.
    queue_prefix:      of the names of the threads.
    num_lookup_queues: lookups at a time.
    """

    contract_version: ClassVar[int] = 2
    stores_within_step = False
    commands_type: ClassVar[Any]
    queue_prefix: ClassVar[str]
    num_lookup_queues: ClassVar[int] = 1

    def __init__(self, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        self._is_open = False
        self._lock = threading.Lock()  # of what the threads write
        self._received: list[str] = []
        self._failed: list[int] = []
        self._found: list[Any] = []
        self._stored: list[int] = []
        self._stuck: TransferStuck | None = None

    # What differs between connectors

    @abstractmethod
    def open_store(self, kv_caches: KVCaches) -> None:
        """Connect to what keeps the blocks. Raises ConfigError."""

    @abstractmethod
    def close_store(self) -> None:
        """The last call; all others have returned."""

    @abstractmethod
    def look_up(self, lookup: LookupT) -> Any:
        """What is stored, for the report. Called on a thread, as all that follow."""

    @abstractmethod
    def nothing_found(self, lookup: LookupT) -> Any:
        """The answer to a lookup that has failed."""

    @abstractmethod
    def load(self, load: LoadT) -> Sequence[int]:
        """Fill blocks, and release the lookup; nothing is written any more when this returns or
        raises, unless it raises TransferStuck. Returns the blocks that were not filled."""

    @abstractmethod
    def blocks_of(self, load: LoadT) -> Sequence[int]:
        """All blocks that a load fills."""

    @abstractmethod
    def release(self, lookup_id: int) -> None:
        """End a lookup without a load."""

    @abstractmethod
    def store(self, store: StoreT) -> None:
        """Store blocks, which are not read any more when this returns or raises, unless it raises
        TransferStuck."""

    # On the loop thread

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        self.open_store(kv_caches)
        self._is_open = True
        prefix = self.queue_prefix
        self._lookup_queues = [
            queues.open(f"{prefix}-lookups-{index}", on_host=True)
            for index in range(self.num_lookup_queues)
        ]
        self._load_queue = queues.open(f"{prefix}-loads", on_host=True)
        self._store_queue = queues.open(f"{prefix}-stores", on_host=True)
        self._wake = queues.wake

    def bind_connector_metadata(self, data: bytes) -> LookupCommands[LookupT, LoadT, StoreT]:
        commands: LookupCommands[LookupT, LoadT, StoreT] = msgspec.msgpack.decode(
            data, type=self.commands_type
        )
        return commands

    def start_load_kv(self, metadata: LookupCommands[Any, Any, Any]) -> None:
        for lookup in metadata.lookups:
            queue = self._lookup_queues[lookup.lookup_id % self.num_lookup_queues]
            queue.submit(partial(self._look_up, lookup), partial(self._lookup_ended, lookup))
        for load in metadata.loads:
            self._load_queue.submit(partial(self._load, load), partial(self._load_ended, load))
        for lookup_id in metadata.released:
            self._load_queue.submit(partial(self.release, lookup_id), self._release_ended)
        for store in metadata.stores:
            self._store_queue.submit(partial(self.store, store), partial(self._store_ended, store))

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        with self._lock:
            if self._stuck is not None:
                raise self._stuck
            received, self._received = self._received, []
            failed, self._failed = self._failed, []
        return FinishedTransfers(received=received, failed_block_ids=failed)

    def build_connector_worker_meta(self) -> bytes:
        with self._lock:
            report = LookupReport(self._found, self._stored)
            self._found, self._stored = [], []
        return b"" if report == LookupReport() else msgspec.msgpack.encode(report)

    def shutdown(self) -> None:
        if not self._is_open:
            return
        queues: list[TransferQueue] = [*self._lookup_queues, self._load_queue, self._store_queue]
        for queue in queues:
            queue.submit(lambda: None).wait()  # after everything that was submitted before
        self.close_store()

    # On the threads of the queues

    def _look_up(self, lookup: LookupT) -> None:
        found = self.look_up(lookup)
        with self._lock:
            self._found.append(found)

    def _lookup_ended(self, lookup: LookupT, event: QueueEvent) -> None:
        if event.error is not None:
            _log("lookup", event.error)
            with self._lock:
                self._found.append(self.nothing_found(lookup))
        self._wake()

    def _load(self, load: LoadT) -> None:
        failed = self.load(load)
        with self._lock:
            self._failed += failed

    def _load_ended(self, load: Any, event: QueueEvent) -> None:
        with self._lock:
            if isinstance(event.error, TransferStuck):
                self._stuck = event.error
            else:
                self._received.append(load.request_id)
                self._failed += self.blocks_of(load) if event.error is not None else ()
        if event.error is not None:
            _log("load", event.error)
        self._wake()

    def _release_ended(self, event: QueueEvent) -> None:
        if event.error is not None:
            _log("release of a lookup", event.error)

    def _store_ended(self, store: Any, event: QueueEvent) -> None:
        with self._lock:
            if isinstance(event.error, TransferStuck):
                self._stuck = event.error
            else:
                self._stored.append(store.hold_id)
        if event.error is not None:
            _log("store", event.error)
        self._wake()


def _log(what: str, error: Exception) -> None:
    """Other errors than those are logged by the queue."""
    if isinstance(error, LongshoreError):
        logger.warning("%s failed: %s", what, error)
