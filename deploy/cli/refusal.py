"""What a server says when it refuses, in words for somebody at a command line."""

import json
from typing import Final

from longshore.deploy.bench.sse_client import HttpAnswer

_NO_KEY: Final = 401


def refusal(answer: HttpAnswer) -> str | None:
    """The message of an answer that is an error, without a full stop; None if it holds none. Where
    a key is missing it says how a command takes one."""
    try:
        message = str(json.loads(answer.body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return None
    if answer.status == _NO_KEY:
        return f"{message} (here: --api-key KEY or LONGSHORE_API_KEY)"
    return message
