"""Errors become HTTP here: a status, headers, and the body `{"error": {...}}` of OpenAI's API."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from longshore.deploy.requests.errors import (
    InvalidRequest,
    PromptTooLong,
    RateLimited,
    RequestError,
    RequestFailed,
    Unavailable,
)
from longshore.protocol.errors import shortened

_STATUSES: Final[dict[type[RequestError], int]] = {
    InvalidRequest: 400,
    PromptTooLong: 400,
    RateLimited: 429,
    RequestFailed: 500,
    Unavailable: 503,
}
_TYPE_OF_STATUS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    414: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(RequestError):
    """An error that HTTP itself has a status for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.headers = headers


class ErrorBody(msgspec.Struct, frozen=True):
    """`type` groups errors, `param` names the invalid request field, `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The response body, and the data of an error event in a stream."""

    error: ErrorBody


def status_of(error: RequestError) -> int:
    return error.status if isinstance(error, ApiError) else _STATUSES[type(error)]


def headers_of(error: RequestError) -> tuple[tuple[bytes, bytes], ...]:
    """The headers of the response."""
    match error:
        case ApiError():
            return error.headers
        case RateLimited():
            return ((b"retry-after", b"%d" % error.retry_after_s),)
    return ()


def body_of(error: RequestError) -> ErrorBody:
    kind = _TYPE_OF_STATUS.get(status_of(error), "api_error")
    return ErrorBody(str(error), kind, error.param, error.code)


def reason_of(error: RequestError) -> str:
    """What log lines call an error: its code, or else its type."""
    return error.code or body_of(error).type


def error_json(error: RequestError) -> bytes:
    return msgspec.json.encode(ErrorEnvelope(body_of(error)))


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error with the names that another API has for the parameters of chats."""
    name = names.get(error.param or "")
    if error.param is None or name is None:
        return error
    message = str(error).replace(error.param, name)
    return InvalidRequest(message, param=name.partition(".")[0], code=error.code)


def queue_full(num_live: int, limit: int) -> RateLimited:
    """The limit of live requests has been reached."""
    return RateLimited(
        f"{num_live} requests are running or waiting, and the limit is {limit} "
        "(--max-live-requests); retry later",
        "queue_full",
        retry_after_s=1,
    )


def unknown_model(name: str, served: Sequence[str]) -> ApiError:
    """404: the deployment serves others."""
    shown = ", ".join(map(repr, served))
    return ApiError(
        404,
        f"the model {shortened(name)!r} does not exist; this server serves {shown}",
        param="model",
        code="model_not_found",
    )
