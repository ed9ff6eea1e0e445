"""Log lines about HTTP requests. At debug: one when a request is sent to the engine, one per answer
and one per exchange, which is at info as an access log. Warnings: rejected requests, and failures
caused by the server. Texts, tokens and keys are never logged.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from longshore.deploy.gateway.api.errors import reason_of, status_of
from longshore.deploy.gateway.rejection_log import REJECTED, RejectionLog
from longshore.deploy.requests.errors import RequestError
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.protocol.logs.limits import LogLimit
from longshore.protocol.logs.records import fields
from longshore.protocol.outputs import FinishReason

if TYPE_CHECKING:
    from longshore.deploy.requests.spans import RequestSpans

logger = logging.getLogger(__name__)

MAX_PATH_CHARACTERS: Final = 200
PROBES: Final = frozenset({"/health", "/ready", "/ping", "/metrics", "/load"})
"""Paths that programs ask for every few seconds."""


@dataclass
class HttpRequest:
    """One exchange in progress.

    request_id: from the client, or generated; part of the request ids in the engine.
    num_*_tokens: tokens of its prompts, and of all its answers.
    key:        name of its API key.
    user_agent: what the client calls itself.
    first_token_s: time of the first token of any answer, from `time.perf_counter`.
    log_level:  of its line in the access log.
    failure:    the error that it was answered with.
    bug:        the unexpected exception that it failed with.
    spans:      makes the spans of its requests to the engines, if they are exported.
    """

    request_id: str
    method: str
    path: str
    client: str | None
    arrived_s: float
    log_level: int = logging.DEBUG
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    key: str | None = None
    user_agent: str | None = None
    first_token_s: float | None = None
    failure: RequestError | None = None
    bug: Exception | None = None
    spans: "RequestSpans | None" = None


_current: ContextVar[HttpRequest | None] = ContextVar("http_request", default=None)


def current() -> HttpRequest | None:
    """The exchange of the current task; None if it has none."""
    return _current.get()


def note_failure(error: RequestError) -> None:
    """Record that the current exchange ends with this error."""
    request = _current.get()
    if request is not None:
        request.failure = error


def note_bug(error: Exception) -> None:
    """Record that the current exchange ends with an unexpected exception, to log its traceback."""
    request = _current.get()
    if request is not None:
        request.bug = error


class AccessLog:
    """The access log of one gateway. is_on: its lines are at info, instead of debug; those of
    probes, too, if `has_probes`."""

    def __init__(self, *, is_on: bool = False, has_probes: bool = False) -> None:
        self._level = logging.INFO if is_on else logging.DEBUG
        self._probe_level = self._level if has_probes else logging.DEBUG
        self._warnings = LogLimit(logger)
        self._rejections = RejectionLog(logger)

    def close(self) -> None:
        """Log the rejections that have only been counted so far."""
        self._rejections.close()

    def begin(
        self, request_id: str, method: str, path: str, client: tuple[str, int] | None
    ) -> HttpRequest:
        """Begin an exchange and make it the current one of this task."""
        shown = path if len(path) <= MAX_PATH_CHARACTERS else f"{path[:MAX_PATH_CHARACTERS]}..."
        address = None if client is None else f"{client[0]}:{client[1]}"
        arrived_s = time.perf_counter()
        level = self._probe_level if path in PROBES else self._level
        request = HttpRequest(request_id, method, shown, address, arrived_s, level)
        _current.set(request)
        return request

    def end(self, request: HttpRequest, status: int | None) -> None:
        """status: None if the client disconnected before the response."""
        failure = request.failure
        if failure is not None and status_of(failure) in REJECTED:
            self._rejections.rejected(
                failure,
                request_id=request.request_id,
                method=request.method,
                path=request.path,
                key=request.key,
                client=request.client,
            )
        elif request.bug is not None or (failure is not None and status_of(failure) >= 500):
            self._warnings.warning(
                "request failed: %s",
                failure or type(request.bug).__name__,
                exc_info=request.bug,
                request_id=request.request_id,
                method=request.method,
                path=request.path,
                status=500 if failure is None else status_of(failure),
            )
        _log_exchange("client disconnected" if status is None else "answered", request, status)


@contextmanager
def in_background() -> Iterator[None]:
    """The current exchange goes on after its response. Its end has a line of its own in the access
    log, with the tokens."""
    request = _current.get()
    try:
        yield
    finally:
        if request is not None:
            _log_exchange("ended in the background", request)


def _log_exchange(message: str, request: HttpRequest, status: int | None = None) -> None:
    if not logger.isEnabledFor(request.log_level):
        return
    first_s, failure = request.first_token_s, request.failure
    about = fields(
        request_id=request.request_id,
        method=request.method,
        path=request.path,
        status=status,
        duration_ms=(time.perf_counter() - request.arrived_s) * 1e3,
        ttft_ms=None if first_s is None else (first_s - request.arrived_s) * 1e3,
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_output_tokens,
        key=request.key,
        client=request.client,
        error=None if failure is None else reason_of(failure),
    )
    logger.log(request.log_level, message, extra=about)


def answers_begin(
    request_id: str, *, num_answers: int, num_prompt_tokens: int, max_tokens: int | None
) -> None:
    """An endpoint submits requests to the engine; their ids begin with `request_id`."""
    request = _current.get()
    if request is not None:
        request.num_prompt_tokens = (request.num_prompt_tokens or 0) + num_prompt_tokens
    if logger.isEnabledFor(logging.DEBUG):
        about = fields(
            request_id=request_id,
            prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            answers=num_answers,
            client=None if request is None else request.client,
        )
        logger.debug("request received", extra=about)


def answer_ended(
    request_id: str,
    *,
    reason: FinishReason,
    num_output_tokens: int,
    arrived_s: float,
    first_token_s: float | None,
    live: LiveRequest | None = None,
    num_choices: int = 1,
) -> None:
    """An answer is complete or was aborted.

    arrived_s, first_token_s: from `time.perf_counter`, which on Linux is `time.monotonic`.
    live:        its request; None: it was not sent, or the answer is that of several requests.
    num_choices: answers to its prompt.
    """
    request = _current.get()
    if request is not None:
        if request.spans is not None and live is not None:
            request.spans.request_ended(
                live,
                reason,
                arrived_s=arrived_s,
                first_token_s=first_token_s,
                num_output_tokens=num_output_tokens,
                num_choices=num_choices,
            )
        request.num_output_tokens = (request.num_output_tokens or 0) + num_output_tokens
        if first_token_s is not None:
            request.first_token_s = min(first_token_s, request.first_token_s or first_token_s)
    if logger.isEnabledFor(logging.DEBUG):
        about = fields(
            request_id=request_id,
            finish_reason=reason.name,
            output_tokens=num_output_tokens,
            ttft_ms=None if first_token_s is None else (first_token_s - arrived_s) * 1e3,
            total_ms=(time.perf_counter() - arrived_s) * 1e3,
        )
        logger.debug("finished", extra=about)
