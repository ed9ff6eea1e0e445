"""What a remote store must be able to do, and which client library does it."""

from collections.abc import Sequence
from typing import Protocol

from longshore.connectors.offloading.remote.address import RemoteAddress


class RemoteBackend(Protocol):
    """Values by name. Thread-safe. Operations block for about `timeout_s` without an answer at
    most, and raise any exception if they fail.

    num_names_per_lookup: names that one `exists` can take.
    """

    num_names_per_lookup: int

    def exists(self, names: Sequence[str], *, is_write: bool) -> list[bool]:
        """Which values exist. is_write: they are to be written otherwise, so that those that exist
        are kept as long as new ones."""

    def get(self, name: str, max_bytes: int) -> memoryview | None:
        """At most so many bytes of a value; None if it does not exist."""

    def put(self, name: str, value: bytes) -> None: ...

    def delete(self, name: str) -> None:
        """A name that does not exist is ignored."""

    def interrupt(self) -> None:
        """Make operations in progress fail soon."""

    def close(self) -> None: ...


def open_backend(address: RemoteAddress, *, timeout_s: float, ttl_s: int | None) -> RemoteBackend:
    """The client; it connects when it is used. Raises ConfigError for wrong options."""
    if address.is_redis:
        from longshore.connectors.offloading.remote.redis_backend import RedisBackend

        return RedisBackend(address, timeout_s=timeout_s, ttl_s=ttl_s)
    from longshore.connectors.offloading.remote.object_backend import ObjectBackend

    return ObjectBackend(address, timeout_s=timeout_s)
