"""Connectors of tests, which the scheduler process imports."""

import logging
from typing import ClassVar

from longshore.connectors.base import (
    AskLater,
    FinishAction,
    KVCaches,
    Match,
    Matched,
    RequestView,
    SchedulerConnector,
    StepView,
    TransferQueues,
    WorkerConnector,
)
from longshore.protocol.arrays import EMPTY_INT32, Int32Array
from longshore.protocol.events import BlockStored, KVEvent


class ClosingTier(SchedulerConnector):
    """Reports one more block in host memory each time it is asked for events."""

    num_taken = 0

    def take_events(self) -> list[KVEvent]:
        assert self.config.publishes_events
        self.num_taken += 1
        name = b"taken %d times" % self.num_taken
        return [BlockStored(name, None, EMPTY_INT32, 0, medium="CPU")]


class LateStores(SchedulerConnector):
    """Has work for 20 plans when a request has ended. At the end, it logs for how many plans it
    still has some."""

    num_left = 0

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        self.num_left = 20
        return FinishAction()

    @property
    def has_pending_work(self) -> bool:
        return self.num_left > 0

    def build_connector_meta(self, step: StepView) -> bytes:
        self.num_left = max(self.num_left - 1, 0)
        return b""

    def shutdown(self) -> None:
        logging.getLogger(__name__).warning("%d plans are left", self.num_left)


class SilentWorker(WorkerConnector[bytes]):
    """Does nothing, and never reports a transfer."""

    def bind_connector_metadata(self, data: bytes) -> bytes:
        return data


class LateLibraryWorker(SilentWorker):
    """Imports a library when it begins."""

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        import tests.integration.late_library  # noqa: F401  # it prints that it is imported


class LateLibrary(SchedulerConnector):
    """Loads and stores nothing."""

    worker_half: ClassVar[str] = f"{__name__}:LateLibraryWorker"

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return Matched(0)


class NeverKnows(SchedulerConnector):
    """Never says what it can load."""

    worker_half: ClassVar[str] = f"{__name__}:SilentWorker"

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return AskLater()


class NeverLoads(SchedulerConnector):
    """Finds a block of every request, and never reports that it is loaded."""

    worker_half: ClassVar[str] = f"{__name__}:SilentWorker"

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return Matched(self.config.block_size - num_computed_tokens, is_async=True)
