"""uvicorn's HTTP connection, with limits on the size and the duration of what a client sends.

URLs, heads and trailers are limited in size, because the parser would buffer them without limit. A
connection is closed if no head arrives, if a body arrives too slowly, or if the client does not
read its response, because file descriptors are scarce. Requests are not pipelined: while a
pipelined request waits, uvicorn stops reading and would not notice a disconnect. The connection is
closed after the current response instead, and the client sends the other requests again. When file
descriptors run out, further connections are refused, and those that exist go on.
"""

import asyncio
import http
import logging
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from longshore.deploy.gateway.http.exchange import OUTLET_KEY, ClientGone
from longshore.deploy.gateway.openai.errors import ApiError
from longshore.protocol.logs.limits import LogLimit

logger = logging.getLogger(__name__)

MAX_URL_BYTES: Final = 8 << 10
MAX_HEAD_BYTES: Final = 64 << 10
HEAD_TIMEOUT_S: Final = 20.0
# The minimum part of a body that must arrive in this time; no working connection is slower.
BODY_TIMEOUT_S: Final = 20.0
MIN_BODY_BYTES: Final = 1 << 10

# Connections above the limit that get an answer once they send something; more are closed at once.
MAX_REFUSED: Final = 32


def _last_answer(error: ApiError) -> bytes:
    """A whole response, after which the connection is closed."""
    body = error.json()
    lines = [
        f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}".encode(),
        b"connection: close",
        b"content-type: application/json",
        b"content-length: %d" % len(body),
    ]
    return b"\r\n".join([*lines, b"", body])


_URL_TOO_LONG: Final = ApiError(414, f"the URL is longer than {MAX_URL_BYTES} bytes")
_HEAD_TOO_LARGE: Final = ApiError(
    431, f"the URL and the header fields are larger than {MAX_HEAD_BYTES} bytes"
)
_TOO_SLOW: Final = ApiError(408, "the request body arrives too slowly")
_TOO_MANY: Final = ApiError(503, "the server has too many connections; retry later")
_refusals: Final = LogLimit(logger, max_per_second=1)
_rejections: Final = LogLimit(logger, max_per_second=1)


class BoundedConnection(HttpToolsProtocol):
    """Counts the bytes that arrive between two events of the parser, and is the `Outlet` of the
    response.

    max_connections:  returns how many connections this process may have now.
    unread_timeout_s: seconds after which a client is disconnected if it reads nothing while the
                      connection's buffers are full, or while a written response is unread.
    """

    def __init__(
        self,
        *args: Any,
        unread_timeout_s: float,
        max_connections: Callable[[], int],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self._unread_timeout_s = unread_timeout_s
        self._num_unseen_bytes = 0
        self._num_head_bytes = 0
        self._is_chunked = True
        self._is_refused = False  # all that the client sends is answered with 503
        self._is_ignored = False  # what the client sends now: it is pipelined, or was rejected
        self._timer: asyncio.TimerHandle | None = None
        self._num_body_bytes = 0
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        limit = self._max_connections()
        if len(self.connections) > limit:
            self._refuse(limit)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def _refuse(self, limit: int) -> None:
        _refusals.warning(
            "refusing connections: %d are open, and the limit of open files (ulimit -n) leaves "
            "descriptors for %d. Raise the limit, or add a gateway (--gateways)",
            len(self.connections) - 1,
            limit,
        )
        if len(self.connections) > limit + MAX_REFUSED:
            self.transport.abort()
        self._is_refused = True

    def _await_head(self) -> None:
        """Close the connection if no head arrives in time."""
        self._stop_waiting()
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close)

    def _await_body(self) -> None:
        self._stop_waiting()
        self._num_body_bytes = 0
        self._timer = self.loop.call_later(BODY_TIMEOUT_S, self._check_body)

    def _check_body(self) -> None:
        if self._num_body_bytes >= MIN_BODY_BYTES:
            self._await_body()
            return
        if not self.cycle.response_started:
            self.transport.write(_last_answer(_TOO_SLOW))
        self._close()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def is_writable(self) -> bool:
        return not (self.flow.write_paused or self.transport.is_closing())

    def begin_stream(self) -> None:
        self._is_chunked = self.scope["http_version"] == "1.1"
        if not self._is_chunked:
            self.cycle.chunked_encoding = False

    def write_part(self, data: bytes) -> None:
        if self.transport.is_closing():
            raise ClientGone
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    async def until_read(self) -> None:
        await self.flow.drain()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()
        is_answered = self.cycle is not None and self.cycle.response_complete
        if is_answered or self.transport.is_closing():
            self._watch_reader()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        self._watch_reader()

    def _close(self) -> None:
        """Close once the client has read what was written."""
        self.transport.close()
        self._watch_reader()

    def _watch_reader(self) -> None:
        """Require the client to read until nothing is left."""
        self._stop_watching()
        num_unread = self.transport.get_write_buffer_size()
        if num_unread:
            self._reader_timer = self.loop.call_later(
                self._unread_timeout_s, self._check_reader, num_unread
            )

    def _stop_watching(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _check_reader(self, num_unread: int) -> None:
        if self.transport.get_write_buffer_size() < num_unread:
            self._watch_reader()
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_ignored or self.transport.is_closing():
            return
        if self._is_refused:
            self._reject(_TOO_MANY)  # `_refuse` has logged it
            return
        self._num_unseen_bytes += len(data)
        super().data_received(data)
        if self._num_unseen_bytes > MAX_HEAD_BYTES:
            self._reject_head(_HEAD_TOO_LARGE)

    def _reject_head(self, error: ApiError) -> None:
        """Reject what never becomes a request, and log it."""
        if not self._is_ignored and not self.transport.is_closing():
            host, port = self.client or ("unknown", 0)
            _rejections.warning(
                "request rejected: %s", error, client=f"{host}:{port}", status=error.status
            )
        self._reject(error)

    def _reject(self, error: ApiError) -> None:
        """Answer, unless a response has begun, and close. May be called by the parser's events."""
        if self._is_ignored or self.transport.is_closing():
            return
        self._is_ignored = True
        answer = _last_answer(error)
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(answer)
        self._close()

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._is_ignored = True
            self.cycle.keep_alive = False
        if not self._is_ignored:
            self._num_head_bytes = 0
            self._await_head()
            if not self.flow.write_paused:
                self._stop_watching()  # a client that sends a request has read its response
            super().on_message_begin()
            self.scope[OUTLET_KEY] = self  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        if not self._is_ignored:
            super().on_url(url)
            self._num_head_bytes += len(url)
            if self._num_head_bytes > MAX_URL_BYTES:
                self._reject_head(_URL_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_ignored:
            super().on_header(name, value)
            self._num_head_bytes += len(name) + len(value) + 4
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._reject_head(_HEAD_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._num_unseen_bytes = 0
        if not self._is_ignored:
            self._await_body()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unseen_bytes = 0
        if not self._is_ignored:
            self._num_body_bytes += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unseen_bytes = 0
        if not self._is_ignored:
            self._stop_waiting()
            super().on_message_complete()
