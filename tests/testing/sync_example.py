"""The example connector with loads within the step: the first layer waits for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from longshore.connectors.base import (
    FinishedTransfers,
    KVCaches,
    Match,
    Matched,
    QueueEvent,
    RequestView,
    TransferQueues,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.connectors.example.scheduler import Commands, ExampleConnector, Load
from longshore.connectors.example.worker import ExampleWorker


class SyncExample(ExampleConnector):
    worker_half: ClassVar[str] = "tests.testing.sync_example:SyncWorker"

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        match = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return Matched(match.num_tokens) if isinstance(match, Matched) else match


@dataclass
class Step:
    """The commands of one plan. failed: blocks that its loads did not fill."""

    commands: Commands
    loads: list[QueueEvent] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)


class FileReader(ExampleWorker):
    """The worker half of the example, whose loads belong to steps."""

    def load_of_step(self, load: Load, failed: list[int]) -> None:
        self._load(load)
        with self._lock:
            failed += self._failed
            self._failed.clear()

    def submit_load(self, load: Load, failed: list[int]) -> QueueEvent:
        def ended(event: QueueEvent) -> None:
            if event.error is not None:
                failed.extend(load.block_ids)

        return self._load_queue.submit(partial(self.load_of_step, load, failed), ended)


class SyncWorker(WorkerConnector[Step]):
    has_layer_hooks = True

    def __init__(self, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        self._files = FileReader(config)

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        self._files.register_kv_caches(kv_caches, queues)

    def bind_connector_metadata(self, data: bytes) -> Step:
        return Step(self._files.bind_connector_metadata(data))

    def start_load_kv(self, metadata: Step) -> None:
        loads = metadata.commands.loads
        metadata.loads += [self._files.submit_load(load, metadata.failed) for load in loads]
        self._files.start_load_kv(Commands(stores=metadata.commands.stores))

    def wait_for_layer_load(self, metadata: Step, layer_name: str) -> None:
        for load in metadata.loads:
            load.wait_on_queue()

    def wait_for_save(self, metadata: Step) -> None:
        for load in metadata.loads:  # a stage may have no layer, and a plan no tokens
            load.wait()

    def get_block_ids_with_load_errors(self, metadata: Step) -> Sequence[int]:
        return metadata.failed

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        return self._files.get_finished(finished_request_ids)

    def build_connector_worker_meta(self) -> bytes:
        return self._files.build_connector_worker_meta()
