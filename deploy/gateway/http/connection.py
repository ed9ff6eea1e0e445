"""uvicorn's HTTP connection, with limits on the size and the duration of what a client sends.

URLs, heads and trailers are limited in size, because the parser would buffer them without limit. A
connection is closed if no head arrives, if a body arrives too slowly, or if the client does not
read its response, because file descriptors are scarce. When they run out, further connections are
refused, and those that exist go on.

A few pipelined requests wait for the responses before theirs. What cannot wait (too many, too
large, no HTTP) is left unanswered: the last response says `connection: close`, and the connection
ends.

A client that sends no more may have gone, or wait for its response: the network shows that only in
reply to data. Until a response has begun, it is sent `100 Continue` now and then, which clients
ignore.
"""

import asyncio
import http
import logging
from collections.abc import Callable
from typing import Any, Final

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from longshore.deploy.gateway.api.errors import ApiError, error_json, status_of
from longshore.deploy.gateway.http.exchange import OUTLET_KEY, ClientGone, Exchange
from longshore.deploy.requests.errors import RequestError
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

MAX_PIPELINED: Final = 8
MAX_PIPELINED_BYTES: Final = 64 << 10  # of one request's body; uvicorn stops reading beyond it
# The first reply of a host whose client has gone comes within a round trip.
FIRST_PROBE_S: Final = 0.2
PROBE_INTERVAL_S: Final = 2.0
MAX_UNPROBED_S: Final = 10.0  # for HTTP/1.0, which has no `100 Continue`


