"""A connection to Redis or Valkey: as much of its protocol (RESP2) as blocks need.

The server is not trusted. A client library parses whatever it is sent: hiredis allocates what a
reply claims to contain, with the lock of the interpreter held, so that `*2147483647`, a reply of 13
bytes, can stop a process. Here, a reply is a number, a line or one string, whose length is checked
before any memory is reserved, and an exchange has one deadline. No command of the tier is answered
with an array, so an array is an error.
"""

import select
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

from longshore.protocol.errors import LongshoreError

MAX_LINE_BYTES: Final = 8192
"""Of a number, a status or an error message, and of the header of a string."""

RECEIVE_BYTES: Final = 65_536

Argument: TypeAlias = bytes | str | int
Reply: TypeAlias = int | str | memoryview | None


class RedisRefused(LongshoreError):
    """The server has answered with an error; its text is the message."""


class RedisProtocolError(LongshoreError):
    """The server has sent something that is no answer to what it was asked."""


@dataclass(frozen=True, kw_only=True)
class RedisEndpoint:
    """Where a server is, and how to log in.

    address: (host, port), or the path of a Unix socket.
    tls:     None: not encrypted.
    """

    address: tuple[str, int] | str
    tls: ssl.SSLContext | None = None
    username: str | None = None
    password: str | None = None
    database: int = 0

    def open(self, timeout_s: float) -> "RedisConnection":
        """Connect within `timeout_s`, if the name of the host can be resolved at once. Raises
        OSError."""
        if not isinstance(self.address, str):
            opened = socket.create_connection(self.address, timeout_s)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return RedisConnection(opened)
        opened = socket.socket(socket.AF_UNIX)
        try:
            opened.settimeout(timeout_s)
            opened.connect(self.address)
        except BaseException:
            opened.close()
            raise
        return RedisConnection(opened)

    def log_in(self, connection: "RedisConnection", timeout_s: float) -> None:
        """Make an open connection ready for commands. Raises as `RedisConnection.call`."""
        ends_s = time.monotonic() + timeout_s
        if self.tls is not None:
            connection.encrypt(self.tls, self.address[0], timeout_s)
        if self.username or self.password:
            name = (self.username,) if self.username else ()
            connection.call([("AUTH", *name, self.password or "")], left_s(ends_s))
        with suppress(RedisRefused):  # for people who look at CLIENT LIST; old servers refuse it
            connection.call([("CLIENT", "SETNAME", "longshore")], left_s(ends_s))
        if self.database:
            connection.call([("SELECT", self.database)], left_s(ends_s))


class RedisConnection:
    """For one thread at a time; `interrupt` may be called on any. After an error other than
    RedisRefused, it can only be closed."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._received = bytearray()  # and not parsed yet

    def encrypt(self, tls: ssl.SSLContext, host: str, timeout_s: float) -> None:
        """Raises OSError, also if the server's certificate does not match."""
        self._socket.settimeout(timeout_s)
        wrapped = tls.wrap_socket(self._socket, server_hostname=host, do_handshake_on_connect=False)
        self._socket = wrapped
        wrapped.do_handshake()

    @property
    def is_usable(self) -> bool:
        """Whether the server has kept the connection open, and sent nothing unasked."""
        if self._received:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def call(
        self, commands: Sequence[Sequence[Argument]], timeout_s: float, *, max_bytes: int = 0
    ) -> list[Reply]:
        """Send commands, and return their replies.

        timeout_s: of the whole exchange.
        max_bytes: of a string in a reply; a longer one is not read.

        Raises RedisRefused if a reply is an error, RedisProtocolError for anything that is not the
        reply to a command, and OSError, of which TimeoutError is one.
        """
        ends_s = time.monotonic() + timeout_s
        for part in _encoded(commands):
            self._socket.settimeout(left_s(ends_s))
            self._socket.sendall(part)
        replies: list[Reply] = []
        refused: RedisRefused | None = None
        for _ in commands:
            try:
                replies.append(self._read_reply(ends_s, max_bytes))
            except RedisRefused as error:  # the replies to the other commands follow
                refused = error
        if refused is not None:
            raise refused
        return replies

    def interrupt(self) -> None:
        """Make a call in progress fail soon."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _read_reply(self, ends_s: float, max_bytes: int) -> Reply:
        line = self._read_line(ends_s)
        kind, text = line[:1], line[1:]
        match kind:
            case b"+":
                return text.decode("utf-8", "replace")
            case b"-":
                raise RedisRefused(text.decode("utf-8", "replace"))
            case b":":
                return _number(text)
            case b"$":
                size = _number(text)
                return None if size == -1 else self._read_string(size, ends_s, max_bytes)
            case _:
                raise RedisProtocolError(f"the server has sent {line[:20]!r}, which is no reply")

    def _read_line(self, ends_s: float) -> bytes:
        searched = 0
        while (end := self._received.find(b"\r\n", searched)) < 0:
            if len(self._received) > MAX_LINE_BYTES:
                raise RedisProtocolError(
                    f"the server has sent a line of over {MAX_LINE_BYTES} bytes"
                )
            searched = max(0, len(self._received) - 1)
            self._received += self._receive(RECEIVE_BYTES, ends_s)
        line = bytes(self._received[:end])
        del self._received[: end + 2]
        return line

    def _read_string(self, size: int, ends_s: float, max_bytes: int) -> memoryview:
        if not 0 <= size <= max_bytes:
            raise RedisProtocolError(
                f"the server has announced a string of {size} bytes, but was asked for at most "
                f"{max_bytes}"
            )
        value = memoryview(bytearray(size + 2))
        num_read = min(len(self._received), len(value))
        value[:num_read] = self._received[:num_read]
        del self._received[:num_read]
        while num_read < len(value):
            self._socket.settimeout(left_s(ends_s))
            count = self._socket.recv_into(value[num_read:])
            if not count:
                raise _closed()
            num_read += count
        if bytes(value[size:]) != b"\r\n":
            raise RedisProtocolError("the server has sent a string without its end")
        return value[:size]

    def _receive(self, max_bytes: int, ends_s: float) -> bytes:
        self._socket.settimeout(left_s(ends_s))
        received = self._socket.recv(max_bytes)
        if not received:
            raise _closed()
        return received


def _closed() -> ConnectionError:
    return ConnectionError("the server has closed the connection")


def left_s(ends_s: float) -> float:
    """Until a deadline; raises TimeoutError if it has passed."""
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no complete answer in time")
    return left_s


def _number(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not (digits.isdigit() and len(digits) < 20):
        raise RedisProtocolError(f"the server has sent {text[:20]!r} in place of a number")
    return int(text)


def _encoded(commands: Sequence[Sequence[Argument]]) -> list[bytes]:
    """The parts to send; large arguments are not copied."""
    parts: list[bytes] = []
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for argument in command:
            data = argument if isinstance(argument, bytes) else str(argument).encode()
            small += b"$%d\r\n" % len(data)
            if len(data) > RECEIVE_BYTES:
                parts += [bytes(small), data]
                small.clear()
            else:
                small += data
            small += b"\r\n"
    return [*parts, bytes(small)]
