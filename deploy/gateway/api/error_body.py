"""The body of an error, in the format of the API that was asked: Anthropic's, Ollama's or
OpenAI's."""

from typing import Final

import msgspec

from longshore.deploy.gateway.api.errors import error_json, status_of
from longshore.deploy.requests.errors import PromptTooLong, RequestError

ANTHROPIC_REQUEST_ID_HEADER: Final = b"request-id"
_MESSAGES: Final = "/v1/messages"
_OLLAMA: Final = "/api/"

_DETAILED: Final = frozenset({"thread_unsupported_request"})
"""Codes by which Anthropic's clients tell what to do instead. Of a prompt that is too long, they
read the message."""
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


class ErrorDetails(msgspec.Struct, frozen=True):
    error_code: str


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    """`type` groups errors. The message names the field that is invalid. details: for programs."""

    type: str
    message: str
    details: ErrorDetails | msgspec.UnsetType = msgspec.UNSET


class AnthropicError(msgspec.Struct, frozen=True, tag="error"):
    """The response body, and the data of an error event in a stream."""

    error: AnthropicErrorBody


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


def anthropic_error(error: RequestError) -> AnthropicError:
    """The error in Anthropic's format."""
    kind = _TYPE_OF_STATUS.get(status_of(error), "api_error")
    message = str(error)
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.num_tokens} tokens > {error.maximum} maximum"
    details = msgspec.UNSET if error.code not in _DETAILED else ErrorDetails(error.code)
    return AnthropicError(AnthropicErrorBody(kind, message, details))


class OllamaError(msgspec.Struct, frozen=True):
    """The response body, and the last line of a stream that fails."""

    error: str


def ollama_error(error: RequestError) -> OllamaError:
    """The error in Ollama's format."""
    return OllamaError(str(error))


def error_body(error: RequestError, path: str) -> bytes:
    """The response body, as JSON. path: of the request."""
    if is_anthropic(path):
        return msgspec.json.encode(anthropic_error(error))
    if path.startswith(_OLLAMA):
        return msgspec.json.encode(ollama_error(error))
    return error_json(error)
