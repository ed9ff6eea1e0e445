"""Blocks in Redis or Valkey, through redis-py with hiredis."""

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from longshore.connectors.offloading.remote.address import RemoteAddress
from longshore.protocol.errors import ConfigError

_READ_BYTES: Final = (
    1 << 20
)  # per call: with the default of 64 KB, large values take 3 times as long


class RedisBackend:
    """See RemoteBackend."""

    num_names_per_lookup: int = 256

    def __init__(
        self, address: RemoteAddress, *, timeout_s: float, ttl_s: int | None, num_connections: int
    ) -> None:
        """timeout_s: for a connection, and for each part of an answer. ttl_s: how long a value is
        kept; None: until the server evicts it."""
        self._ttl_s = ttl_s
        options: dict[str, Any] = dict(address.options)
        parts = urlsplit(address.url)
        if parts.scheme != "unix":
            options |= {"socket_connect_timeout": timeout_s, "socket_keepalive": True}
        try:
            self._pool = redis.ConnectionPool.from_url(
                address.url,
                max_connections=num_connections,
                socket_timeout=timeout_s,
                socket_read_size=_READ_BYTES,
                retry=Retry(NoBackoff(), 0),  # the breaker decides when to ask again
                client_name="longshore",
                **options,
            )
        except (ValueError, TypeError, redis.RedisError) as error:
            raise ConfigError(
                f"remote_url {address.name} or remote_options: {address.hide_secrets(str(error))}"
            ) from None
        self._client = redis.Redis(connection_pool=self._pool)

    def exists(self, names: Sequence[str], *, is_write: bool) -> list[bool]:
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                if is_write and self._ttl_s is not None:
                    pipeline.expire(name, self._ttl_s)
                else:
                    pipeline.exists(name)
            return [bool(answer) for answer in pipeline.execute()]

    def get(self, name: str, max_bytes: int) -> memoryview | None:
        # GETRANGE, because a value that another program has written may have any size.
        value: Any = self._client.getrange(name, 0, max_bytes - 1)
        if not isinstance(value, bytes):
            raise redis.InvalidResponse("the answer to GETRANGE is not a string")
        if not value and not self._client.exists(name):
            return None
        return memoryview(value)

    def put(self, name: str, value: bytes) -> None:
        self._client.set(name, value, ex=self._ttl_s)

    def delete(self, name: str) -> None:
        self._client.unlink(name)

    def interrupt(self) -> None:
        self._pool.disconnect(inuse_connections=True)

    def close(self) -> None:
        self._pool.disconnect()
