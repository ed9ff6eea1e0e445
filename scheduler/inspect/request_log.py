"""What the log says of requests: each one's life at debug, and as warnings the ends that somebody
should look at. Never what a request says, only how much."""

import logging

from longshore.protocol.logs.limits import LogLimit
from longshore.protocol.logs.records import fields
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest
from longshore.scheduler.request import Request

logger = logging.getLogger(__name__)


class RequestLog:
    """One line per call, in debug. Of warnings come as many as a `LogLimit` lets pass: one for what
    clients cause, who could hide the engine's own failures else, and one for those."""

    def __init__(self) -> None:
        self._refusals = LogLimit(logger)
        self._failures = LogLimit(logger)

    def arrived(self, message: AddRequest, *, client: int) -> None:
        """It is looked at now: queued or refused."""
        if logger.isEnabledFor(logging.DEBUG):
            about = fields(
                request_id=message.request_id,
                client=client,
                prompt_tokens=len(message.prompt_token_ids),
                output_tokens=len(message.output_token_ids) or None,
                max_tokens=message.sampling.max_tokens,
                priority=message.priority or None,
            )
            logger.debug("a request has arrived", extra=about)

    def rejected(self, request_id: str, reason: FinishReason, text: str) -> None:
        """It was not queued."""
        self._refusals.warning(
            "a request is refused: %s", text, request_id=request_id, finish_reason=reason.name
        )

    def unreadable(self, text: str, *, client: int, handle: int) -> None:
        """It could not be read but for its handle."""
        self._refusals.warning(
            "request with handle %d of client %d is refused: %s", handle, client, text
        )

    def admitted(self, request: Request, *, step: int, num_computed: int, now: float) -> None:
        """It runs from this step on, which its events tell already."""
        if logger.isEnabledFor(logging.DEBUG):
            about = fields(
                request_id=request.request_id,
                step_id=step,
                row=request.row,
                found_tokens=num_computed,
                waited_ms=(now - request.events[-2][1]) * 1e3,
                preemptions=request.num_preemptions or None,
            )
            logger.debug("admitted", extra=about)

    def preempted(self, request: Request, *, step: int) -> None:
        """It has lost its row, and waits again."""
        if logger.isEnabledFor(logging.DEBUG):
            about = fields(
                request_id=request.request_id,
                step_id=step,
                tokens=request.num_tokens,
                preemptions=request.num_preemptions,
            )
            logger.debug("preempted: it computes everything again later", extra=about)

    def rewound(self, request: Request, *, step: int, num_tokens: int) -> None:
        """KV behind so many of its tokens was wrong."""
        if logger.isEnabledFor(logging.DEBUG):
            about = fields(request_id=request.request_id, step_id=step, good_tokens=num_tokens)
            logger.debug("sent back: it computes what lies behind good KV again", extra=about)

    def not_finite(self, request: Request, *, step: int, num_nans: int) -> None:
        """Why it is going to end."""
        self._failures.warning(
            "logits are not finite", request_id=request.request_id, step_id=step, nans=num_nans
        )

    def ended(self, request: Request, reason: FinishReason, *, step: int, text: str | None) -> None:
        """It is on no row and in no queue any more. step: the newest that is answered. text: what
        its client is told."""
        if reason in (FinishReason.ERROR, FinishReason.IGNORED):
            limit = self._failures if reason is FinishReason.ERROR else self._refusals
            limit.warning(
                "a request has failed: %s",
                text,
                request_id=request.request_id,
                step_id=step,
                finish_reason=reason.name,
                output_tokens=request.num_output_tokens,
            )
        elif logger.isEnabledFor(logging.DEBUG):
            about = fields(
                request_id=request.request_id,
                step_id=step,
                finish_reason=reason.name,
                output_tokens=request.num_output_tokens,
                cached_tokens=max(request.num_cached_tokens, 0),
                preemptions=request.num_preemptions,
            )
            logger.debug("ended", extra=about)
