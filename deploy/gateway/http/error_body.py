"""The body of an error, in the format of the API that was asked."""

import msgspec

from longshore.deploy.gateway.anthropic.errors import anthropic_error, is_anthropic
from longshore.deploy.gateway.openai.errors import ApiError


def error_body(error: ApiError, path: str) -> bytes:
    """The response body, as JSON. path: of the request."""
    if is_anthropic(path):
        return msgspec.json.encode(anthropic_error(error))
    return error.json()
