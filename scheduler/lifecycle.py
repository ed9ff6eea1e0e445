"""The ways in and out of a request's life: queued, preempted, ended. Each has one place, here."""

from longshore.protocol.client import AddRequest, FinishReason
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.in_flight import StepsInFlight
from longshore.scheduler.intake import refusal
from longshore.scheduler.kv_cache_manager import KVCacheManager
from longshore.scheduler.outputs import OutputBuckets
from longshore.scheduler.plan_builder import PlanBuilder
from longshore.scheduler.request import Request, RequestStatus
from longshore.scheduler.running import RunningTable
from longshore.scheduler.waiting import WaitingRequests


class Lifecycle:
    """All requests that have not ended, by client and handle, and the tables that they move among.

    vocab_size:    token ids of requests must stay below it.
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
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._config = config
        self._running = running
        self._waiting = waiting
        self._kv_cache = kv_cache
        self._in_flight = in_flight
        self._plan = plan
        self._outputs = outputs
        self._vocab_size = vocab_size
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

    def queue(self, message: AddRequest, *, client: int, now: float) -> None:
        """A request arrives; one that cannot be served is answered with the reason at once."""
        request = Request(
            message,
            client_index=client,
            now=now,
            max_model_len=self._config.max_model_len,
            eos_token_ids=self._eos_token_ids,
        )
        key = (client, message.handle)
        refused = refusal(
            message,
            config=self._config,
            vocab_size=self._vocab_size,
            is_duplicate=key in self._requests or message.request_id in self._request_ids,
        )
        if refused is not None:
            reason, text = refused
            num_outputs = request.num_output_tokens
            self._outputs.add_refusal(client, message.handle, reason, text, num_outputs)
            return
        self._requests[key] = request
        self._request_ids.add(request.request_id)
        if request.num_tokens >= request.max_total_tokens:
            self._forget(request, FinishReason.LENGTH_CAPPED)
        else:
            self._waiting.add(request)

    def preempt(self, request: Request) -> None:
        """Take row and blocks from a running request; it computes everything again later."""
        row = request.row
        self._release(request)
        self._plan.preempted_rows.append(row)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.put_back(request)

    def end(self, request: Request, reason: FinishReason, *, message: str | None = None) -> None:
        """End a live request, wherever it is, for a reason other than its last token."""
        self._leave(request)
        self._forget(request, reason, message=message)

    def end_cut(self, request: Request, num_output_tokens: int) -> None:
        """End a live request STOPPED, with its output cut to so many tokens."""
        self._leave(request)
        num_kept = request.num_prompt_tokens + max(num_output_tokens, 0)
        request.token_ids = request.token_ids[:num_kept]
        self._forget(request, FinishReason.STOPPED)

    def end_after_token(self, request: Request, token_id: int) -> None:
        """End a live request whose last token, `token_id`, stops it or fills its length."""
        self._leave(request)
        if not request.is_stopped_by(token_id):
            self._forget(request, FinishReason.LENGTH_CAPPED)
        elif token_id in request.sampling.stop_token_ids:
            self._forget(request, FinishReason.STOPPED, stop_token_id=token_id)
        else:
            self._forget(request, FinishReason.STOPPED)

    def _leave(self, request: Request) -> None:
        row = request.row
        if row >= 0:
            self._release(request)
            self._plan.finished_rows.append(row)
        else:
            self._waiting.remove(request)

    def _release(self, request: Request) -> None:
        """Off its row, without its blocks; tokens may still be on their way."""
        row = request.row
        if self._running.num_placeholders[row]:
            self._in_flight.note_departure(request, int(self._running.generation[row]))
        self._kv_cache.free(row)
        self._running.release(request)

    def _forget(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        message: str | None = None,
    ) -> None:
        """The request is on no row and in no queue; its client is told."""
        del self._requests[request.client_index, request.handle]
        self._request_ids.discard(request.request_id)
        self._outputs.add_finish(request, reason, stop_token_id=stop_token_id, message=message)
