"""Blocks in an object store, through obstore: S3 and what is compatible, or a shared folder."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, MemoryStore, ObjectStore, S3Store

from longshore.connectors.offloading.remote.address import ENDPOINT_OPTIONS, RemoteAddress
from longshore.protocol.errors import ConfigError

_CHUNK_BYTES: Final = 65_536


class ObjectBackend:
    """See RemoteBackend. S3 credentials that the options do not have come from AWS_ACCESS_KEY_ID
    and the other variables of AWS, or from the instance."""

    num_names_per_lookup: int = 1

    def __init__(self, address: RemoteAddress, *, timeout_s: float) -> None:
        """timeout_s: of an operation as a whole."""
        try:
            self._store = _open(address, timedelta(seconds=timeout_s))
        except BaseException as error:  # a panic of the library is no Exception
            is_panic = type(error).__name__ == "PanicException"
            if not is_panic and not isinstance(error, BaseError | TypeError | ValueError | OSError):
                raise
            raise ConfigError(
                f"remote_url {address.name} or remote_options: {address.hide_secrets(str(error))}"
            ) from None

    def exists(self, names: Sequence[str], *, is_write: bool) -> list[bool]:
        return [self._exists(name) for name in names]

    def _exists(self, name: str) -> bool:
        try:
            obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        return True

    def get(self, name: str, max_bytes: int) -> memoryview | None:
        try:
            found = obstore.get(self._store, name)
        except FileNotFoundError:
            return None
        if found.meta["size"] <= max_bytes:
            return memoryview(found.bytes())
        # Of another program. A server need not obey a request for a range, so stop reading instead.
        value = bytearray()
        for chunk in found.stream(min_chunk_size=_CHUNK_BYTES):
            value += chunk
            if len(value) >= max_bytes:
                break
        return memoryview(value)[:max_bytes]

    def put(self, name: str, value: bytes) -> None:
        obstore.put(self._store, name, value, use_multipart=False)

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            obstore.delete(self._store, name)

    def interrupt(self) -> None:
        """Operations end by their own timeout, which counts from their beginning."""

    def close(self) -> None:
        """Connections end with the object."""


def _open(address: RemoteAddress, timeout: timedelta) -> ObjectStore:
    parts = urlsplit(address.url)
    if parts.scheme == "file":
        return LocalStore(parts.path, mkdir=True)
    if parts.scheme == "memory":
        return MemoryStore()
    config: dict[str, Any] = dict(address.options)
    endpoints = [str(v) for name, v in config.items() if name.lower() in ENDPOINT_OPTIONS]
    return S3Store.from_url(
        address.url,
        config=config,  # type: ignore[arg-type]  # its keys are checked by obstore
        client_options={
            "timeout": timeout,
            "connect_timeout": timeout,
            "allow_http": any(endpoint.startswith("http://") for endpoint in endpoints),
        },
        retry_config={"max_retries": 0, "retry_timeout": timeout},  # the breaker decides
    )
