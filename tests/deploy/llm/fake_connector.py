"""A connector that stores nothing, reports one background load late, and raises where told to."""

from collections.abc import Sequence
from typing import Any, ClassVar

from longshore.connectors.base import (
    FinishedTransfers,
    Match,
    Matched,
    RequestView,
    SchedulerConnector,
    StepView,
    WorkerConnector,
)
from longshore.protocol.arrays import Int32Array


class FakeConnector(SchedulerConnector):
    """With the option `loads`, a background load of one block for each request. raising: name of a
    hook. num_shutdowns: calls of `shutdown` since the start of the test."""

    worker_half = "tests.deploy.llm.fake_connector:FakeWorker"
    num_shutdowns: ClassVar[int] = 0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._loads: list[str] = []

    def _called(self, hook: str) -> None:
        if self.config.options.get("raising") == hook:
            raise RuntimeError("it does not work")

    def on_new_request(self, request: RequestView) -> None:
        self._called("on_new_request")

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return Matched(self.config.block_size if "loads" in self.config.options else 0, True)

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        self._loads.append(request.request_id)

    def build_connector_meta(self, step: StepView) -> bytes:
        loads, self._loads = self._loads, []
        return ",".join(loads).encode()

    def load_abandoned(self, request_id: str) -> None:
        self._called("load_abandoned")

    def shutdown(self) -> None:
        FakeConnector.num_shutdowns += 1


class FakeWorker(WorkerConnector[list[str]]):
    """Reports that each load has failed, some polls after it began. It never wakes the worker."""

    poll_interval_s = 0.001

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._loading: list[str] = []
        self._num_polls_left = 0

    def bind_connector_metadata(self, data: bytes) -> list[str]:
        return data.decode().split(",")

    def start_load_kv(self, metadata: list[str]) -> None:
        self._loading += metadata
        self._num_polls_left = 5

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        self._num_polls_left -= 1
        if not self._loading or self._num_polls_left > 0:
            return FinishedTransfers()
        received, self._loading = self._loading, []
        return FinishedTransfers(received=received, failed_block_ids=range(1, 40))
