"""The ways in and out of a request's life: queued, preempted, ended. Each has one place, here."""

from collections.abc import Sequence
from typing import Final

from longshore.connectors.base import FinishAction, RequestView
from longshore.protocol.arrays import EMPTY_INT32, Float32Array, Int32Array
from longshore.protocol.outputs import FinishReason, RequestEvent
from longshore.protocol.requests import (
    AddRequest,
    ContinueSession,
    Malformed,
    MalformedAdd,
)
from longshore.scheduler.features.forks import fork_problem
from longshore.scheduler.features.transfers import EndedLoad, num_blocks_of
from longshore.scheduler.inspect.request_log import RequestLog
from longshore.scheduler.kv_cache.manager import HeldBlocks
from longshore.scheduler.parts import Parts
from longshore.scheduler.request import NOT_SCHEDULED, Request, RequestStatus
from longshore.scheduler.step.plan_builder import PlanBuilder
from longshore.scheduler.validation import RequestValidator

MAX_QUEUED_CHUNKS: Final = 1024
"""Chunks of one session that may wait for their turn."""


_NO_CONNECTOR: Final = FinishAction()


class Lifecycle:
    """All requests that have not ended, by client and handle, and the tables that they move among.

    eos_token_ids: end a request that does not ignore them.
    """

    def __init__(
        self,
        parts: Parts,
        plan: PlanBuilder,
        intake: RequestValidator,
        *,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._config = parts.config
        self._running = parts.running
        self._waiting = parts.waiting
        self._forks = parts.forks
        self._kv_cache = parts.kv_cache
        self._in_flight = parts.in_flight
        self._outputs = parts.outputs
        self._loras = parts.loras
        self._encoder = parts.encoder
        self._transfers = parts.transfers
        self._connector = parts.connector
        self._plan = plan
        self._intake = intake
        self._eos_token_ids = eos_token_ids
        self.log = RequestLog()
        self._requests: dict[tuple[int, int], Request] = {}
        self._request_ids: set[str] = set()
        self.num_preemptions = 0

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, client: int, handle: int) -> Request | None:
        """The live request of this client's handle."""
        return self._requests.get((client, handle))

    def handles_of(self, client: int) -> list[int]:
        """Handles of a client's live requests."""
        return [handle for owner, handle in self._requests if owner == client]

    # In

    def queue(self, message: AddRequest, *, client: int, now: float) -> None:
        """A request arrives; one that cannot be served is answered with the reason at once."""
        key, request_id = (client, message.handle), message.request_id
        is_duplicate = (
            key in self._requests
            or request_id in self._request_ids
            or self._transfers.has(request_id)
        )
        self.log.arrived(message, client=client)
        refused = self._intake.rejection(message, is_duplicate=is_duplicate)
        parent = None
        may_fork = self._kv_cache.follows_from_tokens  # else a fork is a request like any other
        if message.fork_of is not None and refused is None and may_fork:
            parent = self._requests.get((client, message.fork_of))
            problem = fork_problem(message, parent)
            refused = None if problem is None else (FinishReason.ERROR, problem)
        if refused is not None:
            reason, text = refused
            num_outputs = len(message.output_token_ids)
            self._outputs.add_rejection(client, message.handle, reason, text, num_outputs)
            self.log.refused(request_id, reason, text)
            return
        request = self._requests[key] = Request(
            message,
            client_index=client,
            now=now,
            max_model_len=self._config.max_model_len,
            eos_token_ids=self._eos_token_ids,
        )
        self._request_ids.add(request_id)
        if self._connector is not None:
            self._connector.on_new_request(view_of(request))
        if request.num_tokens >= request.max_total_tokens:
            self._waiting.announce(request)
            self._end_output(request, FinishReason.LENGTH_CAPPED, None, now)
            return
        if request.structured_output is not None:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        if parent is not None and self._forks.add(request, parent):
            return
        if request.structured_output is not None:
            self._waiting.add_blocked(request)
        else:
            self._waiting.add(request)

    def reject_message(self, malformed: Malformed, text: str, *, client: int) -> None:
        """A message about a request could not be read: the live one of its handle ends, for its
        client takes the answer for its own. If none lives, only who adds one waits for an answer.
        """
        handle = malformed.handle
        if (request := self.get(client, handle)) is not None:
            self.end(request, FinishReason.ERROR, message=text)
        elif isinstance(malformed, MalformedAdd):
            self._outputs.add_rejection(client, handle, FinishReason.ERROR, text, 0)
            self.log.unreadable(text, client=client, handle=handle)

    def continue_session(self, request: Request, chunk: ContinueSession, now: float) -> None:
        """More input for a resumable request; it waits while the session is not ready for it."""
        if not request.resumable:
            text = "it takes no more input: it is no session, or its last input has been given"
            self.end(request, FinishReason.ERROR, message=text)
            return
        if len(request.next_chunks) >= MAX_QUEUED_CHUNKS:
            text = f"more than {MAX_QUEUED_CHUNKS} chunks wait in this session"
            self.end(request, FinishReason.ERROR, message=text)
            return
        request.next_chunks.append(chunk)
        if request.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
            self._begin_next_chunk(request, now)

    def _begin_next_chunk(self, request: Request, now: float) -> None:
        chunk = request.next_chunks.pop(0)
        if closes_session(chunk):
            self.end(request, FinishReason.STOPPED)
            return
        refused = self._intake.chunk_rejection(chunk, num_tokens=request.num_tokens)
        if refused is not None:
            reason, text = refused
            self.end(request, reason, message=text)
            return
        request.begin_chunk(
            chunk,
            now=now,
            max_model_len=self._config.max_model_len,
            eos_token_ids=self._eos_token_ids,
        )
        if request.skip_reading_prefix_cache and self._forks.holds(request):
            self._forks.give_up(request)
        self._waiting.unpark(request)

    # Aside

    def preempt(self, request: Request, now: float) -> None:
        """Take row and blocks from a running request; it computes everything again later."""
        assert request.status is RequestStatus.RUNNING
        row = request.row
        (held,) = self._vacate_rows([request], is_void=False)
        self._kv_cache.release(held)
        self._plan.drop_preempted(row, request.request_id)
        self._put_back(request, now)

    def _put_back(self, request: Request, now: float) -> None:
        request.status = RequestStatus.PREEMPTED
        request.is_resumed = True
        request.num_preemptions += 1
        request.asks_connector = True
        request.events.append((RequestEvent.PREEMPTED, now))
        self.num_preemptions += 1
        self._waiting.put_back(request)
        self.log.preempted(request, step=self._plan.step + 1)

    def release_load(self, request: Request) -> None:
        """A waiting request lets go of its blocks, which a load has filled or which it holds, and
        starts from nothing."""
        self._kv_cache.release(self._take_held(request))
        request.asks_connector = True

    def release_youngest_load(self, *, besides: Request | None = None) -> bool:
        """The last resort when nothing else can run: of the waiting requests whose load has ended
        (`besides` apart) the one that began it last gives it up. False if there is none."""
        if not self._transfers.num_loading_blocks:
            return False
        ready = [
            other
            for other in self._waiting
            if other.held is not None and other is not besides and not self._forks.holds(other)
        ]
        if ready:
            self.release_load(max(ready, key=lambda request: request.load_number))
        return bool(ready)

    def end_load(self, load: EndedLoad) -> None:
        """A load is over: what it brought counts as computed, if anything."""
        request = load.request
        request.status = RequestStatus.WAITING
        self._waiting.unpark(request)
        request.held = load.held
        request.num_computed_tokens = min(load.num_good_tokens, request.num_tokens - 1)
        request.unwritten_block_ids = load.unwritten.tolist()

    def fail_load(self, load: EndedLoad) -> None:
        """A load is over that did not bring everything, and the policy is to fail."""
        self.end_load(load)
        text = "its KV could not be loaded, and load_failure_policy is 'fail'"
        self.end(load.request, FinishReason.ERROR, message=text)

    def stop_waiting(self, request: Request) -> None:
        """A request has waited for its load long enough: it computes everything itself, or fails,
        as the policy says. The load keeps its blocks."""
        if self._config.load_failure_policy == "fail":
            text = f"its KV was not loaded within load_timeout_s={self._config.load_timeout_s:g}"
            self.end(request, FinishReason.ERROR, message=text)
            return
        self._abandon_load(request)
        self._waiting.unpark(request)

    def _abandon_load(self, request: Request) -> None:
        self._transfers.abandon_load(request)
        assert self._connector is not None
        self._connector.load_abandoned(request.request_id)
        request.status = RequestStatus.WAITING

    # Out

    def end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        message: str | None = None,
        pooled: Float32Array | None = None,
        step: int | None = None,
    ) -> None:
        """End a live request, wherever it is, for a reason other than its last token; a pooling
        request with its vector. step: whose answer ends it, if that is still being applied."""
        held = self._vacate(request)
        self._forget(request, reason, held, message=message, pooled=pooled, step=step)

    def end_cut(self, request: Request, num_output_tokens: int, now: float) -> None:
        """End a live request STOPPED, with its output cut to so many tokens."""
        row, running = request.row, self._running
        has_computed = row >= 0 and bool(running.num_tokens[row] > running.num_known[row])
        held = self._vacate(request)
        num_kept = request.num_prompt_tokens + max(num_output_tokens, 0)
        request.token_ids = request.token_ids[:num_kept]
        request.block_hashes = []
        self._end_output(request, FinishReason.STOPPED, held, now, has_computed=has_computed)

    def end_after_token(self, request: Request, now: float) -> None:
        """End a live request whose last token stops it, fills its length or repeats its output."""
        self._end_after_token(request, self._vacate(request), now)

    def end_stopped(self, requests: Sequence[Request], now: float) -> None:
        """`end_after_token` for requests that all run."""
        for request in requests:
            self._plan.drop_finished(request.row, request.request_id)
        tables = self._vacate_rows(requests, is_void=True)
        for request, held in zip(requests, tables, strict=True):
            self._end_after_token(request, held, now)

    def _end_after_token(self, request: Request, held: HeldBlocks | None, now: float) -> None:
        token_id, num_tokens = int(request.token_ids[-1]), request.num_tokens
        reason = FinishReason.REPETITION
        if request.is_stopped_by(token_id, num_tokens):
            reason = FinishReason.STOPPED
            if token_id in request.sampling.stop_token_ids:
                request.stop_reason = token_id
        elif num_tokens >= request.max_total_tokens:
            reason = FinishReason.LENGTH_CAPPED
        self._end_output(request, reason, held, now)

    def _end_output(
        self,
        request: Request,
        reason: FinishReason,
        held: HeldBlocks | None,
        now: float,
        *,
        has_computed: bool = True,
    ) -> None:
        """The output is complete; a session goes on with its next input. `has_computed`: `held` is
        the KV of all its tokens but the last, and maybe more."""
        if not request.resumable or self._is_last_output(request):
            self._forget(request, reason, held)
            return
        if held is not None:
            if has_computed and request.keeps_blocks and self._kv_cache.can_fork:
                held, rest = self._kv_cache.cut(held, request.num_tokens - 1)
                self._forks.hold(request, held, request.num_tokens - 1)
                held = rest
            self._kv_cache.release(held)
        self._outputs.add_finish(request, reason, session_continues=True)
        request.num_prompt_tokens = request.num_tokens
        request.num_cached_tokens = NOT_SCHEDULED
        request.is_resumed = False
        request.resume_after_step = 0
        self._in_flight.void_past_occupants(request)  # they belong to the output that has ended
        request.status = RequestStatus.WAITING_FOR_STREAMING_REQ
        self._waiting.park(request)
        if request.next_chunks:
            self._begin_next_chunk(request, now)

    def _is_last_output(self, request: Request) -> bool:
        """A session ends with the output it has now."""
        is_full = request.num_tokens >= self._config.max_model_len
        is_closed = bool(request.next_chunks) and closes_session(request.next_chunks[0])
        return is_full or is_closed

    def _vacate(self, request: Request) -> HeldBlocks | None:
        """Out of the queue or off the row; returns blocks that are still referenced."""
        if request.row >= 0:
            self._plan.drop_finished(request.row, request.request_id)
            return self._vacate_rows([request], is_void=True)[0]
        self._forks.parent_ends(request)
        self._forks.drop(request)
        self._waiting.remove(request)
        if request.held is not None:
            return self._take_held(request)
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._abandon_load(request)
        return None

    def _vacate_rows(self, requests: Sequence[Request], *, is_void: bool) -> list[HeldBlocks]:
        """Off their rows; tokens may still be on their way, and mean nothing if `is_void`: then
        they do not come back as what they were."""
        if is_void:
            for request in requests:
                self._forks.parent_ends(request)
        tables = [self._kv_cache.detach(request.row) for request in requests]
        if len(self._in_flight):  # plans that are not answered may still compute on these blocks
            newest_step = self._in_flight.newest_step
            for request, held in zip(requests, tables, strict=True):
                row = request.row
                self._kv_cache.fence(held, newest_step)
                self._in_flight.note_vacated(
                    request,
                    int(self._running.generation[row]),
                    tables=held.block_ids,
                    expects_tokens=bool(self._running.num_placeholders[row]),
                    void_through=newest_step if is_void else int(self._running.void_through[row]),
                )
        self._running.release(requests)
        for request in requests:
            if request.lora is not None:
                self._loras.leave(request.lora.name)
            if request.multimodal:
                self._encoder.withdraw(request)
        return tables

    def _take_held(self, request: Request) -> HeldBlocks:
        if self._forks.holds(request):
            return self._forks.take_over(request)
        held = request.held
        assert held is not None
        request.held = None
        request.num_computed_tokens = 0
        self._transfers.num_loading_blocks -= num_blocks_of(held)
        return held

    def _forget(
        self,
        request: Request,
        reason: FinishReason,
        held: HeldBlocks | None,
        *,
        message: str | None = None,
        pooled: Float32Array | None = None,
        step: int | None = None,
    ) -> None:
        """The request is on no row and in no queue; connector and client are told."""
        del self._requests[request.client_index, request.handle]
        self._request_ids.discard(request.request_id)
        departure = _NO_CONNECTOR
        if self._connector is not None:
            departure = self._connector.request_finished(view_of(request), self._tables(held))
        if departure.delay_free and held is not None:
            self._transfers.begin_send(request.request_id, held)
        elif held is not None:
            self._kv_cache.release(held)
        self._outputs.add_finish(
            request,
            reason,
            message=message,
            pooled=pooled,
            kv_transfer_params=departure.params,
        )
        step = self._in_flight.last_answered_step if step is None else step
        self.log.ended(request, reason, step=step, text=message)

    def _tables(self, held: HeldBlocks | None) -> tuple[Int32Array, ...]:
        return (EMPTY_INT32,) * self._kv_cache.num_groups if held is None else held.block_ids

    def clear_rows(self, now: float) -> None:
        """The workers are gone, and with them every row: running requests go back to the front of
        the queue in admission order, sampled tokens that never came are void."""
        running = self._running.requests_in_order()
        self._running.release(running)
        for request in reversed(running):
            self._loras.leave(request.lora_name)
            self._put_back(request, now)
        self._forks.begin_epoch()
        for request in self._requests.values():
            request.resume_after_step = 0
            request.held = None
            request.num_computed_tokens = 0
            request.asks_connector = True
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                request.status = RequestStatus.WAITING
                self._waiting.unpark(request)


def closes_session(chunk: ContinueSession) -> bool:
    """The chunk brings nothing, and nothing comes behind it."""
    return not len(chunk.prompt_token_ids) and not chunk.resumable


def view_of(request: Request) -> RequestView:
    """A request that does not run, as a connector may see it."""
    token_ids = request.token_ids.view()
    token_ids.setflags(write=False)
    return RequestView(
        request_id=request.request_id,
        token_ids=token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        block_hashes=request.block_hashes,
        kv_transfer_params=request.kv_transfer_params,
        cache_salt=request.cache_salt,
        lora_name=request.lora_name,
        job_id=request.job_id,
    )
