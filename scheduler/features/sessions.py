"""Resumable requests: when an output ends, the request waits for its client's next input.

Between two inputs it holds its KV if it `keeps_blocks`; its KV may be in the prefix cache in any
case. The tokens of all previous inputs and outputs are part of the prompt of the next output.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Protocol

from longshore.protocol.errors import LongshoreError
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import ContinueSession
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.hooks import SchedulerFeature
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.kv_cache.holds import Holds
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.queue.queues import WaitingRequests
from longshore.scheduler.request import (
    NOT_SCHEDULED,
    Hold,
    HoldKind,
    Outcome,
    Request,
    RequestChange,
    RequestStatus,
)
from longshore.scheduler.step.client_outputs import ClientOutputs
from longshore.scheduler.step.in_flight import StepsInFlight
from longshore.scheduler.validation import RequestValidator

MAX_QUEUED_CHUNKS: Final = 1024
"""Limit for the queued inputs of one session."""


class SessionObserver(Protocol):
    def paused(self, request: Request, outcome: Outcome, now: float) -> None:
        """The output of a session that goes on has ended."""

    def continued(self, request: Request, now: float) -> None:
        """A session is about to be queued with its next input."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sessions(SchedulerFeature):
    """Continues requests with further input. No hook runs until the first session arrives.

    num_between: sessions that wait for their clients' next inputs.
    """

    config: SchedulerConfig
    waiting: WaitingRequests
    holds: Holds
    kv_cache: KVCacheManager
    in_flight: StepsInFlight
    validator: RequestValidator
    outputs: ClientOutputs
    eos_token_ids: tuple[int, ...]
    lifecycle: Lifecycle
    observers: list[SessionObserver] = field(default_factory=list)
    num_between: int = 0

    def receive(self, request: Request, chunk: ContinueSession, now: float) -> None:
        """Receive input for a session; it is queued while the session is not ready for it."""
        problem = None
        if not request.options.resumable:
            problem = "it takes no more input: it is not a session, or it has had its last input"
        elif len(request.next_chunks) >= MAX_QUEUED_CHUNKS:
            problem = f"more than {MAX_QUEUED_CHUNKS} inputs are queued in this session"
        if problem is not None:
            self.lifecycle.end(request, Outcome(FinishReason.ERROR, problem), now)
            return
        request.next_chunks.append(chunk)
        if request.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
            self._begin_next_chunk(request, now)

    def output_ended(
        self,
        request: Request,
        outcome: Outcome,
        blocks: HeldBlocks | None,
        now: float,
        *,
        ran: bool,
    ) -> bool:
        """A session goes on, unless it is too long, its client has closed it, or it has failed."""
        if not outcome.ends_output or not self._continues(request):
            return False
        if blocks is not None:
            # With a new token, the blocks of its row have the KV of all tokens but the last.
            is_computed = ran and request.has_new_token
            num_computed = self._num_held(request)
            if is_computed and request.options.keeps_blocks and num_computed:
                kept, blocks = self.kv_cache.cut(blocks, num_computed)
                order = self.holds.next_order()
                self.holds.add(request, Hold(HoldKind.SESSION, kept, num_computed, order))
            self.kv_cache.release(blocks)
        self.outputs.add_finish(request, outcome.reason, session_continues=True)
        for observer in self.observers:
            observer.paused(request, outcome, now)
        request.change(RequestChange.OUTPUT_ENDED)
        request.num_prompt_tokens = request.num_tokens
        request.num_cached_tokens = NOT_SCHEDULED
        request.is_resumed = False
        # An unanswered plan may have computed the last token, too.
        is_ahead = request.num_computed_tokens == request.num_tokens
        request.resume_after_step = self.in_flight.newest_step if is_ahead else 0
        self.in_flight.void_past_occupants(request)  # their tokens are of the output that has ended
        self.waiting.park(request)
        self.num_between += 1
        if request.next_chunks:
            self._begin_next_chunk(request, now)
        return True

    def _num_held(self, request: Request) -> int:
        """Leading tokens with which the next input can begin, of those that the row has computed;
        0: with none. A state must be that after exactly so many, so if a later plan has computed
        the last token, it is one of them; more than that are not part of the session."""
        num_tokens = request.num_tokens
        if not self.kv_cache.has_states:
            return num_tokens - 1 if self.kv_cache.can_fork else 0
        num_computed = request.num_computed_on_row
        is_exact = self.kv_cache.can_fork and num_tokens - 1 <= num_computed <= num_tokens
        return num_computed if is_exact else 0

    def _continues(self, request: Request) -> bool:
        if not request.options.resumable or request.num_tokens >= self.config.max_model_len:
            return False
        return not (request.next_chunks and closes_session(request.next_chunks[0]))

    def _begin_next_chunk(self, request: Request, now: float) -> None:
        chunk = request.next_chunks.pop(0)
        if closes_session(chunk):
            self.lifecycle.end(request, Outcome(FinishReason.STOPPED), now)
            return
        rejection = self.validator.chunk_rejection(chunk, num_tokens=request.num_tokens)
        if rejection is not None:
            self.lifecycle.end(request, Outcome(*rejection), now)
            return
        request.begin_chunk(
            chunk,
            now=now,
            max_model_len=self.config.max_model_len,
            eos_token_ids=self.eos_token_ids,
        )
        for observer in self.observers:
            observer.continued(request, now)
        if request.hold is not None and (
            request.skips_prefix_cache or request.num_computed_tokens == request.num_tokens
        ):
            self.holds.release(request)
        self.waiting.unpark(request)
        self.num_between -= 1

    def ending(self, request: Request, now: float) -> None:
        """The request may be a session that waits for its client."""
        self.num_between -= request.status is RequestStatus.WAITING_FOR_STREAMING_REQ

    def check(self, running: Collection[Request], waiting: Collection[Request]) -> None:
        """The sessions that wait for their clients are counted."""
        between = RequestStatus.WAITING_FOR_STREAMING_REQ
        num_between = sum(request.status is between for request in waiting)
        if num_between != self.num_between:
            raise LongshoreError(
                f"{num_between} sessions wait for their clients, but {self.num_between} are counted"
            )


def closes_session(chunk: ContinueSession) -> bool:
    """Whether the chunk has no tokens and is the last one."""
    return not len(chunk.prompt_token_ids) and not chunk.resumable
