"""The example connector with one bug each, in its scheduler half or in its worker half."""

import time
from collections.abc import Sequence
from typing import ClassVar

from longshore.connectors.base import (
    FinishAction,
    FinishedTransfers,
    Match,
    Matched,
    RequestView,
    StepView,
    WorkerConnectorConfig,
)
from longshore.connectors.example.scheduler import Commands, ExampleConnector, Load, Store
from longshore.connectors.example.worker import ExampleWorker
from longshore.protocol.arrays import Int32Array

HERE = "tests.testing.buggy_connectors"


class FindsTooMuch(ExampleConnector):
    """Loads one block more than it has, if the request has more."""

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        match = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if isinstance(match, Matched) and match.num_tokens:
            return Matched(match.num_tokens + self.config.block_size, is_async=True)
        return match


class HoldsNothing(ExampleConnector):
    """Releases blocks when it begins to store them, which takes some steps."""

    worker_half: ClassVar[str] = f"{HERE}:SlowWorker"

    def build_connector_meta(self, step: StepView) -> bytes:
        data = super().build_connector_meta(step)
        for hold_id in set(self._storing) - self._released:
            self._released.add(hold_id)
            self._holds.release(hold_id)
        return data

    def _begin(self) -> None:
        super()._begin()
        self._released: set[int] = set()

    def _store_ended(self, hold_id: int, rank: int) -> None:
        self._add(self._storing.pop(hold_id), rank)


class SlowWorker(ExampleWorker):
    def _store(self, store: Store) -> None:
        time.sleep(0.02)
        super()._store(store)


class NeverReleases(ExampleConnector):
    """Holds what it has stored for ever."""

    def _store_ended(self, hold_id: int, rank: int) -> None:
        self._add(self._storing[hold_id], rank)


class RemembersRequests(ExampleConnector):
    """Does not forget requests that end."""

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        return FinishAction()


class AlwaysHasWork(ExampleConnector):
    """Makes an idle engine send plans for ever."""

    @property
    def has_pending_work(self) -> bool:
        return True


class MixesUpBlocks(ExampleConnector):
    """Its worker half loads the blocks of a request in the reverse order."""

    worker_half: ClassVar[str] = f"{HERE}:ReversingWorker"


class ReversingWorker(ExampleWorker):
    def _load(self, load: Load) -> None:
        super()._load(Load(load.request_id, load.block_ids[::-1], load.block_hashes))


class ReportsEarly(ExampleConnector):
    """Its worker half reports loads when they begin."""

    worker_half: ClassVar[str] = f"{HERE}:HastyWorker"


class HastyWorker(ExampleWorker):
    def __init__(self, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        self._begun: list[str] = []

    def start_load_kv(self, metadata: Commands) -> None:
        super().start_load_kv(metadata)
        self._begun += [load.request_id for load in metadata.loads]
        self._wake()

    def _load(self, load: Load) -> None:
        time.sleep(0.02)
        super()._load(load)

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        super().get_finished(finished_request_ids)
        received, self._begun = self._begun, []
        return FinishedTransfers(received=received)


class HidesFailures(ExampleConnector):
    """Its worker half cannot read some blocks, and says nothing."""

    worker_half: ClassVar[str] = f"{HERE}:SilentWorker"


class SilentWorker(ExampleWorker):
    def _read(self, block_hash: bytes) -> bytearray | None:
        return None if block_hash[0] % 4 == 0 else super()._read(block_hash)

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        received = super().get_finished(finished_request_ids).received
        return FinishedTransfers(received=received)


class LosesLoads(ExampleConnector):
    """Its worker half reports some loads never."""

    worker_half: ClassVar[str] = f"{HERE}:ForgetfulWorker"


class ForgetfulWorker(ExampleWorker):
    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        received = super().get_finished(finished_request_ids).received
        return FinishedTransfers(received=[name for name in received if not name.endswith("3")])
