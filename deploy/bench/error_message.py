"""The message of a server's error response, for commands to print."""

import json
from typing import Final

from longshore.deploy.bench.sse_client import HttpAnswer

_NO_KEY: Final = 401


def error_code(answer: HttpAnswer) -> str | None:
    """The code of an error response; None if it has none."""
    try:
        code = json.loads(answer.body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None
    return code if isinstance(code, str) else None


def error_message(answer: HttpAnswer) -> str | None:
    """The message of an error response, without a full stop; None if the body holds no message. For
    a missing API key it adds how to give one to a command."""
    try:
        message = str(json.loads(answer.body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return None
    if answer.status == _NO_KEY:
        return f"{message} (use --api-key KEY or LONGSHORE_API_KEY)"
    return message
