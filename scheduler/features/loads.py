"""Requests that begin with KV of a connector: what it can load, within the step or in the
background, and the ends of loads for which requests wait.

A background load fills blocks that are reserved while its request is in WAITING_FOR_REMOTE_KVS. A
load within the step is part of the request's first chunk.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final

from longshore.connectors.base import AskLater, Match, Matched
from longshore.protocol.outputs import FinishReason, RequestEvent, TransferReport
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.features.forks import Forks
from longshore.scheduler.features.transfers import EndedLoad, Transfers
from longshore.scheduler.hooks import Admitter, Attempt, SchedulerFeature, StepLoad
from longshore.scheduler.kv_cache.blocks import BlockDemand, ComputedBlocks, HeldBlocks
from longshore.scheduler.kv_cache.holds import Holds
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.queue.queues import SharedEvent, WaitingRequests
from longshore.scheduler.request import Outcome, Request, RequestChange, RequestStatus
from longshore.scheduler.step.in_flight import StepsInFlight
from longshore.scheduler.step.plan_builder import PlanBuilder

_NOTHING: Final = Matched(0)


@dataclass(slots=True, kw_only=True, eq=False)
class Loads(SchedulerFeature):
    """Attached with `Transfers`, which own the blocks."""

    config: SchedulerConfig
    waiting: WaitingRequests
    holds: Holds
    kv_cache: KVCacheManager
    in_flight: StepsInFlight
    plan: PlanBuilder
    forks: Forks
    transfers: Transfers
    lifecycle: Lifecycle
    # The last answer in this step: a request is tried again when holds were released.
    _asked: tuple[Request, int, Match] | None = None

    def poll(self, now: float) -> None:
        """Requests whose load has taken too long stop waiting, and those whose lookup is answered
        are tried again. The connector may know more than in the last step."""
        self._asked = None
        for request in self.transfers.expired(now):
            self._expire(request, now)
        if self.waiting.awaits(SharedEvent.CONNECTOR):
            for request_id in self.transfers.answered_lookups(now):
                self.waiting.unpark_one(SharedEvent.CONNECTOR, request_id)

    # Begins

    def begin(
        self, admission: Admitter, request: Request, prefix: ComputedBlocks, now: float
    ) -> Attempt:
        """Start the request with the tokens that the connector can load after the cached prefix,
        within the step or in the background."""
        match = self._ask(request, prefix.num_tokens, now)
        if isinstance(match, AskLater):
            request.waits_for = (
                f"its connector {self.transfers.name}, which does not know yet what it can load"
            )
            if request.is_swapped:
                request.waits_for = "the copy of its KV, which is being swapped out"
            self.waiting.park_head(SharedEvent.CONNECTOR)
            return Attempt.PARKED
        num_external = min(match.num_tokens, len(request.token_ids) - prefix.num_tokens)
        if match.is_async and num_external > 0:
            attempt = self._begin_load(admission, request, prefix, num_external, now)
            while attempt is Attempt.NO_BLOCKS and admission.release_holds(request):
                attempt = self._begin_load(admission, request, prefix, num_external, now)
            if attempt is not Attempt.NO_BLOCKS or not admission.is_idle:
                return attempt
            num_external = 0  # transfers that may never end own the blocks
        if num_external:
            reserve = partial(self._reserve, request, num_external)
            return admission.start(request, prefix, StepLoad(num_external, reserve))
        attempt = admission.start(request, prefix)
        if attempt is Attempt.ADMITTED:
            self.transfers.count_lookup(request, prefix.num_tokens, 0)
        return attempt

    def _ask(self, request: Request, num_local: int, now: float) -> Match:
        is_loading = self.transfers.knows(request.request_id)  # an abandoned load
        if not request.asks_connector or request.must_compute_prompt or is_loading:
            return _NOTHING
        if (match := self.last_match(request, num_local)) is None:
            match = self.transfers.match(request, num_local, now)
            self._asked = (request, num_local, match)
        return match

    def last_match(self, request: Request, num_local: int) -> Match | None:
        """The connector's answer, if this request was the last one for which it was asked."""
        asked = self._asked
        return asked[2] if asked is not None and asked[:2] == (request, num_local) else None

    def _begin_load(
        self,
        admission: Admitter,
        request: Request,
        prefix: ComputedBlocks,
        num_external: int,
        now: float,
    ) -> Attempt:
        """Reserve blocks for the connector to fill while the request waits. One token more than is
        loaded gets a slot, so that the loaded request can run without another block. A load larger
        than the limit for all loads begins when there is no other one."""
        num_loaded = prefix.num_tokens + num_external
        num_slots = min(num_loaded + 1, len(request.token_ids))
        num_others = self.transfers.num_loading_blocks + self.holds.num_loaded_blocks
        num_loading = num_others + self.kv_cache.num_blocks_for(num_slots)
        limit = self.config.max_loading_blocks or self.kv_cache.num_blocks // 2
        if self.waiting.loads_are_full or (num_others and num_loading > limit):
            request.waits_for = (
                f"other loads to end: all loads together may hold max_loading_blocks={limit} blocks"
            )
            self.waiting.delay_load()
            return Attempt.PARKED
        demand = self.kv_cache.demand(
            prefix,
            num_slots,
            num_loaded=min(num_loaded, len(request.token_ids) - 1),
            num_encoder_tokens=request.num_encoder_tokens,
        )
        if not admission.has_room(request, demand.num_needed, num_slots):
            return Attempt.NO_BLOCKS
        blocks = self._reserve(request, num_external, demand)
        if blocks is None:
            return Attempt.NO_BLOCKS
        if request.is_swapped:
            self.transfers.num_swapped_in_blocks += demand.num_new
        self.forks.drop(request)
        request.change(RequestChange.LOAD_BEGUN)
        request.events.append((RequestEvent.LOAD_BEGUN, now))
        request.asks_connector = False
        self.transfers.begin_load(
            request,
            blocks,
            num_tokens=num_loaded,
            num_external=num_external,
            now=now,
            order=self.holds.next_order(),
        )
        self.plan.has_new_loads = True
        self.waiting.park_head()
        return Attempt.PARKED

    def _reserve(
        self, request: Request, num_external: int, demand: BlockDemand
    ) -> HeldBlocks | None:
        """Take the blocks of `demand`, which the connector fills with `num_external` tokens. None,
        and nothing has changed, if blocks are short."""
        blocks = self.kv_cache.reserve(demand, answered_step=self.in_flight.last_answered_step)
        if blocks is not None:
            num_local = demand.computed.num_tokens
            self.transfers.allocated(request, blocks.block_ids, num_external)
            self.kv_cache.count_lookup(request, num_local)
            self.transfers.count_lookup(request, num_local, num_external)
        return blocks

    # Ends

    def apply(self, report: TransferReport, now: float) -> None:
        """A rank has reported transfers."""
        transfers = self.transfers
        output, ended = transfers.apply(report)
        for load in ended:
            self._end(load, now)
        transfers.hooks.call(transfers.connector.update_connector_output, output)

    def _end(self, load: EndedLoad, now: float) -> None:
        """A load has ended: the tokens that it has written count as computed. With the policy
        `fail`, a failed load fails its request, except for one that was swapped out: that it lost
        its blocks was the engine's choice."""
        request = load.request
        request.change(RequestChange.LOAD_OVER)
        request.events.append((RequestEvent.LOAD_ENDED, now))
        self.waiting.unpark(request)
        self.holds.add(request, load.hold)
        if request.is_swapped:
            self.transfers.num_restored += load.is_whole
        elif not load.is_whole and self.config.load_failure_policy == "fail":
            text = "its KV could not be loaded, and load_failure_policy is 'fail'"
            self.lifecycle.end(request, Outcome(FinishReason.ERROR, text), now)

    def _expire(self, request: Request, now: float) -> None:
        """The load of a waiting request has passed its deadline (see `LoadWaits`): depending on the
        policy, the request computes everything itself or fails. The load keeps its blocks."""
        if self.config.load_failure_policy == "fail" and not request.is_swapped:
            text = f"its KV was not loaded within load_timeout_s={self.config.load_timeout_s:g}"
            self.lifecycle.end(request, Outcome(FinishReason.ERROR, text), now)
            return
        self.transfers.abandon_load(request, now, is_late=True)
        self.waiting.unpark(request)

    def waits_for(self, request: Request, now: float) -> str | None:
        """A load in the background, with its deadline."""
        if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            return None
        left_s = self.transfers.loads[request.request_id].deadline - now
        return (
            f"its KV, which the connector {self.transfers.name} is loading; recomputed after "
            f"{left_s:.1f} s at the latest"
        )
