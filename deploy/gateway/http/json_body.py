"""Reads the body of a request with JSON content, and works on large bodies off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Final, ParamSpec, TypeVar

from longshore.deploy.gateway.api.errors import ApiError
from longshore.deploy.gateway.http.exchange import Exchange
from longshore.protocol.errors import shortened

MAX_INLINE_BYTES: Final = 64 << 10

P = ParamSpec("P")
T = TypeVar("T")


class JsonThread:
    """Decodes and encodes large JSON on one thread of its own. Such work holds the interpreter lock
    for up to a quarter of a second at a time, so two threads would delay streams twice as much."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "json")

    async def run(
        self, size_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`function(*args, **kwargs)` in the caller's context, at once if the JSON that it works on
        is small."""
        if size_bytes <= MAX_INLINE_BYTES:
            return function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        work = partial(function, *args, **kwargs)
        return await loop.run_in_executor(self._thread, partial(copy_context().run, work))


async def read_json_body(exchange: Exchange, max_bytes: int) -> bytes:
    """The body, unparsed. Raises ApiError: 415 if the content type is not JSON, 413 if the body
    is larger than `max_bytes`.

    Other content types are rejected because a browser sends them to any origin without a preflight:
    any web page could make this server work. JSON needs the origin's consent
    (`cors_allow_origins`).
    """
    kind = dict(exchange.scope["headers"]).get(b"content-type", b"")
    media = kind.partition(b";")[0].strip().lower()
    if media != b"application/json" and not media.endswith(b"+json"):
        found = f"content type {shortened(media.decode('latin-1'))}" if media else "no content type"
        raise ApiError(
            415,
            f"the request body has {found}; send it with Content-Type: application/json",
            code="unsupported_media_type",
        )
    return await exchange.read_body(max_bytes, "max-body-mib")
