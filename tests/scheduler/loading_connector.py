"""A connector whose background loads end when the test says so."""

from collections.abc import Mapping
from dataclasses import dataclass

from longshore.connectors.base import AskLater, Match, Matched, RequestView, SchedulerConnector
from longshore.protocol.arrays import Int32Array
from longshore.protocol.outputs import TransferReport
from tests.scheduler.driver import Driver


@dataclass
class Load:
    """Tokens [first, last) of a request, to be put into its blocks: a table per group."""

    token_ids: list[int]
    tables: list[list[int]]
    first: int
    last: int


class LoadingConnector(SchedulerConnector):
    """Has the first tokens of some requests.

    stored:  how many, by request id; None does not know yet.
    loading: loads under way, also those that nobody waits for any more.
    """

    def __init__(self, stored: Mapping[str, int | None]) -> None:
        super().__init__()
        self.stored = dict(stored)
        self.loading: dict[str, Load] = {}
        self._num_local: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        stored = self.stored.get(request.request_id, 0)
        if stored is None:
            return AskLater()
        self._num_local[request.request_id] = num_computed_tokens
        return Matched(max(stored - num_computed_tokens, 0), is_async=True)

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            first = self._num_local[request.request_id]
            tables = [ids.tolist() for ids in block_ids]
            self.loading[request.request_id] = Load(
                request.token_ids.tolist(), tables, first, first + num_external_tokens
            )

    def on_new_epoch(self, epoch: int) -> None:
        self.loading.clear()

    def end_load(self, driver: Driver, request_id: str, *, epoch: int = 1) -> None:
        """The worker has written it all, and says so."""
        load = self.loading.pop(request_id)
        driver.write_kv(load.tables, load.token_ids, load.first, load.last)
        report = TransferReport(epoch, 0, finished_receiving=(request_id,))
        driver.scheduler.update_from_transfers(report, driver.now)
        driver.check_blocks()
        driver.collect()
