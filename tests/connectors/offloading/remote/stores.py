"""Remote stores, and blocks whose content follows from their key."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from longshore.connectors.base.checksum import block_checksum
from longshore.connectors.offloading.disk.identity import StoreIdentity
from longshore.connectors.offloading.disk.results import Outcome
from longshore.connectors.offloading.remote.address import remote_address
from longshore.connectors.offloading.remote.store import (
    RemoteLimits,
    RemoteRead,
    RemoteStore,
    RemoteWrite,
)
from tests.connectors.offloading.disk.stores import IDENTITY, SLOT_BYTES, content
from tests.connectors.offloading.remote.servers import RemoteServer


def open_remote(
    server: RemoteServer,
    *,
    identity: StoreIdentity = IDENTITY,
    rank: int = 0,
    options: dict[str, str] | None = None,
    url: str | None = None,
    **limits: Any,
) -> RemoteStore:
    limits = {"negative_ttl_s": 0.0, "timeout_s": 5.0} | limits
    address = remote_address(
        url or server.url, server.options if options is None else options, limits.get("ttl_s")
    )
    return RemoteStore(address, identity, rank=rank, limits=RemoteLimits(**limits))


def put(store: RemoteStore, keys: Iterable[bytes], size: int = SLOT_BYTES) -> list[Outcome]:
    batch = []
    for key in keys:
        data = content(key, size)
        checksum = block_checksum(data, store.identity_digest, key)
        batch.append(RemoteWrite(key, data, checksum))
    return store.put(batch)


def get(
    store: RemoteStore, keys: Iterable[bytes], size: int = SLOT_BYTES
) -> dict[bytes, bytes | Outcome]:
    """The content of each block, or why there is none."""
    batch = [RemoteRead(key, np.zeros(size, np.uint8)) for key in keys]
    outcomes = store.get(batch)
    for read, outcome in zip(batch, outcomes, strict=True):
        assert outcome is Outcome.OK or not np.any(read.buffer), "nothing unverified is copied"
    return {
        read.key: bytes(read.buffer) if outcome is Outcome.OK else outcome
        for read, outcome in zip(batch, outcomes, strict=True)
    }


def value_names(server: RemoteServer) -> list[str]:
    """Names of the blocks that a server has."""
    return [name for name in server.names() if not name.endswith("identity.json")]
