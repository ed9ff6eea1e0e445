"""The ways in and out of a request's life: queued, preempted, ended. Each has one place, here."""

from typing import Final

from longshore.connectors.base import Departure, RequestView, SchedulerConnector
from longshore.protocol.arrays import EMPTY_INT32, Float32Array, Int32Array
from longshore.protocol.client import AddRequest, ContinueSession, FinishReason, RequestEvent
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.encoder_cache import EncoderCache
from longshore.scheduler.in_flight import StepsInFlight
from longshore.scheduler.intake import Intake
from longshore.scheduler.kv_cache_manager import HeldBlocks, KVCacheManager
from longshore.scheduler.lora import LoRAPlaces
from longshore.scheduler.outputs import OutputBuckets
from longshore.scheduler.plan_builder import PlanBuilder
from longshore.scheduler.request import NOT_SCHEDULED, Request, RequestStatus
from longshore.scheduler.running import RunningTable
from longshore.scheduler.transfers import EndedLoad, Transfers, num_blocks_of
from longshore.scheduler.waiting import WaitingRequests

MAX_QUEUED_CHUNKS: Final = 1024
"""Chunks of one session that may wait for their turn."""


_NO_CONNECTOR: Final = Departure()


class Lifecycle:
    """All requests that have not ended, by client and handle, and the tables that they move among.

    eos_token_ids: end a request that does not ignore them.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        running: RunningTable,
        waiting: WaitingRequests,
        kv_cache: KVCacheManager,
        in_flight: StepsInFlight,
        plan: PlanBuilder,
        outputs: OutputBuckets,
        intake: Intake,
        loras: LoRAPlaces,
        encoder: EncoderCache,
        transfers: Transfers,
        connector: SchedulerConnector | None,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._config = config
        self._running = running
        self._waiting = waiting
        self._kv_cache = kv_cache
        self._in_flight = in_flight
        self._plan = plan
        self._outputs = outputs
        self._intake = intake
        self._loras = loras
        self._encoder = encoder
        self._transfers = transfers
        self._connector = connector
        self._eos_token_ids = eos_token_ids
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
        refused = self._intake.refusal(message, is_duplicate=is_duplicate)
        if refused is not None:
            reason, text = refused
            num_outputs = len(message.output_token_ids)
            self._outputs.add_refusal(client, message.handle, reason, text, num_outputs)
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
            self._forget(request, FinishReason.LENGTH_CAPPED, now)
            return
        if request.structured_output is not None:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            self._waiting.add_blocked(request)
        else:
            self._waiting.add(request)

    def continue_session(self, request: Request, chunk: ContinueSession, now: float) -> None:
        """More input for a resumable request; it waits while the session is not ready for it."""
        if not request.resumable:
            text = "it takes no more input: it is no session, or its last input has been given"
            self.end(request, FinishReason.ERROR, now, message=text)
            return
        if len(request.next_chunks) >= MAX_QUEUED_CHUNKS:
            text = f"more than {MAX_QUEUED_CHUNKS} chunks wait in this session"
            self.end(request, FinishReason.ERROR, now, message=text)
            return
        request.next_chunks.append(chunk)
        if request.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
            self._begin_next_chunk(request, now)

    def _begin_next_chunk(self, request: Request, now: float) -> None:
        chunk = request.next_chunks.pop(0)
        if closes_session(chunk):
            self.end(request, FinishReason.STOPPED, now)
            return
        refused = self._intake.chunk_refusal(chunk, num_tokens=request.num_tokens)
        if refused is not None:
            reason, text = refused
            self.end(request, reason, now, message=text)
            return
        request.begin_chunk(
            chunk,
            now=now,
            max_model_len=self._config.max_model_len,
            eos_token_ids=self._eos_token_ids,
        )
        self._waiting.unpark(request)

    # Aside

    def preempt(self, request: Request, now: float) -> None:
        """Take row and blocks from a running request; it computes everything again later."""
        assert request.status is RequestStatus.RUNNING
        row = request.row
        self._kv_cache.release(self._leave_row(request, is_void=False))
        self._plan.drop_preempted(row, request.request_id)
        request.status = RequestStatus.PREEMPTED
        request.is_resumed = True
        request.num_preemptions += 1
        request.asks_connector = True
        request.events.append((RequestEvent.PREEMPTED, now))
        self.num_preemptions += 1
        self._waiting.put_back(request)

    def give_up_load(self, request: Request) -> None:
        """A waiting request whose load has ended lets go of its blocks, and starts from nothing."""
        assert request.held is not None
        self._kv_cache.release(self._take_held(request))
        request.asks_connector = True

    def give_up_youngest_load(self, *, besides: Request | None = None) -> bool:
        """The last resort when nothing else can run: of the waiting requests whose load has ended
        (`besides` apart) the one that began it last gives it up. False if there is none."""
        if not self._transfers.num_loading_blocks:
            return False
        ready = [
            other for other in self._waiting if other.held is not None and other is not besides
        ]
        if ready:
            self.give_up_load(max(ready, key=lambda request: request.load_number))
        return bool(ready)

    def end_load(self, load: EndedLoad) -> None:
        """A load is over: what it brought counts as computed, if anything."""
        request = load.request
        request.status = RequestStatus.WAITING
        self._waiting.unpark(request)
        request.held = load.held
        request.num_computed_tokens = min(load.num_good_tokens, request.num_tokens - 1)
        request.unwritten_block_ids = load.unwritten.tolist()

    def fail_load(self, load: EndedLoad, now: float) -> None:
        """A load is over that did not bring everything, and the policy is to fail."""
        self.end_load(load)
        text = "its KV could not be loaded, and load_failure_policy is 'fail'"
        self.end(load.request, FinishReason.ERROR, now, message=text)

    def give_up_waiting(self, request: Request, now: float) -> None:
        """A request has waited for its load long enough: it computes everything itself, or fails,
        as the policy says. The load keeps its blocks."""
        if self._config.load_failure_policy == "fail":
            text = f"its KV was not loaded within load_timeout_s={self._config.load_timeout_s:g}"
            self.end(request, FinishReason.ERROR, now, message=text)
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
        self, request: Request, reason: FinishReason, now: float, *, message: str | None = None
    ) -> None:
        """End a live request, wherever it is, for a reason other than its last token."""
        held = self._leave(request)
        self._forget(request, reason, now, held=held, message=message)

    def end_cut(self, request: Request, num_output_tokens: int, now: float) -> None:
        """End a live request STOPPED, with its output cut to so many tokens."""
        held = self._leave(request)
        num_kept = request.num_prompt_tokens + max(num_output_tokens, 0)
        request.token_ids = request.token_ids[:num_kept]
        request.block_names = []
        self._end_output(request, FinishReason.STOPPED, now, held=held)

    def end_after_token(self, request: Request, token_id: int, now: float) -> None:
        """End a live request whose last token, `token_id`, stops it or fills its length."""
        held = self._leave(request)
        if request.is_stopped_by(token_id):
            is_stop_id = token_id in request.sampling.stop_token_ids
            stop_token_id = token_id if is_stop_id else None
            self._end_output(
                request, FinishReason.STOPPED, now, held=held, stop_token_id=stop_token_id
            )
        elif request.num_tokens >= request.max_total_tokens:
            self._end_output(request, FinishReason.LENGTH_CAPPED, now, held=held)
        else:
            self._end_output(request, FinishReason.REPETITION, now, held=held)

    def end_pooled(self, request: Request, pooled: Float32Array, now: float) -> None:
        """End a pooling request with its vector."""
        held = self._leave(request)
        self._forget(request, FinishReason.STOPPED, now, held=held, pooled=pooled)

    def _end_output(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        *,
        held: HeldBlocks | None,
        stop_token_id: int | None = None,
    ) -> None:
        """The output is complete; a session goes on with its next input."""
        if not request.resumable or self._is_last_output(request):
            self._forget(request, reason, now, held=held, stop_token_id=stop_token_id)
            return
        if held is not None:
            self._kv_cache.release(held)
        self._outputs.add_finish(
            request, reason, stop_token_id=stop_token_id, session_continues=True
        )
        request.num_prompt_tokens = request.num_tokens
        request.num_cached_tokens = NOT_SCHEDULED
        request.is_resumed = False
        request.resume_after_step = 0
        self._in_flight.void_departed(request)  # they belong to the output that has ended
        request.status = RequestStatus.WAITING_FOR_STREAMING_REQ
        self._waiting.park(request)
        if request.next_chunks:
            self._begin_next_chunk(request, now)

    def _is_last_output(self, request: Request) -> bool:
        """A session ends with the output it has now."""
        is_full = request.num_tokens >= self._config.max_model_len
        is_closed = bool(request.next_chunks) and closes_session(request.next_chunks[0])
        return is_full or is_closed

    def _leave(self, request: Request) -> HeldBlocks | None:
        """Out of the queue or off the row; returns blocks that are still referenced."""
        row = request.row
        if row >= 0:
            self._plan.drop_finished(row, request.request_id)
            return self._leave_row(request, is_void=True)
        self._waiting.remove(request)
        if request.held is not None:
            return self._take_held(request)
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._abandon_load(request)
        return None

    def _leave_row(self, request: Request, *, is_void: bool) -> HeldBlocks:
        """Off its row; tokens may still be on their way, and mean nothing if `is_void`."""
        row = request.row
        newest_step = self._in_flight.newest_step
        held = self._kv_cache.detach(row)
        if len(self._in_flight):  # plans that are not answered may still compute on these blocks
            self._kv_cache.fence(held, newest_step)
        self._in_flight.note_departure(
            request,
            int(self._running.generation[row]),
            tables=held.block_ids,
            expects_tokens=bool(self._running.num_placeholders[row]),
            void_through=newest_step if is_void else int(self._running.void_through[row]),
        )
        if request.lora is not None:
            self._loras.leave(request.lora.name)
        self._running.release(request)
        if request.multimodal:
            self._encoder.withdraw(request)
        return held

    def _take_held(self, request: Request) -> HeldBlocks:
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
        now: float,
        *,
        held: HeldBlocks | None = None,
        stop_token_id: int | None = None,
        message: str | None = None,
        pooled: Float32Array | None = None,
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
            stop_token_id=stop_token_id,
            message=message,
            pooled=pooled,
            kv_transfer_params=departure.params,
        )

    def _tables(self, held: HeldBlocks | None) -> tuple[Int32Array, ...]:
        return (EMPTY_INT32,) * self._kv_cache.num_groups if held is None else held.block_ids

    def clear_rows(self, now: float) -> None:
        """The workers are gone, and with them every row: running requests go back to the front of
        the queue in admission order, sampled tokens that never came are void."""
        for request in reversed(self._running.requests_in_order()):
            self._loras.leave(request.lora_name)
            self._running.release(request)
            request.status = RequestStatus.PREEMPTED
            request.is_resumed = True
            request.num_preemptions += 1
            request.events.append((RequestEvent.PREEMPTED, now))
            self.num_preemptions += 1
            self._waiting.put_back(request)
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
        block_names=request.block_names,
        kv_transfer_params=request.kv_transfer_params,
        cache_salt=request.cache_salt,
        lora_name=request.lora_name,
        job_id=request.job_id,
    )
