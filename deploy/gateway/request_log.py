"""What the log says of HTTP requests: at debug a line when answers are asked for, one per answer
and one per exchange; as warnings what the server is at fault for. Never a text, a token or a key.
"""

import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from longshore.deploy.gateway.openai.errors import ApiError
from longshore.protocol.logs.limits import LogLimit
from longshore.protocol.logs.records import fields

logger = logging.getLogger(__name__)

MAX_PATH_CHARACTERS: Final = 200


@dataclass
class HttpRequest:
    """One exchange, while it lasts.

    request_id: of the client, or made here; part of the ids that the engine knows.
    num_*_tokens: of its prompts, and of all its answers.
    failure:    why it did not get what it asked for.
    bug:        what nobody had expected, if that is why.
    """

    request_id: str
    method: str
    path: str
    client: str | None
    arrived_s: float
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    failure: ApiError | None = None
    bug: Exception | None = None


_current: ContextVar[HttpRequest | None] = ContextVar("http_request", default=None)


def current() -> HttpRequest | None:
    """The exchange that this task works on; None outside of any."""
    return _current.get()


def note_failure(error: ApiError) -> None:
    """The exchange at hand ends with this error."""
    request = _current.get()
    if request is not None:
        request.failure = error


def note_bug(error: Exception) -> None:
    """The exchange at hand ends for an exception that nobody expected; its traceback is logged."""
    request = _current.get()
    if request is not None:
        request.bug = error


class AccessLog:
    """Of one gateway."""

    def __init__(self) -> None:
        self._warnings = LogLimit(logger)

    def begin(
        self, request_id: str, method: str, path: str, client: tuple[str, int] | None
    ) -> HttpRequest:
        """An exchange, which what this task calls from now on finds as the current one."""
        shown = path if len(path) <= MAX_PATH_CHARACTERS else f"{path[:MAX_PATH_CHARACTERS]}..."
        address = None if client is None else f"{client[0]}:{client[1]}"
        request = HttpRequest(request_id, method, shown, address, time.perf_counter())
        _current.set(request)
        return request

    def end(self, request: HttpRequest, status: int | None) -> None:
        """status: None if the client had gone before there was one."""
        failure = request.failure
        if request.bug is not None or (failure is not None and failure.status >= 500):
            self._warnings.warning(
                "a request has failed: %s",
                failure or type(request.bug).__name__,
                exc_info=request.bug,
                request_id=request.request_id,
                method=request.method,
                path=request.path,
                status=500 if failure is None else failure.status,
            )
        if logger.isEnabledFor(logging.DEBUG):
            about = fields(
                request_id=request.request_id,
                method=request.method,
                path=request.path,
                status=status,
                duration_ms=(time.perf_counter() - request.arrived_s) * 1e3,
                prompt_tokens=request.num_prompt_tokens,
                output_tokens=request.num_output_tokens,
                client=request.client,
                error=None if failure is None else failure.body.code or failure.body.type,
            )
            logger.debug("client has gone" if status is None else "answered", extra=about)


def answers_begin(
    request_id: str, *, num_answers: int, num_prompt_tokens: int, max_tokens: int | None
) -> None:
    """An endpoint asks the engine for answers, whose ids begin with `request_id`."""
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
        logger.debug("a request has arrived", extra=about)


def answer_ended(
    request_id: str,
    *,
    reason: str,
    num_output_tokens: int,
    arrived_s: float,
    first_token_s: float | None,
) -> None:
    """The engine has given an answer, or nobody wants it any more. arrived_s, first_token_s: on
    the clock of `time.perf_counter`."""
    request = _current.get()
    if request is not None:
        request.num_output_tokens = (request.num_output_tokens or 0) + num_output_tokens
    if logger.isEnabledFor(logging.DEBUG):
        about = fields(
            request_id=request_id,
            finish_reason=reason,
            output_tokens=num_output_tokens,
            ttft_ms=None if first_token_s is None else (first_token_s - arrived_s) * 1e3,
            total_ms=(time.perf_counter() - arrived_s) * 1e3,
        )
        logger.debug("ended", extra=about)
