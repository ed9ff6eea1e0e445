"""The worker half: one file per block, written and read by two threads."""

import logging
import os
import threading
import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

import msgspec
import torch

from longshore.connectors.base import (
    FinishedTransfers,
    KVCaches,
    QueueEvent,
    TransferQueue,
    TransferQueues,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.connectors.example.scheduler import Commands, Load, Report, Store, folder_of
from longshore.connectors.options import make_folder

logger = logging.getLogger(__name__)

CHECKSUM_BYTES: Final = 4


class ExampleWorker(WorkerConnector[Commands]):
    """Moves this rank's share of each block between the cache and `path/namespace/rank-N/`.

    A file is the CRC-32 of its block, then the block. It is written under another name and then
    renamed, so a process that dies leaves no half of a block behind.
    """

    contract_version: ClassVar[int] = 2
    stores_within_step = False

    def __init__(self, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        self._folder = Path(folder_of(config)) / config.namespace / f"rank-{config.rank}"
        self._blocks = torch.empty(0)
        self._load_queue: TransferQueue
        self._store_queue: TransferQueue
        self._lock = threading.Lock()  # the threads of the queues write what follows
        self._received: list[str] = []
        self._failed: list[int] = []
        self._found: list[bytes] | None = None
        self._stored: list[int] = []
        self._lost: list[bytes] = []

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        (group,) = kv_caches.groups
        self._blocks = group.blocks
        self._load_queue = queues.open("example-loads", on_host=True)
        self._store_queue = queues.open("example-stores", on_host=True)
        self._wake = queues.wake
        make_folder("example", self._folder)
        self._found = [bytes.fromhex(path.stem) for path in self._folder.glob("*.kv")]
        self._wake()

    def bind_connector_metadata(self, data: bytes) -> Commands:
        return msgspec.msgpack.decode(data, type=Commands)

    def start_load_kv(self, metadata: Commands) -> None:
        for load in metadata.loads:
            self._load_queue.submit(partial(self._load, load), partial(self._load_ended, load))
        for store in metadata.stores:
            self._store_queue.submit(partial(self._store, store), partial(self._store_ended, store))

    # On the threads of the queues

    def _load(self, load: Load) -> None:
        failed, lost = [], []
        for block_id, block_hash in zip(load.block_ids, load.block_hashes, strict=True):
            content = self._read(block_hash)
            if content is None:
                failed.append(block_id)
                lost.append(block_hash)
            else:
                self._blocks[block_id].copy_(torch.frombuffer(content, dtype=torch.uint8))
        if self._blocks.is_cuda:
            torch.cuda.current_stream().synchronize()
        with self._lock:
            self._failed += failed
            self._lost += lost

    def _load_ended(self, load: Load, event: QueueEvent) -> None:
        with self._lock:
            self._received.append(load.request_id)
            if event.error is not None:
                self._failed += load.block_ids
        self._wake()

    def _read(self, block_hash: bytes) -> bytearray | None:
        """The block; None if its file is missing or damaged."""
        path = self._path(block_hash)
        try:
            data = bytearray(path.read_bytes())
        except OSError as error:
            logger.warning("a stored block cannot be read: %s", error)
            return None
        content = data[CHECKSUM_BYTES:]
        checksum = zlib.crc32(content).to_bytes(CHECKSUM_BYTES, "little")
        if len(content) == self._blocks.shape[1] and data[:CHECKSUM_BYTES] == checksum:
            return content
        logger.warning("%s is damaged and counts as a miss; it is deleted", path)
        with suppress(OSError):  # the next store replaces it
            path.unlink()
        return None

    def _store(self, store: Store) -> None:
        lost = []
        for block_id, block_hash in zip(store.block_ids, store.block_hashes, strict=True):
            content = self._blocks[block_id].cpu().numpy().tobytes()
            try:
                self._write(self._path(block_hash), content)
            except OSError as error:
                logger.warning("a block cannot be stored: %s", error)
                lost.append(block_hash)
        with self._lock:
            self._lost += lost

    def _store_ended(self, store: Store, event: QueueEvent) -> None:
        with self._lock:
            self._stored.append(store.hold_id)
            if event.error is not None:
                self._lost += store.block_hashes
        self._wake()

    def _write(self, path: Path, content: bytes) -> None:
        checksum = zlib.crc32(content).to_bytes(CHECKSUM_BYTES, "little")
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(checksum + content)
        draft.replace(path)

    def _path(self, block_hash: bytes) -> Path:
        return self._folder / f"{block_hash.hex()}.kv"

    # On the loop thread

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        with self._lock:
            received, self._received = self._received, []
            failed, self._failed = self._failed, []
        return FinishedTransfers(received=received, failed_block_ids=failed)

    def build_connector_worker_meta(self) -> bytes:
        with self._lock:
            report = Report(self._found, self._stored, self._lost)
            self._found, self._stored, self._lost = None, [], []
        if report == Report():
            return b""
        return msgspec.msgpack.encode(report)
