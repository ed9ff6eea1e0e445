"""The worker half: copies this rank's share of each block to and from the server's shared memory.

An object of the server is a chunk: the bytes of its blocks, then a checksum of each. The ranks of
an engine are different models for the server, so that each finds its own chunks.
"""

import hashlib
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from longshore.connectors.base import KVCaches, WorkerConnectorConfig
from longshore.connectors.base.checksum import IDENTITY_DIGEST_BYTES, block_checksum
from longshore.connectors.base.prefix_store.messages import Prefix, Store
from longshore.connectors.base.prefix_store.store import PrefixStore, StoreError, stand_in_tokens
from longshore.connectors.base.prefix_store.worker import PrefixStoreWorker
from longshore.connectors.lmcache_mp.client import Client, Context, Key, Pool, Prepared, Slot
from longshore.connectors.lmcache_mp.scheduler import NAME, read_options
from longshore.protocol.errors import ConfigError
from longshore.protocol.private_files import Folder

logger = logging.getLogger(__name__)

CHECKSUM_BYTES: Final = 8

REGISTER_INTERVAL_S: Final = 30.0
"""The server forgets who is silent, and knows nobody after a restart."""

PAUSE_S: Final = 10.0
"""How long the server is not asked after a call that it did not answer."""

POLL_INTERVAL_S: Final = 0.002

SHARED_MEMORY: Final = Path("/dev/shm")

START_COMMAND: Final = (
    "lmcache server --supported-transfer-mode engine_driven --shm-name longshore "
    "--no-l1-use-lazy --l1-size-gb 8"
)


class LMCacheMPWorker(PrefixStoreWorker):
    def make_store(self, kv_caches: KVCaches) -> PrefixStore:
        return ServerStore(self.config, kv_caches)


