"""A small HTTP client that records when each event of a stream arrived.

It only uses asyncio and uvicorn's parser: on a machine with few cores, a client that needs a
millisecond per event would measure itself.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

from longshore.protocol.errors import ConfigError


@dataclass
class HttpAnswer:
    """A response. headers: by lower-case name. events: (arrival time from `perf_counter`, data) of
    a stream."""

    sent_s: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[tuple[float, bytes]] = field(default_factory=list)


class HttpEndpoint:
    """One server. Every request has its own connection.

    url:     URL of the server, or of its API, ending with `/v1`.
    api_key: API key of the server.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"url={url!r} must have the form http://HOST:PORT")
        self._host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._netloc = parts.netloc.rpartition("@")[2]

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_s: float,
        content_type: str = "application/json",
        headers: Mapping[str, str] = {},
        on_event: Callable[[bytes], None] | None = None,
    ) -> HttpAnswer:
        """The whole response. on_event: called with the data of each event of a stream.

        Raises ConnectionError or TimeoutError if there is no complete response.
        """
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._netloc}\r\n"
            f"Connection: close\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\n"
        )
        lines = "".join(
            f"{name}: {value}\r\n" for name, value in {**self._headers, **headers}.items()
        )
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            transport, protocol = await loop.create_connection(
                _ResponseReader, self._host, self.port, ssl=self._ssl
            )
            try:
                protocol.on_event = on_event
                protocol.answer.sent_s = time.perf_counter()
                transport.write(f"{head}{lines}\r\n".encode() + body)
                return await protocol.complete
            finally:
                transport.close()


class _ResponseReader(asyncio.Protocol):
    """Collects one response; httptools calls the `on_...` methods."""

    def __init__(self) -> None:
        self.answer = HttpAnswer(time.perf_counter())
        self.on_event: Callable[[bytes], None] | None = None
        self.complete: asyncio.Future[HttpAnswer] = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._is_stream = False
        self._body = bytearray()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the server's response is not HTTP: {error}"))
            return
        if self._is_stream:
            self._take_events(time.perf_counter())

    def _take_events(self, now_s: float) -> None:
        *events, rest = self._body.split(b"\n\n")
        for event in events:
            data = bytes(event).removeprefix(b"data: ")
            self.answer.events.append((now_s, data))
            if self.on_event is not None:
                self.on_event(data)
        self._body = bytearray(rest)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(
            ConnectionError(f"the connection was lost before the end of the response: {error}")
        )

    def _fail(self, error: Exception) -> None:
        if not self.complete.done():
            self.complete.set_exception(error)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        if name.lower() == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.answer.status = self._parser.get_status_code()
        if self._is_stream:
            self._take_events(time.perf_counter())
        self.answer.body = bytes(self._body)
        if not self.complete.done():
            self.complete.set_result(self.answer)
