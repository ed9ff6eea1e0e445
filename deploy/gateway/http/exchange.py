"""One HTTP exchange on bare ASGI: reads a bounded body, sends JSON or a stream of events.

While an answer is computed the connection is watched: when the client disconnects, the work is
cancelled at once, even if there is nothing to send.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol

from starlette.types import Receive, Scope, Send

from longshore.deploy.gateway.api.error_body import error_body
from longshore.deploy.gateway.api.errors import ApiError, error_json, headers_of, status_of
from longshore.deploy.gateway.request_log import note_failure
from longshore.deploy.requests.errors import RequestError
from longshore.protocol.errors import shortened

_JSON: Final = (b"content-type", b"application/json")
_TEXT: Final = (b"content-type", b"text/plain; charset=utf-8")
_STREAM_HEADERS: Final = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a buffering proxy would delay tokens
)


class StreamFormat(NamedTuple):
    """The format of a stream's parts. comment: a part that clients ignore."""

    content_type: bytes
    comment: bytes


SERVER_SENT_EVENTS: Final = StreamFormat(b"text/event-stream; charset=utf-8", b":\n\n")
JSON_LINES: Final = StreamFormat(b"application/x-ndjson", b" ")  # before the next line


def server_sent_event(data: bytes, name: str | None = None) -> bytes:
    """One event of a stream."""
    return (
        b"data: %b\n\n" % data
        if name is None
        else b"event: %b\ndata: %b\n\n" % (name.encode(), data)
    )


def _error_events(error: RequestError) -> Sequence[bytes]:
    return (server_sent_event(error_json(error)),)


OUTLET_KEY: Final = "longshore.outlet"
"""Key of the connection's `Outlet` in a scope."""


class ClientGone(Exception):
    """The client disconnected before the response was complete."""


class Outlet(Protocol):
    """A connection, for writing parts of a response that has begun. Bypasses ASGI's `send`, which
    costs a large part of what a token costs.

    is_writable: the client is connected and reads fast enough.
    """

    @property
    def is_writable(self) -> bool: ...

    def begin_stream(self, comment: bytes) -> None:
        """Called before a response without a known length begins. For a client with HTTP/1.0, it
        ends with the connection instead of in chunks. comment: see `StreamFormat`."""

    def write_part(self, data: bytes) -> None:
        """Write without blocking, regardless of `is_writable`. Raises ClientGone."""

    async def until_read(self) -> None:
        """Wait until the client has read enough of what was written, or disconnects."""


class Exchange:
    """One request and its response. `status` is None until the response has begun."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.status: int | None = None
        self._body: bytes | None = None
        self._receive = receive
        self._send = send
        self._outlet: Outlet = scope[OUTLET_KEY]
        self._error_events: Callable[[RequestError], Sequence[bytes]] = _error_events

    async def read_body(self, max_bytes: int, setting: str) -> bytes:
        """The whole body. Raises ApiError 413, naming the setting that limits it, as soon as
        the body is known to be larger, and 415 if it is compressed."""
        for name, value in self.scope["headers"]:
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise ApiError(
                    415,
                    "the request body has the content encoding "
                    f"{shortened(value.decode('latin-1'))}; send it without",
                    code="unsupported_content_encoding",
                    headers=((b"accept-encoding", b"identity"),),
                )
            if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
                raise _too_large(max_bytes, setting)
        if self._body is not None:
            body, self._body = self._body, None
            return body
        chunks: list[bytes] = []
        size_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks.append(message.get("body", b""))
            size_bytes += len(chunks[-1])
            if size_bytes > max_bytes:
                raise _too_large(max_bytes, setting)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def put_back(self, body: bytes) -> None:
        """The next `read_body` returns this body again."""
        self._body = body

    async def run_while_connected(
        self,
        work: Awaitable[None],
        end_turn: Callable[[], Awaitable[None]],
        timeout_s: float | None = None,
    ) -> None:
        """Await `work`, or cancel it and raise ClientGone if the client disconnects first, or
        TimeoutError after `timeout_s`.

        end_turn: waits before `work` is cancelled: a thousand clients may disconnect at a time.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._wait_until_gone())
        try:
            await asyncio.wait((task, gone), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            is_late = not (task.done() or gone.done())
            if not task.done():
                await end_turn()
        finally:
            gone.cancel()
            was_cut = task.cancel()
            await asyncio.wait((task, gone))
        if was_cut and task.cancelled():
            raise TimeoutError if is_late else ClientGone
        task.result()

    async def _wait_until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue

    async def send_json(
        self, body: bytes, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """Send the whole response."""
        await self._send_whole(status, (_JSON, *headers), body)

    async def send_text(self, text: str) -> None:
        """Send the whole response, with status 200."""
        await self._send_whole(200, (_TEXT,), text.encode())

    async def _send_whole(
        self, status: int, headers: tuple[tuple[bytes, bytes], ...], body: bytes
    ) -> None:
        await self._start(status, (*headers, (b"content-length", b"%d" % len(body))))
        await self._send({"type": "http.response.body", "body": body})

    async def send_error(self, error: RequestError) -> None:
        """Send the error as the whole response, or as the last event of a stream that has begun."""
        note_failure(error)
        if self.status is None:
            body = error_body(error, self.scope["path"])
            await self.send_json(body, status_of(error), headers_of(error))
        else:
            with contextlib.suppress(ClientGone):
                await self.send_events(*self._error_events(error))
                await self.end_stream()

    async def start_stream(
        self,
        error_events: Callable[[RequestError], Sequence[bytes]] = _error_events,
        form: StreamFormat = SERVER_SENT_EVENTS,
    ) -> None:
        """Begin a stream of events, with status 200. error_events: what an error is sent as."""
        self._error_events = error_events
        self._outlet.begin_stream(form.comment)
        await self._start(200, ((b"content-type", form.content_type), *_STREAM_HEADERS))

    async def send_events(self, *events: bytes) -> None:
        """Send events (see `server_sent_event`); waits while the client reads too slowly."""
        self.write_events(*events)
        if not self._outlet.is_writable:
            await self._outlet.until_read()

    @property
    def is_writable(self) -> bool:
        """The response has begun and the client keeps up with it: `write_events` may be used
        instead of `send_events`."""
        return self.status is not None and self._outlet.is_writable

    def write_events(self, *events: bytes) -> None:
        """Write events without waiting for the client to read. Raises ClientGone."""
        if events:
            self._outlet.write_part(b"".join(events))

    async def end_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self.status = status
        await self._send(
            {"type": "http.response.start", "status": status, "headers": list(headers)}
        )


def _too_large(max_bytes: int, setting: str) -> RequestError:
    return ApiError(
        413, f"the request body is larger than the limit of {max_bytes} bytes (--{setting})"
    )
