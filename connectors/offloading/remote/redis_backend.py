"""Blocks in Redis or Valkey."""

import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from longshore.connectors.offloading.remote.address import RemoteAddress
from longshore.connectors.offloading.remote.redis_connection import (
    Argument,
    RedisConnection,
    RedisEndpoint,
    RedisProtocolError,
    RedisRefused,
    Reply,
    left_s,
)
from longshore.protocol.errors import ConfigError

DEFAULT_PORT: Final = 6379

_VERIFICATIONS: Final = {
    "required": ssl.CERT_REQUIRED,
    "optional": ssl.CERT_OPTIONAL,
    "none": ssl.CERT_NONE,
}


class RedisBackend:
    """See RemoteBackend."""

    num_names_per_lookup: int = 256

    def __init__(self, address: RemoteAddress, *, timeout_s: float, ttl_s: int | None) -> None:
        """timeout_s: of each exchange with the server, including a new connection. ttl_s: how long
        a value is kept; None: until the server evicts it."""
        self._timeout_s = timeout_s
        self._ttl_s = ttl_s
        self._endpoint = _endpoint(address)
        self._lock = threading.Lock()
        self._idle: list[RedisConnection] = []
        self._in_use: set[RedisConnection] = set()
        self._is_closed = False

    def exists(self, names: Sequence[str], *, is_write: bool) -> list[bool]:
        commands: list[tuple[Argument, ...]] = [("EXISTS", name) for name in names]
        if is_write and self._ttl_s is not None:
            commands = [("EXPIRE", name, self._ttl_s) for name in names]
        return [_is_int(reply) > 0 for reply in self._call(commands)]

    def get(self, name: str, max_bytes: int) -> memoryview | None:
        # GETRANGE, because a value that another program has written may have any size.
        (value,) = self._call([("GETRANGE", name, 0, max_bytes - 1)], max_bytes=max_bytes)
        if not isinstance(value, memoryview):
            raise RedisProtocolError("the answer to GETRANGE is not a string")
        if not value and not self.exists([name], is_write=False)[0]:
            return None
        return value

    def put(self, name: str, value: bytes) -> None:
        lifetime: tuple[Argument, ...] = () if self._ttl_s is None else ("EX", self._ttl_s)
        if self._call([("SET", name, value, *lifetime)]) != ["OK"]:
            raise RedisProtocolError("the answer to SET is not OK")

    def delete(self, name: str) -> None:
        self._call([("UNLINK", name)])

    def interrupt(self) -> None:
        with self._lock:
            for connection in self._in_use:
                connection.interrupt()

    def close(self) -> None:
        self.interrupt()
        with self._lock:
            self._is_closed = True
            while self._idle:
                self._idle.pop().close()

    def _call(self, commands: Sequence[Sequence[Argument]], max_bytes: int = 0) -> list[Reply]:
        """On a connection of its own, which later calls use again."""
        connection = self._take()
        try:
            replies = connection.call(commands, self._timeout_s, max_bytes=max_bytes)
        except RedisRefused:
            self._put_back(connection)
            raise
        except BaseException:
            self._discard(connection)
            raise
        self._put_back(connection)
        return replies

    def _take(self) -> RedisConnection:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if connection.is_usable:
                    self._in_use.add(connection)
                    return connection
                connection.close()
        ends_s = time.monotonic() + self._timeout_s
        connection = self._endpoint.open(self._timeout_s)
        with self._lock:
            self._in_use.add(connection)
        try:
            self._endpoint.log_in(connection, left_s(ends_s))
        except BaseException:
            self._discard(connection)
            raise
        return connection

    def _put_back(self, connection: RedisConnection) -> None:
        with self._lock:
            self._in_use.discard(connection)
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def _discard(self, connection: RedisConnection) -> None:
        with self._lock:
            self._in_use.discard(connection)
        connection.close()


def _is_int(reply: Reply) -> int:
    if not isinstance(reply, int):
        raise RedisProtocolError("the server has not answered with a number")
    return reply


def _endpoint(address: RemoteAddress) -> RedisEndpoint:
    """Raises ConfigError."""
    parts = urlsplit(address.url)
    options: dict[str, Any] = dict(address.options)
    where: tuple[str, int] | str = unquote(parts.path)
    database = dict(parse_qsl(parts.query)).get("db", "")
    if parts.scheme != "unix":
        where = parts.hostname or "", parts.port or DEFAULT_PORT
        database = parts.path[1:]
    return RedisEndpoint(
        address=where,
        tls=_tls(address, options) if parts.scheme == "rediss" else None,
        username=unquote(parts.username) if parts.username else options.get("username"),
        password=unquote(parts.password) if parts.password else options.get("password"),
        database=int(database or 0),
    )


def _tls(address: RemoteAddress, options: dict[str, Any]) -> ssl.SSLContext:
    verification = str(options.get("ssl_cert_reqs", "required"))
    if verification not in _VERIFICATIONS:
        known = ", ".join(_VERIFICATIONS)
        raise ConfigError(f"remote_options: ssl_cert_reqs={verification!r} is not one of {known}")
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
        if verification == "none":
            context.check_hostname = False
        context.verify_mode = _VERIFICATIONS[verification]
        if "ssl_certfile" in options:
            context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    except (OSError, TypeError) as error:  # SSLError is an OSError
        raise ConfigError(
            f"remote_url {address.name} or remote_options: the certificates cannot be read: "
            f"{address.hide_secrets(str(error))}"
        ) from None
    return context
