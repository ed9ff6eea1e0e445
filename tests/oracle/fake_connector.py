"""A connector without memory: what it has of a request, and when transfers end, follows from a
seed, the request's id and how often it was asked."""

from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from longshore.connectors.base import (
    AskLater,
    FinishAction,
    Match,
    Matched,
    RequestView,
    SchedulerConnector,
    StepView,
)
from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.outputs import TransferReport


class Begun(NamedTuple):
    """A load that was begun: positions [first, last) of a request, into its blocks."""

    request_id: str
    block_ids: tuple[int, ...]
    first: int
    last: int
    failed_block_ids: tuple[int, ...]


@dataclass
class RankReports:
    """What ranks will say, by (turn, rank)."""

    sending: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    receiving: dict[tuple[int, int], list[Begun]] = field(default_factory=dict)


class FakeConnector(SchedulerConnector):
    """Whoever drives the scheduler sets `turn`, and carries out what it finds here.

    log:        hooks in which the scheduler decided something, since the last look.
    sync_loads: begun for the next plan.
    async_loads: begun since the last look.
    fails:      whether loads may fail.
    """

    def __init__(
        self, seed: int, *, num_ranks: int, block_size: int, fails: bool, sync_fails: bool
    ) -> None:
        self.turn = 0
        self.log: list[tuple[str, ...]] = []
        self.sync_loads: list[Begun] = []
        self.async_loads: list[Begun] = []
        self._seed = seed
        self._num_ranks = num_ranks
        self._block_size = block_size
        self._fails = fails
        self._sync_fails = sync_fails
        self._num_asked: dict[str, int] = {}
        self._offers: dict[str, tuple[int, bool]] = {}  # local tokens, is_async
        self._live: set[str] = set()
        self._has_news = False
        self._reports = RankReports()

    def _random(self, kind: str, request_id: str) -> Random:
        asked = self._num_asked.get(request_id, 0)
        return Random(f"{self._seed}/{kind}/{request_id}/{asked}")

    def on_new_request(self, request: RequestView) -> None:
        assert request.request_id not in self._live, "reported twice"
        self._live.add(request.request_id)

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        request_id = request.request_id
        assert request_id in self._live
        self._num_asked[request_id] = self._num_asked.get(request_id, 0) + 1
        self.log.append(("asked", request_id, repr(num_computed_tokens)))
        rng = self._random("match", request_id)
        kind = rng.choice(("nothing", "nothing", "later", "sync", "async", "async"))
        if kind == "later" and self._num_asked[request_id] % 4:
            return AskLater()
        if kind in ("nothing", "later"):
            return Matched(0)
        self._offers[request_id] = (num_computed_tokens, kind == "async")
        longest = request.num_tokens - num_computed_tokens + rng.choice((0, 0, 5))
        num_tokens = rng.choice((longest, rng.randrange(longest + 1)))
        return Matched(num_tokens, is_async=kind == "async")

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        if num_external_tokens == 0:
            return
        request_id = request.request_id
        first, is_async = self._offers.pop(request_id)
        rng = self._random("load", request_id)
        table = tuple(block_ids[0].tolist())
        last = first + num_external_tokens
        targets = table[first // self._block_size : -(-last // self._block_size)]
        may_fail = self._fails if is_async else self._sync_fails
        failed = tuple(id_ for id_ in targets if may_fail and rng.random() < 0.1)
        begun = Begun(request_id, table, first, last, failed)
        self.log.append(("load", *map(repr, begun)))
        self._has_news = True
        if not is_async:
            self.sync_loads.append(begun)
            return
        self.async_loads.append(begun)
        longest = rng.choice((1, 5, 40))
        for rank in range(self._num_ranks):
            when = (self.turn + 1 + rng.randrange(longest), rank)
            self._reports.receiving.setdefault(when, []).append(begun)

    def build_connector_meta(self, step: StepView) -> bytes:
        self._has_news = False
        return b""

    @property
    def has_pending_work(self) -> bool:
        return self._has_news

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        request_id = request.request_id
        self._live.remove(request_id)
        self.log.append(("finished", request_id, repr(block_ids[0].tolist() if block_ids else [])))
        rng = self._random("send", request_id)
        if rng.random() < 0.7 or not (block_ids and len(block_ids[0])):
            return FinishAction()
        longest = rng.choice((1, 5, 40))
        for rank in range(self._num_ranks):
            when = (self.turn + 1 + rng.randrange(longest), rank)
            self._reports.sending.setdefault(when, []).append(request_id)
        return FinishAction(delay_free=True)

    def load_abandoned(self, request_id: str) -> None:
        self.log.append(("abandoned", request_id))

    def on_new_epoch(self, epoch: int) -> None:
        self._reports = RankReports()
        self.sync_loads, self.async_loads = [], []

    def take_reports(self, epoch: int) -> list[tuple[TransferReport, list[Begun]]]:
        """This turn's reports, each with the loads that it reports; now and then an id is said
        twice, or nobody knows it."""
        reports: list[tuple[TransferReport, list[Begun]]] = []
        for rank in range(self._num_ranks):
            sent = self._reports.sending.pop((self.turn, rank), [])
            received = self._reports.receiving.pop((self.turn, rank), [])
            if not sent and not received:
                continue
            ids = [begun.request_id for begun in received]
            failed = [id_ for begun in received for id_ in begun.failed_block_ids]
            noise = Random(f"{self._seed}/{self.turn}/{rank}").random()
            report = TransferReport(
                epoch=epoch,
                rank=rank,
                finished_sending=(*sent, *(["nobody"] if noise < 0.2 else [])),
                finished_receiving=(*ids, *(ids if noise < 0.1 else [])),
                failed_block_ids=int32_array(failed),
            )
            reports.append((report, received))
        return reports

    @property
    def is_busy(self) -> bool:
        """Some rank will still report something."""
        return bool(self._reports.sending or self._reports.receiving)

    def is_busy_with(self, request_id: str) -> bool:
        """Some rank will still report this request, which may have ended."""
        sent = [id_ for ids in self._reports.sending.values() for id_ in ids]
        received = [load.request_id for loads in self._reports.receiving.values() for load in loads]
        return request_id in (*sent, *received)

    def take_log(self) -> tuple[tuple[str, ...], ...]:
        """What was decided since the last call, sorted: the order of a turn's ends means
        nothing."""
        log, self.log = tuple(sorted(self.log)), []
        return log