def _last_answer(error: RequestError) -> bytes:
    """A whole response, after which the connection is closed."""
    body = error_json(error)
    lines = [
        f"HTTP/1.1 {status_of(error)} {http.HTTPStatus(status_of(error)).phrase}".encode(),
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
_NO_HOST: Final = ApiError(400, "a request must have one Host header field")
_NO_PROXY: Final = ApiError(405, "CONNECT is not allowed: this server is no proxy")
_TOO_LARGE_TO_WAIT: Final = ApiError(
    413,
    f"a pipelined request has a body of more than {MAX_PIPELINED_BYTES} bytes; send it after the "
    "response to the request before it",
)
_NOT_CHUNKED: Final = ApiError(400, "the only transfer coding that is supported is chunked, once")
_TOO_MANY: Final = ApiError(503, "the server has too many connections; retry later")
# What a client ignores: before a response, and within a stream of events.
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

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
        # The request that is answered now; `cycle` is the last one that has arrived.
        self._current: RequestResponseCycle | None = None
        self._comment = b""  # what its response, if it is a stream, may contain at any time
        self._probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        limit = self._max_connections()
        if len(self.connections) > limit:
            self._refuse(limit)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self.pipeline.clear()
        if self._is_answering:
            assert self._current is not None
            self._current.disconnected = True
            self._current.message_event.set()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        return self._current is not None and not self._current.response_complete

    def _end_after_responses(self) -> None:
        """Read no more, and close after the response to the last request that has arrived."""
        self._is_ignored = True
        self._stop_waiting()
        self.cycle.keep_alive = False

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. True: it may wait for a response."""
        if not self._is_answering or self.cycle.more_body:
            return False
        self._end_after_responses()
        self._probe()
        return True

    def _probe(self) -> None:
        """Write what the client ignores. If it has gone, its host says so in reply, and the next
        write fails."""
        current = self._current
        if current is None or current.response_complete or self.transport.is_closing():
            return
        is_first = self._probe_timer is None
        delay_s = FIRST_PROBE_S if is_first else PROBE_INTERVAL_S
        if current.response_started:
            if self._comment:
                self.write_part(self._comment)
        elif current.scope["http_version"] == "1.1":
            self.transport.write(_CONTINUE)
        elif is_first:
            delay_s = MAX_UNPROBED_S
        else:
            self.transport.abort()
            return
        self._probe_timer = self.loop.call_later(delay_s, self._probe)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._current, self._comment = cycle, b""
        super()._start_asgi_task(cycle, app)

    def _defer(self, error: RequestError) -> bool:
        """Reject what the client sends now after the responses to earlier requests. False: there
        are none to wait for."""
        if not self._is_answering:
            return False
        if not self.cycle.more_body:  # it is after the last request
            self._end_after_responses()
        elif self.cycle is self._current:
            return False
        else:
            self._answer_in_turn(error)
        return True

    def _answer_in_turn(self, error: RequestError) -> None:
        """Answer the last request, which waits for earlier ones, with an error, and close."""

        async def reject(scope: Any, receive: Any, send: Any) -> None:
            await Exchange(scope, receive, send).send_error(error)

        self.pipeline[0] = (self.cycle, reject)
        self._end_after_responses()

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
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._check_head)

    def _check_head(self) -> None:
        if self._is_answering:  # half a pipelined request
            self._end_after_responses()
        else:
            self._close()

    def _await_body(self) -> None:
        self._stop_waiting()
        self._num_body_bytes = 0
        self._timer = self.loop.call_later(BODY_TIMEOUT_S, self._check_body)

    def _check_body(self) -> None:
        if self._num_body_bytes >= MIN_BODY_BYTES:
            self._await_body()
            return
        if self._defer(_TOO_SLOW):
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

    def begin_stream(self, comment: bytes) -> None:
        assert self._current is not None
        self._comment = comment
        self._is_chunked = self._current.scope["http_version"] == "1.1"
        if not self._is_chunked:
            self._current.chunked_encoding = False

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
        is_answered = self._current is not None and self._current.response_complete
        if is_answered or self.transport.is_closing():
            self._watch_reader()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader()

    def send_400_response(self, msg: str) -> None:
        if not self._defer(ApiError(400, msg)):
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
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._num_unseen_bytes > MAX_HEAD_BYTES:
            self._reject_head(_HEAD_TOO_LARGE)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _feed_without_upgrade(self, rest: bytes) -> None:
        """Ignore the header field Upgrade. The parser takes what is after such a head for another
        protocol, but it may be a body: some clients ask for HTTP/2 with every request."""
        if self._is_ignored or self.transport.is_closing():
            return
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._reject_head(_NO_PROXY)
            return
        fields = [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
        head = [b"%b %b HTTP/1.1" % (method, self.url), *fields, b"", b""]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(b"\r\n".join(head) + rest)

    def _reject_head(self, error: RequestError) -> None:
        """Reject what never becomes a request, and log it."""
        if not self._is_ignored and not self.transport.is_closing():
            host, port = self.client or ("unknown", 0)
            _rejections.warning(
                "request rejected: %s", error, client=f"{host}:{port}", status=status_of(error)
            )
        self._reject(error)

    def _reject(self, error: RequestError) -> None:
        """Answer, unless a response has begun, and close. May be called by the parser's events."""
        if self._is_ignored or self.transport.is_closing() or self._defer(error):
            return
        self._is_ignored = True
        answer = _last_answer(error)
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(answer)
        self._close()

    def on_message_begin(self) -> None:
        if self._is_answering and len(self.pipeline) >= MAX_PIPELINED:
            self._end_after_responses()
        if self.cycle is not None and not self.cycle.keep_alive:
            self._is_ignored = True
        if not self._is_ignored:
            self._num_head_bytes = 0
            self._await_head()
            if not self.flow.write_paused:
                self._stop_watching()  # a client that sends a request has read its response
            super().on_message_begin()
            self.scope[OUTLET_KEY] = self  # type: ignore[typeddict-unknown-key]

    def _head_error(self) -> RequestError | None:
        """Why the head of a request is rejected."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return ApiError(400, f"HTTP/{version} is not supported; use HTTP/1.1")
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            return _NO_HOST
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]) or (codings and version == "1.0"):
            return _NOT_CHUNKED
        return None

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
        if self._is_ignored or self.parser.should_upgrade():
            return
        if (error := self._head_error()) is not None:
            self._reject_head(error)
            return
        self._use_host_of_url()
        self._await_body()
        super().on_headers_complete()
        self.flow.resume_reading()  # uvicorn reads no more while a pipelined request waits

    def _use_host_of_url(self) -> None:
        """A request for a whole URL (`GET http://HOST/`) is for that host, whatever Host says."""
        if not self.url.startswith(b"/"):
            host = httptools.parse_url(self.url).host
            if host is not None:
                others = [field for field in self.headers if field[0] != b"host"]
                self.headers[:] = [*others, (b"host", host)]

    def on_body(self, body: bytes) -> None:
        self._num_unseen_bytes = 0
        if self._is_ignored:
            return
        self._num_body_bytes += len(body)
        if (
            self.cycle is not self._current
            and len(self.cycle.body) + len(body) > MAX_PIPELINED_BYTES
        ):
            self._defer(_TOO_LARGE_TO_WAIT)
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unseen_bytes = 0
        if not self._is_ignored and not self.parser.should_upgrade():
            self._stop_waiting()
            super().on_message_complete()
