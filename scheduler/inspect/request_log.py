"""The log of requests: the life of each at debug level, and failures and rejections as warnings.
Logs how many tokens a request has, never their content."""

import logging

from longshore.protocol.logs.limits import LogLimit
from longshore.protocol.logs.records import fields
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest
from longshore.scheduler.request import Request

logger = logging.getLogger(__name__)


class RequestLog:
    """Logs the events of requests, one line per call. Warnings are rate-limited by two `LogLimit`s:
    one for rejections, which clients can cause, and one for failures, so that rejections cannot
    hide them."""

    def __init__(self) -> None:
        self._rejections = LogLimit(logger)
        self._failures = LogLimit(logger)

    def arrived(self, message: AddRequest, *, client: int) -> None:
        """A request was received; next it is queued or rejected."""
        if logger.isEnabledFor(logging.DEBUG):
            about = fields(
                request_id=message.request_id,
                client=client,
                prompt_tokens=len(message.prompt_token_ids),
                output_tokens=len(message.output_token_ids) or None,
                max_tokens=message.sampling.max_tokens,
                priority=message.options.priority or None,
            )
            logger.debug("a request has arrived", extra=about)

    def rejected(self, request_id: str, reason: FinishReason, text: str) -> None:
        """A request was not queued."""
        self._rejections.warning(
            "request rejected: %s", text, request_id=request_id, finish_reason=reason.name
        )

    def unreadable(self, text: str, *, client: int, handle: int) -> None:
        """Only the handle of a request could be decoded."""
        self._rejections.warning(
            "request with handle %d of client %d rejected: %s", handle, client, text
        )

    def admitted(self, request: Request, *, step: int, num_computed: int, now: float) -> None:
        """The request runs from this step on; its events are up to date."""
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
        """The request has lost its row and waits again."""
        if logger.isEnabledFor(logging.DEBUG):
            about = fields(
                request_id=request.request_id,
                step_id=step,
                tokens=request.num_tokens,
                preemptions=request.num_preemptions,
            )
            fate = "loaded again" if request.is_swapped else "recomputed"
            logger.debug("preempted: all its tokens will be %s", fate, extra=about)

    def rewound(self, request: Request, *, step: int, num_tokens: int) -> None:
        """KV after the request's first `num_tokens` tokens was wrong."""
        if logger.isEnabledFor(logging.DEBUG):
            about = fields(request_id=request.request_id, step_id=step, good_tokens=num_tokens)
            logger.debug("rewound: tokens after the last good KV will be recomputed", extra=about)

    def not_finite(self, request: Request, *, step: int, num_nans: int) -> None:
        """The request is about to end for this reason."""
        self._failures.warning(
            "logits are not finite", request_id=request.request_id, step_id=step, nans=num_nans
        )

    def ended(self, request: Request, reason: FinishReason, *, step: int, text: str | None) -> None:
        """The request has neither a row nor a position in a queue. step: the newest answered one.
        text: the message to its client."""
        if reason in (FinishReason.ERROR, FinishReason.IGNORED):
            limit = self._failures if reason is FinishReason.ERROR else self._rejections
            limit.warning(
                "request failed: %s",
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
