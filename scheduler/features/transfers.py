"""The connector, and the blocks that its transfers own: loads in the background, sends of ended
requests, and blocks that the connector holds.

A transfer owns a reference to each of its blocks from its plan until its end is confirmed. A
request that ends, is preempted or stops waiting releases only its own. A deadline ends the waiting,
not the ownership: the blocks stay in quarantine until every rank has reported the end.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from longshore.connectors.base import (
    AdmittedRequest,
    AskLater,
    ConnectorOutput,
    FinishAction,
    Matched,
    RequestView,
    SchedulerConnector,
    StepView,
)
from longshore.protocol.arrays import EMPTY_INT32, Int32Array, Int64Array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.protocol.logs.records import fields
from longshore.protocol.outputs import ModelRunnerOutput, RequestEvent, TransferReport
from longshore.protocol.requests import AddRequest
from longshore.protocol.statistics import BlockState
from longshore.scheduler.features.connector_hooks import ConnectorHooks, view_of
from longshore.scheduler.features.load_waits import LoadWaits
from longshore.scheduler.features.step_loads import StepLoads
from longshore.scheduler.features.transfer_statistics import TransferStatistics, sums_by_medium
from longshore.scheduler.features.unanswered_blocks import PlanHold, UnansweredBlocks
from longshore.scheduler.heap import KeyedHeap
from longshore.scheduler.hooks import PlanChanges, SchedulerFeature, Yielded
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.request import (
    Hold,
    HoldKind,
    Outcome,
    Request,
    RequestChange,
    RequestStatus,
)
from longshore.scheduler.step.in_flight import PlannedStep
from longshore.scheduler.validation import in_use

logger = logging.getLogger(__name__)

MAX_EXPIRED: Final = 256
"""Loads whose requests stop waiting in one step; the next one goes on."""


@dataclass(slots=True)
class _Transfer:
    """A load or a send, until all ranks have reported its end.

    request: waits for it; None for a send, or a load in quarantine.
    num_tokens, num_external, order: of a load, see `begin_load`.
    deadline: when the request does not wait any longer.
    failed:  blocks that the load failed to fill.
    invalid: blocks before the loaded ones whose KV turned out to be wrong.
    """

    blocks: HeldBlocks
    request: Request | None = None
    num_tokens: int = 0
    num_external: int = 0
    deadline: float = 0.0
    order: int = 0
    ranks_done: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """A load that all ranks have reported, and the hold that it leaves to the request that waits
    for it. is_whole: no block failed."""

    request: Request
    hold: Hold
    is_whole: bool


class Transfers(SchedulerFeature):
    """Loads and sends by request id, held blocks by number.

    may_load: whether the connector is asked what it can load.
    name:      of the connector, for operators.
    num_ranks: each rank reports every transfer once.
    hooks:     calls those of the connector.
    loads:     in the background, by request id.
    step_loads: synchronous loads.
    num_bad_reports: reports of unknown or already reported transfers, which are ignored.
    num_loading_blocks, num_loading_tokens: of loads that a request waits for.
    num_queried_tokens, num_hit_tokens: tokens looked up in the connector, and hits.
    num_failed_lookups: lookups in which the connector raised; they count as misses.
    num_swapped_in_blocks: blocks of loads that restore swapped requests.
    num_failed_loads: loads in the background that did not fill all of their blocks.
    num_restored: loads that have restored all KV of a swapped request.
    num_late_loads: lookups and loads that were not waited for any longer.
    waits: how long requests wait for lookups and loads.
    statistics: what the ranks have moved.
    """

    def __init__(
        self,
        connector: SchedulerConnector,
        kv_cache: KVCacheManager,
        waits: LoadWaits,
        *,
        num_ranks: int,
        may_load: bool = True,
    ) -> None:
        self.connector = connector
        self.name = type(connector).__name__
        self.waits = waits
        self._may_load = may_load
        self.hooks = ConnectorHooks(connector)
        self._kv_cache = kv_cache
        self._num_ranks = num_ranks
        self.loads: dict[str, _Transfer] = {}
        self._awaited: KeyedHeap[float, Request] = KeyedHeap()  # by deadline
        self._lookups: dict[str, float] = {}  # not answered yet: how long their requests wait
        self._lookup_ends: KeyedHeap[float, str] = KeyedHeap()
        self._sends: dict[str, _Transfer] = {}
        self._holds: dict[int, HeldBlocks] = {}
        self._unanswered = UnansweredBlocks(self)
        self._offered: list[PlanHold] = []  # of storable blocks, while the connector chooses
        self.step_loads = StepLoads(num_ranks)
        self._ranks_done: dict[int, set[int]] = {}  # that have released a hold
        self._leaving: set[int] = set()  # holds of swapped requests
        self._last_hold_id = 0
        self.num_bad_reports = 0
        self.num_loading_blocks = self.num_swapped_in_blocks = self.num_loading_tokens = 0
        self.num_queried_tokens = self.num_hit_tokens = self.num_failed_lookups = 0
        self.num_failed_loads = self.num_late_loads = self.num_restored = 0
        self.statistics = TransferStatistics()
        self.hooks.call(connector.bind_blocks, self)

    # Hooks about one request

    def arrived(self, request: Request, now: float) -> None:
        """A request was queued."""
        if self.connector.reads_ahead:
            self._kv_cache.extend_hashes(request)
        view = view_of(request)
        self.hooks.call(self.connector.on_new_request, view)
        if self.hooks.call(self.connector.skips_prefix_cache, view):
            request.skip_prefix_cache()

    def match(self, request: Request, num_local: int, now: float) -> Matched | AskLater:
        """What the connector can load after the first `num_local` tokens. A lookup that raises is a
        miss: it has reserved nothing. So is one that is not answered in time."""
        if not self._may_load:
            return Matched(0)
        ends_at = self._lookups.get(request.request_id)
        if ends_at is None:
            ends_at = now + self.limit_s(len(request.token_ids) - num_local)
        max_wait_s = max(ends_at - now, 0.0)
        match = self._ask(request, num_local, now, max_wait_s)
        if isinstance(match, AskLater) and max_wait_s:
            self._lookups[request.request_id] = ends_at
            self._lookup_ends.add(request.request_id, ends_at, request.request_id)
            return match
        self._end_lookup(request)
        self.num_late_loads += not max_wait_s
        return Matched(0) if isinstance(match, AskLater) else match

    def _ask(
        self, request: Request, num_local: int, now: float, max_wait_s: float
    ) -> Matched | AskLater:
        try:
            self.hooks.may_have_work = True
            waiting_s = now - request.arrival_time
            view = view_of(request, waiting_s=waiting_s, max_wait_s=max_wait_s)
            match = self.connector.get_num_new_matched_tokens(view, num_local)
            if isinstance(match, Matched) and match.num_tokens < 0:
                raise ValueError(f"matched {match.num_tokens} tokens")
        except Exception:
            self.num_failed_lookups += 1
            about = fields(request_id=request.request_id)
            name = type(self.connector).__name__
            logger.exception("a lookup in the connector %s failed; a miss", name, extra=about)
            return Matched(0)
        return match

    def _end_lookup(self, request: Request) -> None:
        if self._lookups.pop(request.request_id, None) is not None:
            self._lookup_ends.discard(request.request_id)

    def answered_lookups(self, now: float) -> Iterator[str]:
        """Ids of requests that are to be asked for again, if the connector names them: these, and
        up to MAX_EXPIRED that have waited for long enough."""
        if not self.connector.names_answers:
            return
        yield from self.hooks.take_answered(now)
        for _ in range(MAX_EXPIRED):
            first = self._lookup_ends.first()
            if first is None or first[0] > now:
                return
            yield self._lookup_ends.pop()

    def admitted(self, request: Request, num_computed: int, num_tokens: int) -> None:
        """The request got a row, so that its next lookup is a new one."""
        self._end_lookup(request)
        if request.is_swapped:
            self.release_swap(request)

    def allocated(
        self, request: Request, block_ids: tuple[Int32Array, ...], num_external: int
    ) -> None:
        """The request got blocks for tokens that the connector loads."""
        hook = self.connector.update_state_after_alloc
        max_wait_s = self.waits.connector_limit_s(self.limit_s(num_external))
        view = view_of(request, max_wait_s=max_wait_s)
        self.hooks.call(hook, view, block_ids, num_external)

    def limit_s(self, num_tokens: int) -> float:
        """How long a request waits for so many tokens."""
        return self.waits.limit_s(num_tokens, self.num_loading_tokens)

    def count_lookup(self, request: Request, num_local: int, num_external: int) -> None:
        """The request is admitted or begins to load, with these numbers of hit tokens."""
        self.num_queried_tokens += len(request.token_ids) - num_local
        self.num_hit_tokens += num_external
        request.num_external_tokens = num_external

    def ending(self, request: Request, now: float) -> None:
        """The request's load goes on without it, and its copy of the KV is not needed any
        longer."""
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self.abandon_load(request, now)
        if request.is_swapped:
            self.release_swap(request)

    def ended(
        self, request: Request, blocks: HeldBlocks | None, outcome: Outcome, now: float
    ) -> FinishAction | None:
        """The request ends with these blocks. A send may take them over."""
        block_ids = (EMPTY_INT32,) * self._kv_cache.num_groups
        if blocks is not None:
            block_ids = blocks.block_ids
        view = view_of(request, finish_reason=outcome.reason, finished_s=now)
        self._end_lookup(request)
        action = self.hooks.call(self.connector.request_finished, view, block_ids)
        if action.delay_free and blocks is not None:
            self._sends[request.request_id] = _Transfer(blocks)
        return action

    # Loads

    def begin_load(
        self,
        request: Request,
        blocks: HeldBlocks,
        *,
        num_tokens: int,
        num_external: int,
        now: float,
        order: int,
    ) -> None:
        """A load fills `blocks` up to `num_tokens` tokens, the last `num_external` of which are
        loaded, while the request waits."""
        deadline = now + self.limit_s(num_external)
        load = _Transfer(blocks, request, num_tokens, num_external, deadline, order)
        self.loads[request.request_id] = load
        self._awaited.add(request.request_id, deadline, request)
        self.num_loading_blocks += blocks.num_blocks
        self.num_loading_tokens += num_external

    def abandon_load(self, request: Request, now: float, *, is_late: bool = False) -> None:
        """The request no longer waits; the blocks of its load are put into quarantine. is_late:
        because the load has taken too long."""
        load = self.loads[request.request_id]
        self._stop_waiting(load)
        load.request = None
        self.num_late_loads += is_late
        connector = self.connector
        hook = connector.load_expired if is_late else connector.load_abandoned
        self.hooks.call(hook, request.request_id)
        request.change(RequestChange.LOAD_OVER)
        request.events.append((RequestEvent.LOAD_ENDED, now))

    def _stop_waiting(self, load: _Transfer) -> None:
        assert load.request is not None
        self._awaited.remove(load.request.request_id)
        self.num_loading_blocks -= load.blocks.num_blocks
        self.num_loading_tokens -= load.num_external

    # Swaps

    def swap_out(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_computed_tokens: int
    ) -> bool:
        """Have the connector keep the KV of a running request, which no unanswered plan uses. The
        caller preempts it if this returns True."""
        last_hold_id = self._last_hold_id
        if not self.hooks.call(self.connector.swap_out, request, block_ids, num_computed_tokens):
            return False
        self._leaving.update(range(last_hold_id + 1, self._last_hold_id + 1))
        return True

    def release_swap(self, request: Request) -> None:
        """A swapped request needs its copy no longer."""
        request.is_swapped = False
        self.hooks.call(self.connector.release_swap, request.request_id)

    @property
    def num_leaving_blocks(self) -> int:
        """Blocks of swapped requests that are free when their copies have ended, unless others use
        them too."""
        return sum(self._holds[hold_id].num_blocks for hold_id in self._leaving)

    def expired(self, now: float) -> Iterator[Request]:
        """Up to MAX_EXPIRED requests whose load has passed its deadline, which the caller abandons,
        the earliest first."""
        for _ in range(MAX_EXPIRED):
            first = self._awaited.first()
            if first is None or first[0] > now:
                return
            yield first[1]

    # What ranks report

    def apply(self, report: TransferReport) -> tuple[ConnectorOutput, list[EndedLoad]]:
        """Apply a report. Returns the transfers that have ended on all ranks, for the connector,
        and the ended loads that requests wait for."""
        sent, received, ended = [], [], []
        self.bad_blocks(report.failed_block_ids, are_written=False)
        for operation in report.operations:
            self.statistics.add(operation)
        for request_id in report.finished_receiving:
            load_over = self._done(self.loads, request_id, report.rank)
            if load_over is None:
                continue
            self.num_failed_loads += bool(load_over.failed)
            received.append(request_id)
            if load_over.request is None:
                self._kv_cache.release(load_over.blocks)
            else:
                ended.append(self._ended(load_over.request, load_over))
        for request_id in report.finished_sending:
            send = self._done(self._sends, request_id, report.rank)
            if send is not None:
                sent.append(request_id)
                self._kv_cache.release(send.blocks)
        output = ConnectorOutput(
            rank=report.rank,
            finished_sending=sent,
            finished_receiving=received,
            failed_block_ids=report.failed_block_ids,
            metadata=(report.connector_metadata,) if report.connector_metadata else (),
        )
        return output, ended

    def bad_blocks(self, block_ids: Int32Array, *, are_written: bool) -> None:
        """Loads in the background may follow them, or have failed to fill them."""
        bad = set(block_ids.tolist())
        for load in self.loads.values() if bad else ():
            found = load.invalid if are_written else load.failed
            found |= bad & load.blocks.ids()

    def _done(
        self, transfers: dict[str, _Transfer], request_id: str, rank: int
    ) -> _Transfer | None:
        """The transfer, if this report is the last of all ranks."""
        transfer = transfers.get(request_id)
        if transfer is None or not 0 <= rank < self._num_ranks or rank in transfer.ranks_done:
            self.num_bad_reports += 1
            about = fields(request_id=request_id, rank=rank)
            logger.warning("rank %d reported an unknown or duplicate transfer", rank, extra=about)
            return None
        transfer.ranks_done.add(rank)
        if len(transfer.ranks_done) < self._num_ranks:
            return None
        return transfers.pop(request_id)

    def _ended(self, request: Request, load: _Transfer) -> EndedLoad:
        self._stop_waiting(load)
        num_good = self._kv_cache.num_before(load.blocks.block_ids, [*load.failed, *load.invalid])
        num_good = load.num_tokens if num_good is None else min(num_good, load.num_tokens)
        blocks, unwritten = load.blocks, load.failed
        if not self._kv_cache.resumes_anywhere and num_good < load.num_tokens:
            # Not every number of loaded tokens is one to resume after, and there are no blocks to
            # compute tokens in where nothing was loaded.
            num_good = self._kv_cache.resume_point(blocks.block_ids, num_good)
            blocks, rest = self._kv_cache.cut(blocks, num_good)
            self._kv_cache.release(rest)
            unwritten = unwritten & blocks.ids()
        num_computed = min(num_good, len(request.token_ids) - 1)
        hold = Hold(HoldKind.LOADED, blocks, num_computed, load.order, sorted(unwritten))
        return EndedLoad(request, hold, not load.failed)

    # `BlockHolds` of the connector contract

    def hold(self, block_ids: Sequence[int]) -> int:
        """See `BlockHolds.hold`. What is stored whole keeps the hold that it has."""
        for hold_id, held in self._offered:
            if held == list(block_ids):
                self._offered.remove((hold_id, held))
                return hold_id
        self._last_hold_id += 1
        self._holds[self._last_hold_id] = self._kv_cache.hold(block_ids)
        return self._last_hold_id

    def release(self, hold_id: int) -> None:
        """See `BlockHolds.release`."""
        self._kv_cache.release(self._holds.pop(hold_id))
        self._leaving.discard(hold_id)
        self._ranks_done.pop(hold_id, None)

    def release_rank(self, hold_id: int, rank: int) -> bool:
        """See `BlockHolds.release_rank`."""
        if hold_id not in self._holds:
            return False
        ranks_done = self._ranks_done.setdefault(hold_id, set())
        ranks_done.add(rank)
        if len(ranks_done) < self._num_ranks:
            return False
        self.release(hold_id)
        return True

    # Steps

    def fields(
        self, plan: PlanChanges, num_scheduled: Int64Array, answered_step: int
    ) -> dict[str, Any]:
        """The connector's instructions for the workers."""
        fields: dict[str, Any] = {"connector_metadata": self._metadata(plan, answered_step)}
        if plan.loads:
            fields["has_loads"] = True
            self.step_loads.begin(plan.step)
        return fields

    def steady_fields(self, plan: PlanChanges, answered_step: int) -> dict[str, Any]:
        """Instructions only if blocks can be stored or were uncached, or the connector wants a
        plan."""
        has_news = plan.uncached or self._unanswered.are_storable(answered_step)
        if has_news or (self.hooks.may_have_work and self.hooks.wants_next_plan()):
            metadata = self._metadata(plan, answered_step)
            plan.uncached.clear()
            return {"connector_metadata": metadata}
        if self._kv_cache.full_blocks.recorded:
            self._unanswered.add(plan.step, self._kv_cache.full_blocks.take_cached())
        return {}

    def _metadata(self, plan: PlanChanges, answered_step: int) -> bytes:
        admitted = [AdmittedRequest(start.request_id, start.block_ids) for start in plan.added]
        if plan.uncached:
            self._unanswered.remove(plan.uncached)
        storable, self._offered = self._unanswered.take(answered_step)
        step = StepView(
            step=plan.step,
            answered_step=answered_step,
            admitted=admitted,
            uncached=list(plan.uncached),
            storable=storable,
            unanswered_step=self._unanswered.last_step,
            preempted=list(plan.preempted.values()),
            finished=list(plan.finished.values()),
        )
        metadata = self.hooks.call(self.connector.build_connector_meta, step)
        for hold_id, _ in self._offered:  # what is stored, the connector holds
            self.release(hold_id)
        self._offered = []
        self._unanswered.add(plan.step, self._kv_cache.full_blocks.take_cached())
        return metadata

    def has_work(self) -> bool:
        """Whether blocks are to be stored, or the connector has instructions for the workers, or
        waits for an answer."""
        return len(self._unanswered) > 0 or self.hooks.has_pending_work

    def answered(self, output: ModelRunnerOutput, planned: PlannedStep, now: float) -> None:
        """The connector gets what the workers' halves have for it."""
        failed = output.failed_block_ids
        if output.connector_metadata or len(failed):
            metadata = (output.connector_metadata,) if output.connector_metadata else ()
            reported = ConnectorOutput(output.step, failed_block_ids=failed, metadata=metadata)
            self.hooks.call(self.connector.update_connector_output, reported)

    # All of them

    def yield_blocks(self, to: Request | None, besides: Request | None) -> Yielded:
        """A transfer or the connector may own blocks."""
        return Yielded.LATER if len(self) else Yielded.NOTHING

    def counts(self) -> dict[str, Any]:
        """Fields of SchedulerStats."""
        stats = self.hooks.call(self.connector.get_kv_connector_stats)
        return {
            "num_external_queried_tokens": self.num_queried_tokens,
            "num_external_hit_tokens": self.num_hit_tokens,
            "num_quarantined_blocks": self.num_quarantined_blocks,
            "num_failed_lookups": self.num_failed_lookups,
            "num_failed_loads": self.num_failed_loads,
            "num_late_loads": self.num_late_loads,
            "tiers": sums_by_medium(stats.tiers),
            "transfers": self.statistics.totals(stats.queued_blocks),
            "pulls": stats.pulls,
        }

    def problem(self, message: AddRequest, client: int) -> str | None:
        """A request that has ended may have left a transfer."""
        return in_use(message) if self.knows(message.request_id) else None

    def knows(self, request_id: str) -> bool:
        """Whether a transfer of this request id is under way."""
        return request_id in self.loads or request_id in self._sends

    def __len__(self) -> int:
        return len(self.loads) + len(self._sends) + len(self._holds)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of abandoned loads that have not ended."""
        abandoned = [load.blocks.ids() for load in self.loads.values() if load.request is None]
        # They may share blocks that were prefix hits.
        return len(set[int]().union(*abandoned) - {NULL_BLOCK})

    def owners(self) -> Iterator[tuple[BlockState, str, HeldBlocks]]:
        """The blocks of each transfer, with their state and the id of the request that began it
        ("" for blocks that the connector holds)."""
        for request_id, load in self.loads.items():
            is_awaited = load.request is not None
            state = BlockState.TRANSFER if is_awaited else BlockState.QUARANTINED
            yield state, request_id, load.blocks
        for request_id, send in self._sends.items():
            yield BlockState.TRANSFER, request_id, send.blocks
        for blocks in self._holds.values():
            yield BlockState.TRANSFER, "", blocks

    def check(self, running: Collection[Request], waiting: Collection[Request]) -> None:
        """Raise LongshoreError unless exactly the loading ones of the `waiting` requests have a
        load, none of them holds blocks of its own, and the blocks of these loads are counted."""
        awaited = [load for load in self.loads.values() if load.request is not None]
        loading = {
            request for request in waiting if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        }
        if (
            {load.request for load in awaited} != loading
            or len(awaited) != len(loading)
            or (set(self._awaited) != loading)
        ):
            raise LongshoreError(
                f"{len(loading)} requests wait for loads, but {len(awaited)} loads are waited for"
            )
        holding = [request.request_id for request in loading if request.hold is not None]
        if holding:
            raise LongshoreError(f"{holding[0]} holds blocks beside those of its load")
        if sum(load.num_external for load in awaited) != self.num_loading_tokens:
            raise LongshoreError(f"loads do not have {self.num_loading_tokens} tokens")
        num_blocks = sum(load.blocks.num_blocks for load in awaited)
        if num_blocks != self.num_loading_blocks:
            raise LongshoreError(
                f"loads hold {num_blocks} blocks, but num_loading_blocks is "
                f"{self.num_loading_blocks}"
            )
        transfers = (*self.loads.items(), *self._sends.items())
        over = [key for key, each in transfers if len(each.ranks_done) >= self._num_ranks]
        if over:
            raise LongshoreError(f"the transfer of {over[0]} is over on all ranks, but goes on")

    def begin_epoch(self, epoch: int) -> None:
        """A new epoch has no transfers."""
        self.loads, self._sends, self._holds, self._lookups = {}, {}, {}, {}
        self._awaited.clear()
        self._lookup_ends.clear()
        self.step_loads.clear()
        self._leaving.clear()
        self._ranks_done.clear()
        self._unanswered.clear()
        self.num_loading_blocks = self.num_loading_tokens = 0
        self.hooks.call(self.connector.on_new_epoch, epoch)
