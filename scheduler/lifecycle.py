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
from longshore.scheduler.features.forks import fork_problem
from longshore.scheduler.features.sessions import Sessions
from longshore.scheduler.features.transfers import EndedLoad
from longshore.scheduler.inspect.request_log import RequestLog
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.part import SchedulerPart
from longshore.scheduler.queue.queues import SharedEvent
from longshore.scheduler.request import (
    NOT_SCHEDULED,
    Outcome,
    Request,
    RequestChange,
    RequestStatus,
)
from longshore.scheduler.step.client_outputs import ClientOutputs
from longshore.scheduler.validation import RequestValidator


@dataclass(slots=True, kw_only=True)
class Lifecycle(SchedulerPart):
    """All requests that have not ended, by client and handle.

    eos_token_ids: end-of-sequence ids, which end a request unless it ignores them.
    num_restored: loads that have restored all KV of a swapped request.
    """

    validator: RequestValidator
    outputs: ClientOutputs
    eos_token_ids: tuple[int, ...]
    log: RequestLog = field(default_factory=RequestLog)
    num_preemptions: int = 0
    num_restored: int = 0
    sessions: Sessions = field(init=False)
    _of_clients: defaultdict[int, dict[int, Request]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _request_ids: set[str] = field(default_factory=set)
    _live_by_tenant: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.sessions = Sessions(
            **self.shared(),
            validator=self.validator,
            outputs=self.outputs,
            eos_token_ids=self.eos_token_ids,
            end=self.end,
        )

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
        running = Counter(request.tenant.name for request in self.running.requests_in_order())
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
        if Counter(request.tenant.name for request in live) != self._live_by_tenant:
            raise LongshoreError("the live requests of tenants are counted wrongly")
        between = RequestStatus.WAITING_FOR_STREAMING_REQ
        num_between = sum(request.status is between for request in waiting)
        if num_between != self.sessions.num_between:
            raise LongshoreError(
                f"{num_between} sessions wait for their clients, but {self.sessions.num_between} "
                "are counted"
            )

    # Adding requests

    def add(self, message: AddRequest, *, client: int, now: float) -> None:
        """Queue a request; one that is not valid is rejected with a reason."""
        self.log.arrived(message, client=client)
        request_id = message.request_id
        is_duplicate = self.get(client, message.handle) is not None
        is_duplicate |= request_id in self._request_ids
        if self.transfers is not None and self.transfers.has(request_id):
            is_duplicate = True
        rejection = self.validator.rejection(message, is_duplicate=is_duplicate)
        parent = None
        if rejection is None and message.fork_of is not None and self.kv_cache.follows_from_tokens:
            parent = self.get(client, message.fork_of)
            problem = fork_problem(message, parent)
            rejection = None if problem is None else (FinishReason.ERROR, problem)
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
        self._live_by_tenant[request.tenant.name] += 1
        if self.trace is not None:
            self.trace.queued(request, now)
        if self.transfers is not None:
            self.transfers.added(request)
        if self.pins is not None:
            self.pins.arrived(request)
        if len(request.token_ids) >= request.max_total_tokens:
            self.waiting.add(request)
            outcome = Outcome(FinishReason.LENGTH_CAPPED, ends_output=True)
            self.end(request, outcome, now)
            return
        is_queued = parent is not None and self.forks.add(request, parent)
        if request.structured_output is not None and self.grammars is not None:
            self.grammars.add(request, parks=not is_queued)
        elif not is_queued:
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

    # Preemption and loads

    def preempt(self, request: Request, now: float) -> None:
        """Take row and blocks from a running request, which recomputes everything later."""
        request.change(RequestChange.PREEMPTED)
        self.plan.preempted[request.row] = request.request_id
        is_computed = self._has_new_token(request)
        (blocks,) = self._vacate_rows([request], is_void=False)
        if self.experts is not None:
            if is_computed:  # else slots may still hold the experts of others' tokens
                self.experts.read(request, blocks)
            # The experts of tokens in flight will be in blocks that others get, so it samples them
            # again.
            self.in_flight.void_past_occupants(request)
        self.kv_cache.release(blocks)
        self._requeue(request, now)

    def _has_new_token(self, request: Request) -> bool:
        """Whether a running request got a token in its row, so that answered steps have computed
        all tokens before that."""
        return bool(self.running.num_tokens[request.row] > self.running.num_known[request.row])

    def swap_out(self, request: Request, now: float) -> None:
        """Preempt a running request whose KV the connector keeps."""
        request.is_swapped = True
        self.preempt(request, now)

    def _requeue(self, request: Request, now: float) -> None:
        request.is_resumed = True
        request.num_preemptions += 1
        request.asks_connector = True
        request.events.append((RequestEvent.PREEMPTED, now))
        self.num_preemptions += 1
        self.waiting.put_back(request)
        self.log.preempted(request, step=self.plan.step + 1)
        if self.trace is not None:
            self.trace.preempted(request)

    def end_load(self, load: EndedLoad, now: float) -> None:
        """A load has ended: the tokens that it has written count as computed. With the policy
        `fail`, a failed load fails its request, except for one that was swapped out: that it lost
        its blocks was the engine's choice."""
        request = load.request
        request.change(RequestChange.LOAD_OVER)
        self.waiting.unpark(request)
        self.holds.add(request, load.hold)
        if request.is_swapped:
            self.num_restored += load.is_whole
        elif not load.is_whole and self.config.load_failure_policy == "fail":
            text = "its KV could not be loaded, and load_failure_policy is 'fail'"
            self.end(request, Outcome(FinishReason.ERROR, text), now)

    def expire_load(self, request: Request, now: float) -> None:
        """The load of a waiting request has passed its deadline (see `LoadWaits`): depending on the
        policy, the request computes everything itself or fails. The load keeps its blocks."""
        if self.config.load_failure_policy == "fail" and not request.is_swapped:
            text = f"its KV was not loaded within load_timeout_s={self.config.load_timeout_s:g}"
            self.end(request, Outcome(FinishReason.ERROR, text), now)
            return
        self._abandon_load(request, is_late=True)
        self.waiting.unpark(request)

    def _abandon_load(self, request: Request, *, is_late: bool = False) -> None:
        assert self.transfers is not None
        self.transfers.abandon_load(request, is_late=is_late)
        request.change(RequestChange.LOAD_OVER)

    def lose_grammar(self, request: Request, now: float) -> None:
        """The grammar of a request that runs, or has run, is lost. The request waits for it again,
        and samples again what it samples in unanswered steps."""
        if request.row >= 0:
            self.preempt(request, now)
        self.in_flight.void_past_occupants(request)

    # Ending requests

    def end(self, request: Request, outcome: Outcome, now: float) -> None:
        """End one live request in any status; a session continues if only its output ends."""
        self.end_all([(request, outcome)], now)

    def end_all(self, ended: Sequence[tuple[Request, Outcome]], now: float) -> None:
        """End live requests. Their blocks are freed in this order."""
        running = [request for request, _ in ended if request.row >= 0]
        computed = set()
        for request in running:
            self.plan.finished[request.row] = request.request_id
            if request.resumable and self._has_new_token(request):
                computed.add(request)
        tables = dict(zip(running, self._vacate_rows(running, is_void=True), strict=True))
        freed: list[HeldBlocks] = []
        for request, outcome in ended:
            blocks = tables[request] if request in tables else self._leave_queue(request)
            if outcome.num_output_tokens is not None:
                num_kept = request.num_prompt_tokens + max(outcome.num_output_tokens, 0)
                request.token_ids = request.token_ids[:num_kept]
                request.block_hashes = []
            if self.experts is not None:
                if outcome.ends_output:
                    self.experts.read(request, tables.get(request))
                else:
                    request.routed_experts = None
            continues = (
                outcome.ends_output and request.resumable and self.sessions.continues(request)
            )
            if freed and (continues or request.cache_hint is not None):
                # First, because the session, or the end of another hint, may free blocks, too.
                self.kv_cache.release(*freed)
                freed = []
            if continues:
                is_computed = request in computed
                self.sessions.pause(request, outcome.reason, blocks, now, is_computed=is_computed)
            elif (kept := self._finish(request, outcome, blocks, now)) is not None:
                freed.append(kept)
        if freed:
            self.kv_cache.release(*freed)

    def _finish(
        self, request: Request, outcome: Outcome, blocks: HeldBlocks | None, now: float
    ) -> HeldBlocks | None:
        """End a request that has neither a row nor a position in a queue. Returns its blocks,
        unless a send keeps them. A pin takes references of its own."""
        of_client = self._of_clients[request.client_index]
        del of_client[request.handle]
        if not of_client:
            del self._of_clients[request.client_index]
        self._request_ids.discard(request.request_id)
        tenant = request.tenant.name
        self._live_by_tenant[tenant] -= 1
        if not self._live_by_tenant[tenant]:
            del self._live_by_tenant[tenant]
        self.waiting.ended(request)
        if request.cache_hint is not None and blocks is not None:
            self.kv_cache.retain(blocks, request.cache_hint, tenant=request.tenant, now=now)
        if request.no_store and blocks is not None:  # no later request finds them
            self.kv_cache.uncache_unshared(blocks)
        if self.pins is not None:
            self.pins.ended(request, blocks, now, ends_output=outcome.ends_output)
        kv_transfer_params = None
        if self.transfers is not None:
            action = self.transfers.finish(request, blocks, outcome.reason, now)
            kv_transfer_params = action.params
            if action.delay_free:
                blocks = None
        if self.grammars is not None:
            self.grammars.drop(request)
        if self.shares is not None:
            self.shares.ended(request)
        request.change(outcome.reason)
        self.outputs.add_finish(
            request,
            outcome.reason,
            message=outcome.message,
            pooled=outcome.pooled,
            kv_transfer_params=kv_transfer_params,
        )
        step = self.in_flight.last_answered_step if outcome.step is None else outcome.step
        self.log.ended(request, outcome.reason, step=step, text=outcome.message)
        if self.trace is not None:
            self.trace.ended(request, outcome.reason, now)
        return blocks

    def _leave_queue(self, request: Request) -> HeldBlocks | None:
        """Remove a waiting request from its queue; returns the blocks that it held."""
        if request in self.forks.parents:
            self.forks.parent_ends(request)
        self.forks.drop(request)
        self.waiting.remove(request)
        self.sessions.left_queue(request)
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._abandon_load(request)
        if request.is_swapped and self.transfers is not None:
            self.transfers.release_swap(request)
        return None if request.hold is None else self.holds.take(request)

    def _vacate_rows(self, requests: Sequence[Request], *, is_void: bool) -> list[HeldBlocks]:
        """Empty the rows of these requests and return their blocks. is_void: the tokens that they
        still expect are void, because the requests or their outputs end."""
        if not requests:
            return []
        if is_void and self.forks.parents:
            for request in requests:
                if request in self.forks.parents:
                    self.forks.parent_ends(request)
        blocks = self.kv_cache.detach([request.row for request in requests])
        if self.in_flight.steps:  # unanswered plans may still compute on these blocks
            self.kv_cache.fence(blocks, self.in_flight.newest_step)
            self.in_flight.note_vacated(requests, blocks, is_void=is_void)
        self.running.release(requests)
        for request in requests:
            self._release_adapter(request)
        if self.encoder is not None:
            for request in requests:
                self.encoder.release(request)
        return blocks

    def _release_adapter(self, request: Request) -> None:
        """A request has lost its row."""
        if self.loras is not None and self.loras.release(request.lora_name):
            self.waiting.happened(SharedEvent.ADAPTERS)

    def begin_epoch(self, now: float) -> None:
        """The workers are gone, and with them all rows and blocks. Running requests return to the
        front of the queue in admission order; sampled tokens that have not arrived are void."""
        running = self.running.requests_in_order()
        self.running.release(running)
        for request in reversed(running):
            self._release_adapter(request)
            request.change(RequestChange.PREEMPTED)
            self._requeue(request, now)
        self.forks.begin_epoch()
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
                self.waiting.unpark(request)
