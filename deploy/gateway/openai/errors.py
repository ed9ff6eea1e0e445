"""Errors as an OpenAI client expects them: an HTTP status and a body `{"error": {...}}`."""

from collections.abc import Mapping
from typing import Final

import msgspec

from longshore.protocol.errors import shortened

MAX_MESSAGE_CHARACTERS: Final = 1000


class ErrorBody(msgspec.Struct, frozen=True):
    """`type` groups errors, `param` names the invalid request field, `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The response body, and the data of an error event in a stream."""

    error: ErrorBody


class ApiError(Exception):
    """A request that cannot be served; `status` and `body` are the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        message = shortened(message, MAX_MESSAGE_CHARACTERS)
        super().__init__(message)
        self.status = status
        self.headers = headers
        param = param and shortened(param)
        self.body = ErrorBody(message, _TYPE_OF_STATUS.get(status, "api_error"), param, code)

    def json(self) -> bytes:
        return msgspec.json.encode(ErrorEnvelope(self.body))


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


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client must change the request."""
    return ApiError(400, message, param=param, code=code)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error with the names that another API has for the parameters of chats."""
    body = error.body
    name = names.get(body.param or "")
    if body.param is None or name is None:
        return error
    message, param = body.message.replace(body.param, name), name.partition(".")[0]
    return ApiError(error.status, message, param=param, code=body.code, headers=error.headers)


def unavailable(message: str) -> ApiError:
    """503: the request is valid; the client should retry later or elsewhere."""
    return ApiError(503, message, code="engine_unavailable")


def queue_full(num_live: int, limit: int) -> ApiError:
    """429: the limit of live requests has been reached."""
    return rate_limited(
        f"{num_live} requests are running or waiting, and the limit is {limit} "
        "(--max-live-requests); retry later",
        "queue_full",
        retry_after_s=1,
    )


def rate_limited(message: str, code: str, *, retry_after_s: int) -> ApiError:
    """429: the request is valid; the client should retry after that time."""
    headers = ((b"retry-after", b"%d" % retry_after_s),)
    return ApiError(429, message, code=code, headers=headers)


def unknown_model(name: str, served: str) -> ApiError:
    """404: the deployment serves one model."""
    return ApiError(
        404,
        f"the model {shortened(name)!r} does not exist; this server serves {served!r}",
        param="model",
        code="model_not_found",
    )
