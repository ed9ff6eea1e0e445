"""The life of a request: how it is queued, preempted and ended.

Every end goes through `Lifecycle.end_all`: rows and queues first, then blocks, connector, client.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from longshore.protocol.errors import LongshoreError
from longshore.protocol.outputs import FinishReason, RequestEvent
from longshore.protocol.requests import AddRequest, Malformed
from longshore.protocol.statistics import TenantStats
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.hooks import Hooks
from longshore.scheduler.inspect.request_log import RequestLog
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.kv_cache.holds import Holds
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.queue.queues import SharedEvent, WaitingRequests
from longshore.scheduler.request import (
    NOT_SCHEDULED,
    Outcome,
    Request,
    RequestChange,
    RequestStatus,
)
from longshore.scheduler.step.client_outputs import ClientOutputs
from longshore.scheduler.step.in_flight import StepsInFlight
from longshore.scheduler.step.plan_builder import PlanBuilder
from longshore.scheduler.step.running import RunningTable
from longshore.scheduler.validation import RequestValidator


@dataclass(slots=True, kw_only=True)
class Lifecycle:
    """All requests that have not ended, by client and handle.

    eos_token_ids: end-of-sequence ids, which end a request unless it ignores them.
    """

    config: SchedulerConfig
    running: RunningTable
    waiting: WaitingRequests
    holds: Holds
    kv_cache: KVCacheManager
    in_flight: StepsInFlight
    plan: PlanBuilder
    hooks: Hooks
    validator: RequestValidator
    outputs: ClientOutputs
    eos_token_ids: tuple[int, ...]
    log: RequestLog = field(default_factory=RequestLog)
    num_preemptions: int = 0
    _of_clients: defaultdict[int, dict[int, Request]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _request_ids: set[str] = field(default_factory=set)
    _live_by_tenant: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self._request_ids)

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(each.values() for each in self._of_clients.values())

    def get(self, client: int, handle: int) -> Request | None:
        """The live request with this client's handle."""
        of_client = self._of_clients.get(client)
        return None if of_client is None else of_client.get(handle)

    def of_client(self, client: int) -> Collection[Request]:
        """A client's live requests."""
        return self._of_clients[client].values() if client in self._of_clients else ()

    def count_by_tenant(self) -> tuple[TenantStats, ...]:
        """The live requests of each tenant, by name; those without a tenant do not count."""
        live = self._live_by_tenant
        running = Counter(
            request.options.tenant.name for request in self.running.requests_in_order()
        )
        return tuple(
            TenantStats(name, running[name], live[name] - running[name])
            for name in sorted(live)
            if name
        )

    def check(self) -> None:
        """Raise LongshoreError unless each live request has one row or one position in a queue, and
        no other request has one."""
        waiting = list(self.waiting)
        live = Counter(self)
        if live != Counter([*self.running.requests_in_order(), *waiting]):
            raise LongshoreError(
                f"{len(live)} requests are live, but {self.running.num_rows} run and "
                f"{len(waiting)} wait"
            )
        if len(waiting) != len(self.waiting) or {r.request_id for r in live} != self._request_ids:
            raise LongshoreError("waiting requests or the ids of live ones are counted wrongly")
        if Counter(request.options.tenant.name for request in live) != self._live_by_tenant:
            raise LongshoreError("the live requests of tenants are counted wrongly")

    # Adding requests

    def add(self, message: AddRequest, *, client: int, now: float) -> None:
        """Queue a request; one that is not valid is rejected with a reason."""
        self.log.arrived(message, client=client)
        request_id = message.request_id
        is_duplicate = self.get(client, message.handle) is not None
        is_duplicate |= request_id in self._request_ids
        rejection = self.validator.rejection(message, is_duplicate=is_duplicate)
        for feature in self.hooks.problem:
            if rejection is None and (problem := feature.problem(message, client)) is not None:
                rejection = FinishReason.ERROR, problem
        if rejection is not None:
            num_outputs = len(message.output_token_ids)
            self.outputs.add_rejection(client, message.handle, *rejection, num_outputs)
            self.log.rejected(request_id, *rejection)
            return
        request = self._of_clients[client][message.handle] = Request(
            message,
            client_index=client,
            now=now,
            max_model_len=self.config.max_model_len,
            eos_token_ids=self.eos_token_ids,
        )
        self._request_ids.add(request_id)
        self._live_by_tenant[request.options.tenant.name] += 1
        for feature in self.hooks.arrived:
            feature.arrived(request, now)
        if len(request.token_ids) >= request.max_total_tokens:
            self.waiting.add(request)
            outcome = Outcome(FinishReason.LENGTH_CAPPED, ends_output=True)
            self.end(request, outcome, now)
            return
        is_queued = False
        for feature in self.hooks.queue:
            is_queued = feature.queue(request, is_queued)
        if not is_queued:
            self.waiting.add(request)

    def reject_message(self, malformed: Malformed, text: str, *, client: int, now: float) -> None:
        """A message about a request could not be decoded. The live request with its handle ends,
        because the client would attribute the answer to it. Without a live request, only a new
        request is answered."""
        handle = malformed.handle
        if (request := self.get(client, handle)) is not None:
            self.end(request, Outcome(FinishReason.ERROR, text), now)
        elif malformed.message == "add":
            self.outputs.add_rejection(client, handle, FinishReason.ERROR, text, 0)
            self.log.unreadable(text, client=client, handle=handle)

    # Preemption

    def preempt(self, request: Request, now: float) -> None:
        """Take row and blocks from a running request, which recomputes everything later."""
        request.change(RequestChange.PREEMPTED)
        self.plan.preempted[request.row] = request.request_id
        (blocks,) = self._vacate_rows([request], is_void=False)
        self.kv_cache.release(blocks)
        self._requeue(request, now)

    def _requeue(self, request: Request, now: float) -> None:
        request.is_resumed = True
        request.num_preemptions += 1
        request.asks_connector = True
        request.events.append((RequestEvent.PREEMPTED, now))
        self.num_preemptions += 1
        self.waiting.put_back(request)
        self.log.preempted(request, step=self.plan.step + 1)

    # Ending requests

    def end(self, request: Request, outcome: Outcome, now: float) -> None:
        """End one live request in any status; a session continues if only its output ends."""
        self.end_all([(request, outcome)], now)

    def end_all(self, ended: Sequence[tuple[Request, Outcome]], now: float) -> None:
        """End live requests. Their blocks are freed in this order."""
        running = [request for request, _ in ended if request.row >= 0]
        for request in running:
            self.plan.finished[request.row] = request.request_id
            for feature in self.hooks.ending:
                feature.ending(request, now)
        tables = dict(zip(running, self._vacate_rows(running, is_void=True), strict=True))
        freed: list[HeldBlocks] = []
        for request, outcome in ended:
            blocks = tables[request] if request in tables else self._leave_queue(request, now)
            if outcome.num_output_tokens is not None:
                num_kept = request.num_prompt_tokens + max(outcome.num_output_tokens, 0)
                request.token_ids = request.token_ids[:num_kept]
                request.block_hashes = []
            if freed and (request.options.resumable or request.options.cache_hint is not None):
                # First, because the session, or the end of another hint, may free blocks, too.
                self.kv_cache.release(*freed)
                freed = []
            goes_on = False
            for feature in self.hooks.output_ended:
                ran = request in tables
                goes_on |= feature.output_ended(request, outcome, blocks, now, ran=ran)
            if not goes_on and (kept := self._finish(request, outcome, blocks, now)) is not None:
                freed.append(kept)
        if freed:
            self.kv_cache.release(*freed)

    def _finish(
        self, request: Request, outcome: Outcome, blocks: HeldBlocks | None, now: float
    ) -> HeldBlocks | None:
        """End a request that has neither a row nor a position in a queue. Returns its blocks,
        unless a feature keeps them."""
        of_client = self._of_clients[request.client_index]
        del of_client[request.handle]
        if not of_client:
            del self._of_clients[request.client_index]
        self._request_ids.discard(request.request_id)
        options = request.options
        tenant = options.tenant.name
        self._live_by_tenant[tenant] -= 1
        if not self._live_by_tenant[tenant]:
            del self._live_by_tenant[tenant]
        self.waiting.ended(request)
        if options.cache_hint is not None and blocks is not None:
            self.kv_cache.retain(blocks, options.cache_hint, tenant=options.tenant, now=now)
        if options.no_store and blocks is not None:  # no later request finds them
            self.kv_cache.uncache_unshared(blocks)
        action = None
        for feature in self.hooks.ended:
            action = feature.ended(request, blocks, outcome, now) or action
        request.change(outcome.reason)
        self.outputs.add_finish(
            request,
            outcome.reason,
            message=outcome.message,
            pooled=outcome.pooled,
            kv_transfer_params=None if action is None else action.params,
        )
        step = self.in_flight.last_answered_step if outcome.step is None else outcome.step
        self.log.ended(request, outcome.reason, step=step, text=outcome.message)
        return None if action is not None and action.delay_free else blocks

    def _leave_queue(self, request: Request, now: float) -> HeldBlocks | None:
        """Remove a waiting request from its queue; returns the blocks that it held."""
        for feature in self.hooks.ending:
            feature.ending(request, now)
        self.waiting.remove(request)
        return None if request.hold is None else self.holds.take(request)

    def _vacate_rows(self, requests: Sequence[Request], *, is_void: bool) -> list[HeldBlocks]:
        """Empty the rows of these requests and return their blocks. is_void: the tokens that they
        still expect are void, because the requests or their outputs end."""
        if not requests:
            return []
        blocks = self.kv_cache.detach([request.row for request in requests])
        if self.in_flight.steps:  # unanswered plans may still compute on these blocks
            self.kv_cache.fence(blocks, self.in_flight.newest_step)
            self.in_flight.note_vacated(requests, blocks, is_void=is_void)
        self.running.release(requests)
        for feature in self.hooks.vacated:
            for request, held in zip(requests, blocks, strict=True):
                feature.vacated(request, held)
        return blocks

    def begin_epoch(self, now: float) -> None:
        """The workers are gone, and with them all rows and blocks. Running requests return to the
        front of the queue in admission order; sampled tokens that have not arrived are void."""
        running = self.running.requests_in_order()
        self.running.release(running)
        for request in reversed(running):
            request.change(RequestChange.PREEMPTED)
            for feature in self.hooks.vacated:
                feature.vacated(request, None)
            self._requeue(request, now)
        self.holds.begin_epoch()
        for event in SharedEvent:
            self.waiting.happened(event)
        for request in self:
            request.resume_after_step = 0
            request.asks_connector = True
            request.num_cached_tokens = NOT_SCHEDULED  # what was computed before is lost
            request.is_swapped = False  # the connector has dropped its copy
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                request.change(RequestChange.LOAD_OVER)
                request.events.append((RequestEvent.LOAD_ENDED, now))
                self.waiting.unpark(request)
