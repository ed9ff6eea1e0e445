"""Why a request is not served, without HTTP and in no vendor's format."""

from typing import Final

from longshore.protocol.errors import shortened
from longshore.protocol.outputs import FinishedRequest, FinishReason
from longshore.protocol.requests import CONSTRAINT_TOO_COMPLEX

MAX_MESSAGE_CHARACTERS: Final = 1000


class RequestError(Exception):
    """A request that cannot be served. param: the parameter at fault. code: for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(shortened(message, MAX_MESSAGE_CHARACTERS))
        self.param = param and shortened(param)
        self.code = code


class InvalidRequest(RequestError):
    """The client must change the request."""


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the model. num_tokens: of the prompt, at least. maximum: how many may
    be sent."""

    def __init__(self, message: str, *, param: str, num_tokens: int, maximum: int) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.num_tokens = num_tokens
        self.maximum = maximum


class RateLimited(RequestError):
    """The request is valid; the client should retry after that time."""

    def __init__(self, message: str, code: str, *, retry_after_s: int) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class Unavailable(RequestError):
    """The request is valid; the client should retry later or elsewhere."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="engine_unavailable")


class RequestFailed(RequestError):
    """The engine failed on this request."""


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> InvalidRequest:
    return InvalidRequest(message, param=param, code=code)


def check_end(end: FinishedRequest, *, param: str | None = None) -> None:
    """Raise RequestError if the engine has rejected the request, or failed on it."""
    message = end.message or ""
    if end.reason is FinishReason.IGNORED:
        raise invalid(message or "the engine rejected this prompt", param=param)
    if end.reason is FinishReason.ERROR:
        if message.startswith(CONSTRAINT_TOO_COMPLEX):
            raise invalid(message, code="constraint_too_complex")
        raise RequestFailed(message or "the engine failed on this request")
