"""Errors as a client of Anthropic's API expects them."""

from typing import Final

import msgspec

from longshore.deploy.gateway.openai.errors import ApiError

ANTHROPIC_REQUEST_ID_HEADER: Final = b"request-id"
_MESSAGES: Final = "/v1/messages"

_TYPE_OF_STATUS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    """`type` groups errors. The message names the field that is invalid."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True, tag="error"):
    """The response body, and the data of an error event in a stream."""

    error: AnthropicErrorBody


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


def anthropic_error(error: ApiError) -> AnthropicError:
    """The error in Anthropic's format."""
    kind = _TYPE_OF_STATUS.get(error.status, "api_error")
    return AnthropicError(AnthropicErrorBody(kind, error.body.message))
