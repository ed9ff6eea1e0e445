"""Resumable requests: when an output ends, the request waits for its client's next input.

Between two inputs it holds its KV if it `keeps_blocks`; its KV may be in the prefix cache in any
case. The tokens of all previous inputs and outputs are part of the prompt of the next output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import ContinueSession
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.part import SchedulerPart
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
from longshore.scheduler.validation import RequestValidator

MAX_QUEUED_CHUNKS: Final = 1024
"""Limit for the queued inputs of one session."""


@dataclass(slots=True, kw_only=True)
class Sessions(SchedulerPart):
    """end: ends a request for good, see `Lifecycle.end`.
    num_between: sessions that wait for their clients' next inputs.
    """

    validator: RequestValidator
    outputs: ClientOutputs
    eos_token_ids: tuple[int, ...]
    end: Callable[[Request, Outcome, float], None]
    num_between: int = 0

    def receive(self, request: Request, chunk: ContinueSession, now: float) -> None:
        """Receive input for a session; it is queued while the session is not ready for it."""
        problem = None
        if not request.resumable:
            problem = "it takes no more input: it is not a session, or it has had its last input"
        elif len(request.next_chunks) >= MAX_QUEUED_CHUNKS:
            problem = f"more than {MAX_QUEUED_CHUNKS} inputs are queued in this session"
        if problem is not None:
            self.end(request, Outcome(FinishReason.ERROR, problem), now)
            return
        request.next_chunks.append(chunk)
        if request.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
            self._begin_next_chunk(request, now)

    def continues(self, request: Request) -> bool:
        """Whether the session continues after its current output."""
        if not request.resumable or request.num_tokens >= self.config.max_model_len:
            return False
        return not (request.next_chunks and closes_session(request.next_chunks[0]))

    def pause(
        self,
        request: Request,
        reason: FinishReason,
        blocks: HeldBlocks | None,
        now: float,
        *,
        is_computed: bool,
    ) -> None:
        """The output has ended; the request has neither a row nor a position in a queue.

        is_computed: `blocks` hold the KV of all its tokens, except perhaps the last.
        """
        if blocks is not None:
            if is_computed and request.keeps_blocks and self.kv_cache.can_fork:
                num_computed = request.num_tokens - 1
                kept, blocks = self.kv_cache.cut(blocks, num_computed)
                order = self.holds.next_order()
                self.holds.add(request, Hold(HoldKind.SESSION, kept, num_computed, order))
            self.kv_cache.release(blocks)
        self.outputs.add_finish(request, reason, session_continues=True)
        if self.trace is not None:
            self.trace.ended(request, reason, now, continues=True)
        request.change(RequestChange.OUTPUT_ENDED)
        request.num_prompt_tokens = request.num_tokens
        request.num_cached_tokens = NOT_SCHEDULED
        request.is_resumed = False
        request.resume_after_step = 0
        self.in_flight.void_past_occupants(request)  # their tokens are of the output that has ended
        self.waiting.park(request)
        self.num_between += 1
        if request.next_chunks:
            self._begin_next_chunk(request, now)

    def _begin_next_chunk(self, request: Request, now: float) -> None:
        chunk = request.next_chunks.pop(0)
        if closes_session(chunk):
            self.end(request, Outcome(FinishReason.STOPPED), now)
            return
        rejection = self.validator.chunk_rejection(chunk, num_tokens=request.num_tokens)
        if rejection is not None:
            self.end(request, Outcome(*rejection), now)
            return
        request.begin_chunk(
            chunk,
            now=now,
            max_model_len=self.config.max_model_len,
            eos_token_ids=self.eos_token_ids,
        )
        if self.trace is not None:
            self.trace.queued(request, now)
        if request.skip_reading_prefix_cache and request.hold is not None:
            self.holds.release(request)
        self.waiting.unpark(request)
        self.num_between -= 1

    def left_queue(self, request: Request) -> None:
        """A waiting request ends."""
        self.num_between -= request.status is RequestStatus.WAITING_FOR_STREAMING_REQ


def closes_session(chunk: ContinueSession) -> bool:
    """Whether the chunk has no tokens and is the last one."""
    return not len(chunk.prompt_token_ids) and not chunk.resumable
