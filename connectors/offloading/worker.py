"""The worker half of the offloading connector: gives jobs to the spec's handlers and reports their
ends."""

import threading
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import msgspec

from longshore.connectors.base import (
    FinishedTransfers,
    KVCaches,
    TransferQueues,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.connectors.offloading.messages import Commands, Ended, LoadJob, Report
from longshore.connectors.offloading.options import read_options
from longshore.connectors.offloading.spec import OffloadingHandlers, load_spec
from longshore.protocol.statistics import TransferOperation


class OffloadingWorker(WorkerConnector[Commands]):
    """Moves whole blocks, so it needs no layer hooks: loads are asynchronous, and stores follow the
    answer of the step that computed their blocks."""

    contract_version: ClassVar[int] = 2
    stores_within_step = False

    def __init__(self, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        self._worker_config = config
        self._spec = load_spec(config, read_options(config.options))
        self._factor = self._spec.groups.factor
        self._handlers: OffloadingHandlers | None = None
        self._lock = threading.Lock()  # of what the handlers' threads report
        self._received: list[str] = []
        self._failed_blocks: list[int] = []
        self._failed_loads: list[tuple[str, list[int]]] = []
        self._failed_of_report: list[tuple[str, list[int]]] = []
        self._ended: list[Ended] = []

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        self._wake = queues.wake
        self._handlers = self._spec.make_handlers(self._worker_config, kv_caches, queues)

    def bind_connector_metadata(self, data: bytes) -> Commands:
        return msgspec.msgpack.decode(data, type=Commands)

    def start_load_kv(self, metadata: Commands) -> None:
        assert self._handlers is not None
        for load in metadata.loads:
            self._handlers.load(load, partial(self._load_ended, load))
        for store in metadata.stores:
            self._handlers.store(store, partial(self._job_ended, store.job_id))
        for job in metadata.tier_jobs:
            self._handlers.run(job, partial(self._job_ended, job.job_id))

    # On threads of the handlers

    def _load_ended(self, load: LoadJob, failed: Sequence[int]) -> None:
        ids = load.blocks.ids(self._factor)[list(failed)].ravel() if failed else ()
        with self._lock:
            self._received.append(load.request_id)
            self._failed_blocks += [*(int(block_id) for block_id in ids if block_id), *load.missing]
            if failed:
                self._failed_loads.append((load.request_id, list(failed)))
        self._wake()

    def _job_ended(self, job_id: int, failed: Sequence[int]) -> None:
        with self._lock:
            self._ended.append(Ended(job_id, list(failed)))
        self._wake()

    # On the loop thread

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        with self._lock:
            ended = FinishedTransfers(received=self._received, failed_block_ids=self._failed_blocks)
            self._received, self._failed_blocks = [], []
            self._failed_of_report, self._failed_loads = self._failed_loads, []
        return ended

    def build_connector_worker_meta(self) -> bytes:
        assert self._handlers is not None
        messages = self._handlers.take_messages()
        with self._lock:
            ended, self._ended = self._ended, []
        failed, self._failed_of_report = self._failed_of_report, []
        if not (ended or failed or messages):
            return b""
        return msgspec.msgpack.encode(Report(ended, failed, messages))

    def get_kv_connector_stats(self) -> Sequence[TransferOperation]:
        assert self._handlers is not None
        return self._handlers.take_operations()

    def shutdown(self) -> None:
        if self._handlers is not None:
            self._handlers.close()
