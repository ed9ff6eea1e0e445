"""A connector without memory: what it has of a request, and when transfers end, follows from a
seed, the request's id and how often it was asked."""

from collections import defaultdict
from random import Random

from longshore.connectors.base import (
    AskLater,
    FinishAction,
    Match,
    Matched,
    RequestView,
    StepView,
)
from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.outputs import TransferReport
from tests.harness.connector import AdversarialConnector
from tests.harness.transfers import Load


class FakeConnector(AdversarialConnector):
    """The driver of the scheduler sets `turn`, and carries out what it finds here.

    log:        hooks in which the scheduler decided something, since the last look.
    sync_loads: begun for the next plan.
    failed:     blocks that the latest load of a request does not fill.
    fails:      whether loads may fail.
    """

    def __init__(
        self, seed: int, *, num_ranks: int, block_size: int, fails: bool, sync_fails: bool
    ) -> None:
        super().__init__(match=self._draw_match, depart=self._draw_departure)
        self.turn = 0
        self.log: list[tuple[str, ...]] = []
        self.sync_loads: list[Load] = []
        self.failed: dict[str, tuple[int, ...]] = {}
        self._seed = seed
        self._num_ranks = num_ranks
        self._block_size = block_size
        self._fails = fails
        self._sync_fails = sync_fails
        self._has_news = False
        # What ranks will report, by (turn, rank).
        self._sends: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        self._loads: defaultdict[tuple[int, int], list[Load]] = defaultdict(list)

    def _random(self, kind: str, request_id: str) -> Random:
        return Random(f"{self._seed}/{kind}/{request_id}/{self.asked[request_id]}")

    def _draw_match(self, request: RequestView, num_computed_tokens: int) -> Match:
        request_id = request.request_id
        self.log.append(("asked", request_id, repr(num_computed_tokens)))
        rng = self._random("match", request_id)
        kind = rng.choice(("nothing", "nothing", "later", "sync", "async", "async"))
        if kind == "later" and self.asked[request_id] % 4:
            return AskLater()
        if kind in ("nothing", "later"):
            return Matched(0)
        longest = request.num_tokens - num_computed_tokens + rng.choice((0, 0, 5))
        num_tokens = rng.choice((longest, rng.randrange(longest + 1)))
        return Matched(num_tokens, is_async=kind == "async")

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        if num_external_tokens == 0:
            return
        request_id, load = request.request_id, self.loads_begun[-1]
        rng = self._random("load", request_id)
        may_fail = self._fails if load.is_async else self._sync_fails
        failed = tuple(id_ for id_ in load.block_ids[0] if may_fail and rng.random() < 0.1)
        self.failed[request_id] = failed
        table = tuple(block_ids[0].tolist())
        self.log.append(("load", *map(repr, (request_id, table, load.first, load.last, failed))))
        self._has_news = True
        if not load.is_async:
            self.sync_loads.append(load)
            return
        for when in self._draw_ends(rng):
            self._loads[when].append(load)

    def _draw_ends(self, rng: Random) -> list[tuple[int, int]]:
        """For each rank the turn in which it reports a transfer."""
        longest = rng.choice((1, 5, 40))
        ranks = range(self._num_ranks)
        return [(self.turn + 1 + rng.randrange(longest), rank) for rank in ranks]

    def build_connector_meta(self, step: StepView) -> bytes:
        self._has_news = False
        return super().build_connector_meta(step)

    @property
    def has_pending_work(self) -> bool:
        return self._has_news

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        held = repr(block_ids[0].tolist() if block_ids else [])
        self.log.append(("finished", request.request_id, held))
        action = super().request_finished(request, block_ids)
        if not action.delay_free:
            return action
        rng = self._random("send", request.request_id)
        rng.random()  # drawn for the departure
        for when in self._draw_ends(rng):
            self._sends[when].append(request.request_id)
        return action

    def _draw_departure(self, request: RequestView) -> FinishAction:
        return FinishAction(self._random("send", request.request_id).random() >= 0.7)

    def load_abandoned(self, request_id: str) -> None:
        super().load_abandoned(request_id)
        self.log.append(("abandoned", request_id))

    def on_new_epoch(self, epoch: int) -> None:
        super().on_new_epoch(epoch)
        self._sends.clear()
        self._loads.clear()
        self.sync_loads = []

    def take_reports(self, epoch: int) -> list[TransferReport]:
        """This turn's reports; some repeat an id, or have an unknown one."""
        reports: list[TransferReport] = []
        for rank in range(self._num_ranks):
            sent = self._sends.pop((self.turn, rank), [])
            received = [load.request_id for load in self._loads.pop((self.turn, rank), [])]
            if not sent and not received:
                continue
            noise = Random(f"{self._seed}/{self.turn}/{rank}").random()
            reports.append(
                TransferReport(
                    epoch=epoch,
                    rank=rank,
                    finished_sending=(*sent, *(["unknown"] if noise < 0.2 else [])),
                    finished_receiving=(*received, *(received if noise < 0.1 else [])),
                    failed_block_ids=int32_array(
                        [block_id for id_ in received for block_id in self.failed[id_]]
                    ),
                )
            )
        return reports

    @property
    def is_busy(self) -> bool:
        """Some rank will still report something."""
        return bool(self._sends or self._loads)

    def take_log(self) -> tuple[tuple[str, ...], ...]:
        """What was decided since the last call, sorted: the order of a turn's ends means
        nothing."""
        log, self.log = tuple(sorted(self.log)), []
        return log