class ServerStore:
    """See `PrefixStore`. Raises ConfigError if the server does not fit the options."""

    def __init__(self, config: WorkerConnectorConfig, kv_caches: KVCaches) -> None:
        options = read_options(config.options)
        (group,) = kv_caches.groups
        self._blocks = group.blocks
        self._block_bytes = group.size_bytes
        self._block_size = config.specs[0].block_size
        self._chunk_size = options.chunk_size
        self._chunk_blocks = options.chunk_size // self._block_size
        self._timeout_s = options.timeout_s
        name = f"{config.namespace}-{config.rank}"
        self._identity = hashlib.sha256(name.encode()).digest()[:IDENTITY_DIGEST_BYTES]
        self._registration = Context(
            secrets.randbits(62),
            f"longshore-{name}",
            self._block_size,
            self._chunk_blocks * (self._block_bytes + CHECKSUM_BYTES),
        )
        self._stream = (
            torch.cuda.Stream(kv_caches.device)  # type: ignore[no-untyped-call]  # of torch
            if kv_caches.device.type == "cuda"
            else None
        )
        self._lock = threading.Lock()  # of the registration
        self._register_at_s = 0.0
        self._paused_until_s = 0.0
        self._pool_file = (0, 0)
        self._pool: NDArray[np.uint8]
        self._lookups: dict[int, tuple[Prefix, Key]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lookup_client, self._load_client, self._store_client = self._clients = [
            Client(self._context, options.server_url, options.timeout_s) for _ in range(3)
        ]
        try:
            self._register(self._lookup_client)
        except StoreError as error:
            self._close_clients()
            raise ConfigError(
                f"--kv-connector {NAME}: {error}. The server is started with: {START_COMMAND}"
            ) from error

    # The server

    def _register(self, client: Client) -> None:
        """Tell the server about this rank, and map its memory."""
        chunk_size = client.call("get_chunk_size", answer=int)
        if chunk_size != self._chunk_size:
            raise StoreError(
                f"the server's chunks have {chunk_size} tokens, and the option 'chunk_size' is "
                f"{self._chunk_size}; they must be the same"
            )
        operation = "register_kv_cache_engine_driven_context"
        pool = client.call(operation, self._registration, answer=Pool)
        if not pool.shm_name:
            raise StoreError("the server has no shared memory for engines")
        path = SHARED_MEMORY / pool.shm_name.lstrip("/").replace("/", "_")
        try:
            # Everyone may create files here, so another user could have made this one.
            with Folder.open(SHARED_MEMORY) as folder:
                descriptor = folder.open_own_file(path.name, os.O_RDWR)
            with open(descriptor, "r+b") as file:
                status = os.fstat(descriptor)
                if (status.st_dev, status.st_ino) != self._pool_file:
                    mapped = mmap.mmap(file.fileno(), pool.pool_size)
                    self._pool = np.frombuffer(mapped, np.uint8)
                    self._pool_file = (status.st_dev, status.st_ino)
        except (OSError, ValueError) as error:
            raise StoreError(f"the server's shared memory cannot be used: {error}") from error
        self._register_at_s = time.monotonic() + REGISTER_INTERVAL_S

    @contextmanager
    def _asking(self, client: Client) -> Iterator[Client]:
        """For calls within."""
        if time.monotonic() < self._paused_until_s:
            raise StoreError("LMCache's server is not asked, because it did not answer just now")
        try:
            with self._lock:
                if time.monotonic() >= self._register_at_s:
                    self._register(client)
            yield client
        except StoreError:
            self._register_at_s = 0.0
            self._paused_until_s = time.monotonic() + PAUSE_S
            raise

    def _key(self, kind: str, number: int, prefix: Prefix, start: int, end: int) -> Key:
        """start, end: chunks."""
        size = self._chunk_size
        tokens = stand_in_tokens(prefix.hashes[: end * self._chunk_blocks], self._block_size)
        session = f"{self._registration.instance_id:x}-{kind}-{number}"
        name = self._registration.model_name
        return Key(name, tokens.tolist(), start * size, end * size, session, prefix.salt)

    def _slot(self, slot: Slot) -> NDArray[np.uint8]:
        size = self._registration.hidden_dim_size
        found = self._pool[slot.offset : slot.offset + size]
        if slot.offset < 0 or slot.length < size or len(found) < size:
            raise StoreError(f"the server sent a slot of {slot.length} bytes instead of {size}")
        return found

    # Lookups

    def lookup(self, lookup_id: int, prefix: Prefix) -> int:
        num_chunks = len(prefix.hashes) // self._chunk_blocks
        if not num_chunks:
            return 0
        key = self._key("get", lookup_id, prefix, 0, num_chunks)
        with self._asking(self._lookup_client) as client:
            client.call("lookup", _of_all_workers(key), 1)
            self._lookups[lookup_id] = prefix, key
            deadline_s = time.monotonic() + self._timeout_s
            while time.monotonic() < deadline_s:
                found: int | None = client.call(
                    "query_prefetch_status", key.request_id, answer=int | None
                )
                if found is not None:
                    num_found = min(max(found, 0), num_chunks)
                    end = num_found * self._chunk_size
                    self._lookups[lookup_id] = prefix, _between(key, 0, end)
                    return num_found * self._chunk_blocks
                time.sleep(POLL_INTERVAL_S)
            raise StoreError(f"a lookup of {num_chunks} chunks took over {self._timeout_s:g} s")

    def release(self, lookup_id: int) -> None:
        _, key = self._lookups.pop(lookup_id, (None, None))
        if key is not None:
            with self._asking(self._load_client) as client:
                client.call("free_lookup_locks", key, 1)
                client.call("end_session", key.request_id)

    # Transfers

    def load(self, lookup_id: int, first_block: int, block_ids: Sequence[int]) -> Sequence[int]:
        prefix, locked = self._lookups.pop(lookup_id)
        size, per_chunk = self._chunk_size, self._chunk_blocks
        first, last = first_block // per_chunk, -(-(first_block + len(block_ids)) // per_chunk)
        key = _between(locked, first * size, last * size)
        failed = list(block_ids)
        with self._asking(self._load_client) as client:
            if block_ids:
                instance_id = self._registration.instance_id
                prepared = client.call("prepare_retrieve", key, instance_id, answer=Prepared)
                slots = prepared.context.slots or []
                if prepared.success and len(slots) == last - first:
                    chunks = [self._slot(slot).copy() for slot in slots]
                    client.call("commit_retrieve", key, instance_id, answer=bool)
                    hashes = prefix.hashes[first * per_chunk : last * per_chunk]
                    skipped = first_block - first * per_chunk
                    failed = self._fill(chunks, hashes, skipped, block_ids)
            for unused in (
                _between(locked, 0, key.start),
                _between(locked, key.end, locked.end),
            ):
                if unused.start < unused.end:
                    client.call("free_lookup_locks", unused, 1)
            client.call("end_session", key.request_id)
        return failed

    def _fill(
        self,
        chunks: Sequence[NDArray[np.uint8]],
        hashes: Sequence[bytes],
        skipped: int,
        block_ids: Sequence[int],
    ) -> list[int]:
        """Copy the blocks after the first `skipped` ones; returns those that are damaged."""
        failed = []
        with self._copies():
            for index, block_id in enumerate(block_ids, skipped):
                content, checksum = self._parts(chunks, index)
                if self._checksum(content, hashes[index]) != int(checksum[0]):
                    failed.append(block_id)
                    continue
                source = torch.from_numpy(content)
                self._blocks[block_id].copy_(source, non_blocking=True)
        if failed:
            logger.warning("%d blocks in LMCache are damaged and are computed instead", len(failed))
        return failed

    def store(self, store: Store) -> None:
        first = store.first_block // self._chunk_blocks
        last = first + len(store.block_ids) // self._chunk_blocks
        key = self._key("put", store.hold_id, store.prefix, first, last)
        instance_id = self._registration.instance_id
        with self._asking(self._store_client) as client:
            prepared = client.call("prepare_store", key, instance_id, answer=Prepared)
            slots = prepared.context.slots or []  # those of chunks that are stored already: none
            for slot, index in zip(slots, prepared.context.chunk_indices, strict=True):
                self._write(self._slot(slot), store, index * self._chunk_blocks)
            if slots:
                client.call("commit_store", key, instance_id, b"", answer=bool)
            client.call("end_session", key.request_id)

    def _write(self, chunk: NDArray[np.uint8], store: Store, first: int) -> None:
        """Fill a chunk with the blocks from `first` on, of those to store."""
        parts = [self._parts([chunk], index) for index in range(self._chunk_blocks)]
        block_ids = store.block_ids[first : first + len(parts)]
        with self._copies():
            for block_id, (content, _) in zip(block_ids, parts, strict=True):
                torch.from_numpy(content).copy_(self._blocks[block_id], non_blocking=True)
        hashes = store.prefix.hashes[store.first_block + first :]
        for block_hash, (content, checksum) in zip(hashes, parts, strict=False):
            checksum[0] = self._checksum(content, block_hash)

    def _parts(
        self, chunks: Sequence[NDArray[np.uint8]], index: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
        """A block in chunks, and its checksum."""
        number, index = divmod(index, self._chunk_blocks)
        begin = index * self._block_bytes
        checksums = chunks[number][self._chunk_blocks * self._block_bytes :].view("<u8")
        return chunks[number][begin : begin + self._block_bytes], checksums[index : index + 1]

    def _checksum(self, content: NDArray[np.uint8], block_hash: bytes) -> int:
        return block_checksum(content, self._identity, block_hash)

    @contextmanager
    def _copies(self) -> Iterator[None]:
        """Copies within have ended at its end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    def close(self) -> None:
        operation = "unregister_kv_cache_engine_driven_context"
        try:
            with self._asking(self._store_client) as client:
                client.call(operation, self._registration.instance_id)
        except StoreError as error:
            logger.warning("%s", error)
        self._close_clients()

    def _close_clients(self) -> None:
        for client in self._clients:
            client.close()
        self._context.term()


def _between(key: Key, start: int, end: int) -> Key:
    """The same key for another range of tokens."""
    return Key(key.model_name, key.token_ids, start, end, key.request_id, key.cache_salt)


def _of_all_workers(key: Key) -> dict[str, object]:
    """A lookup has no worker id."""
    fields = {name: getattr(key, name) for name in Key.__struct_fields__}
    return {**fields, "worker_id": None}
