"""uvicorn's HTTP connection, with limits on the size and the duration of what a client sends.

Heads and trailers are limited in size, because the parser would buffer them without limit. A
connection is closed if no head arrives, if a body arrives too slowly, or if the client does not
read its response, because file descriptors are scarce. Requests are not pipelined: while a
pipelined request waits, uvicorn stops reading and would not notice a disconnect. The connection is
closed after the current response instead, and the client sends the other requests again.
"""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from longshore.deploy.gateway.http.exchange import OUTLET_KEY, ClientGone

MAX_HEAD_BYTES: Final = 64 << 10
HEAD_TIMEOUT_S: Final = 20.0
# The minimum part of a body that must arrive in this time; no working connection is slower.
BODY_TIMEOUT_S: Final = 20.0
MIN_BODY_BYTES: Final = 1 << 10

_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)
_TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedConnection(HttpToolsProtocol):
    """Counts the bytes that arrive between two events of the parser, and is the `Outlet` of the
    response.

    unread_timeout_s: seconds after which a client is disconnected if it reads nothing while the
                      connection's buffers are full, or while a written response is unread.
    """

    def __init__(self, *args: Any, unread_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unread_timeout_s = unread_timeout_s
        self._num_unseen_bytes = 0
        self._is_pipelined = False
        self._timer: asyncio.TimerHandle | None = None
        self._num_body_bytes = 0
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

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
            self.transport.write(_TOO_SLOW)
        self._close()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def is_writable(self) -> bool:
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_part(self, data: bytes) -> None:
        if self.transport.is_closing():
            raise ClientGone
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

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
        if self._is_pipelined or self.transport.is_closing():
            return
        self._num_unseen_bytes += len(data)
        super().data_received(data)
        if self._num_unseen_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self._close()

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._is_pipelined = True
            self.cycle.keep_alive = False
        if not self._is_pipelined:
            self._await_head()
            if not self.flow.write_paused:
                self._stop_watching()  # a client that sends a request has read its response
            super().on_message_begin()
            self.scope[OUTLET_KEY] = self  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        if not self._is_pipelined:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_pipelined:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_unseen_bytes = 0
        if not self._is_pipelined:
            self._await_body()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unseen_bytes = 0
        if not self._is_pipelined:
            self._num_body_bytes += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unseen_bytes = 0
        if not self._is_pipelined:
            self._stop_waiting()
            super().on_message_complete()
