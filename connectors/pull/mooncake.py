"""Mooncake's TransferEngine, over TCP or RDMA, without a metadata server.

Its calls block until a read has ended, so each read waits on a thread. The engine can neither
cancel a read nor close a connection: `reset` waits until all reads have ended.
"""

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import import_module
from typing import Any, Final

import msgspec
import numpy as np

from longshore.connectors.pull.layout import MAX_REGION_BYTES
from longshore.connectors.pull.options import PullOptions
from longshore.connectors.pull.transport import (
    CONFIRM_TIMEOUT_S,
    BlockReads,
    Memory,
    ReadState,
    TransportError,
)
from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command

MAX_READS_AT_ONCE: Final = 16

MIN_LIBRARY_TIMEOUT_S: Final = 5
LIBRARY_TIMEOUT_NAME: Final = "MC_TRANSFER_TIMEOUT"
"""Variable with the seconds after which the engine gives up a read, which it does not end: the read
may still write. It accepts no less than the minimum."""


class _Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `register` returns. session: host and port of the engine."""

    session: str
    address: int
    num_bytes: int
    block_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.block_bytes <= self.num_bytes <= MAX_REGION_BYTES:
            raise ValueError(f"{self.num_bytes} bytes in blocks of {self.block_bytes}")


class MooncakeTransport:
    def __init__(self, options: PullOptions) -> None:
        """Raises ConfigError if Mooncake is not installed."""
        # Longer than a reader waits: a read that fails before has really ended. The engine has no
        # other way to set it, and takes it when it is made.
        self._timeout_s = max(math.ceil(options.read_timeout_s) + 1, MIN_LIBRARY_TIMEOUT_S)
        os.environ[LIBRARY_TIMEOUT_NAME] = str(self._timeout_s)
        try:
            self._engine: Any = import_module("mooncake.engine").TransferEngine()
        except ImportError as error:
            raise ConfigError(
                f"--kv-connector mooncake needs Mooncake, which cannot be imported ({error}). "
                f"Install it: {install_command('mooncake')}, and the system package libibverbs1"
            ) from error
        self._options = options
        self._memory: Memory
        self._regions: dict[str, _Region] = {}  # by peer
        self._threads = ThreadPoolExecutor(MAX_READS_AT_ONCE, "mooncake-read")
        self._reads: set[_MooncakeRead] = set()  # that may still write

    def register(self, memory: Memory) -> bytes:
        self._memory = memory
        options = self._options
        for call, arguments in (
            ("initialize", (options.host, "P2PHANDSHAKE", options.protocol, options.device_name)),
            ("register_memory", (memory.address, memory.num_bytes)),
        ):
            if code := getattr(self._engine, call)(*arguments):
                raise ConfigError(
                    f"--kv-connector mooncake: {call} of Mooncake failed with code {code}; its log "
                    "says why. Check 'host', 'protocol' and 'device_name'."
                )
        session = f"{options.host}:{self._engine.get_rpc_port()}"
        sizes = memory.address, memory.num_bytes, memory.block_bytes
        return msgspec.msgpack.encode(_Region(session, *sizes))

    def connect(self, metadata: bytes) -> str:
        try:
            region = msgspec.msgpack.decode(metadata, type=_Region)
        except msgspec.DecodeError as error:
            raise TransportError(f"the peer's metadata is not valid: {error}") from error
        if region.session.rpartition(":")[0] not in self._options.remote_hosts:
            raise TransportError(f"{region.session} is not one of the 'remote_hosts'")
        self._regions[region.session] = region
        return region.session

    def disconnect(self, peer: str) -> None:
        del self._regions[peer]

    def post(self, peer: str, reads: Sequence[BlockReads]) -> Sequence["_MooncakeRead"]:
        region, own = self._regions[peer], self._memory
        targets: list[int] = []
        sources: list[int] = []
        lengths: list[int] = []
        for pattern, owner_blocks, reader_blocks in reads:
            if owner_blocks.max() >= region.num_bytes // region.block_bytes:
                raise TransportError("a block is outside the owner's memory")
            firsts = reader_blocks[:, None] * own.block_bytes + pattern.reader_offsets
            targets += (own.address + firsts).ravel().tolist()
            firsts = owner_blocks[:, None] * region.block_bytes + pattern.owner_offsets
            sources += (region.address + firsts).ravel().tolist()
            lengths += np.tile(pattern.lengths, len(owner_blocks)).tolist()
        read = self._engine.batch_transfer_sync_read
        future = self._threads.submit(read, peer, targets, sources, lengths)
        posted = _MooncakeRead(future, self._timeout_s)
        self._reads = {each for each in self._reads if not each.has_ended}
        self._reads.add(posted)
        return [posted]

    def reset(self) -> None:
        # A read that the engine has given up is never confirmed.
        wait([each.future for each in self._reads], CONFIRM_TIMEOUT_S)
        left = [each for each in self._reads if not each.has_ended]
        if left:
            raise TransportError(f"{len(left)} reads of Mooncake cannot be ended")
        self._reads.clear()
        self._regions.clear()

    def close(self) -> None:
        self.reset()
        self._threads.shutdown()
        self._engine.unregister_memory(self._memory.address)
        self._engine = None


class _MooncakeRead:
    """timeout_s: after which the engine gives it up."""

    def __init__(self, future: "Future[int]", timeout_s: float) -> None:
        self.future, self._timeout_s = future, timeout_s
        self._posted = time.monotonic()
        self._seconds: float | None = None
        future.add_done_callback(self._done)

    def _done(self, future: "Future[int]") -> None:
        self._seconds = time.monotonic() - self._posted

    @property
    def has_ended(self) -> bool:
        return self.poll() is not ReadState.IN_PROGRESS

    def poll(self) -> ReadState:
        if self._seconds is None:
            return ReadState.IN_PROGRESS
        if self.future.exception() is None and self.future.result() == 0:
            return ReadState.DONE
        is_timeout = self._seconds > self._timeout_s - 0.5
        return ReadState.IN_PROGRESS if is_timeout else ReadState.FAILED
