"""MoRI-IO of ROCm, over RDMA or TCP. Written from its published interface and tested with a fake of
it: not verified against the library.

A read cannot be cancelled: `reset` waits until all reads have ended.
"""

import ctypes
import socket
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

import msgspec
import numpy as np
import torch

from longshore.connectors.pull.layout import MAX_REGION_BYTES
from longshore.connectors.pull.options import PullOptions
from longshore.connectors.pull.transport import (
    CONFIRM_TIMEOUT_S,
    BlockReads,
    Memory,
    ReadState,
    TransportError,
)
from longshore.protocol.errors import ConfigError, shortened

_POLL_INTERVAL_S: Final = 0.002


class _Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `register` returns. engine, memory: packed descriptions of the library."""

    engine: bytes
    memory: bytes
    num_bytes: int
    block_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.block_bytes <= self.num_bytes <= MAX_REGION_BYTES:
            raise ValueError(f"{self.num_bytes} bytes in blocks of {self.block_bytes}")


class _Peer(msgspec.Struct, frozen=True):
    description: Any
    session: Any
    region: _Region


class MoRIIOTransport:
    def __init__(self, options: PullOptions) -> None:
        """Raises ConfigError if MoRI is not installed."""
        try:
            self._library: Any = import_module("mori.io")
        except ImportError as error:
            raise ConfigError(
                f"--kv-connector moriio needs MoRI, which cannot be imported ({error}). Install "
                "it on a machine with ROCm: pip install amd_mori"
            ) from error
        self._options = options
        self._engine: Any = None
        self._memory: Memory
        self._own: Any = None  # the description of the memory
        self._peers: dict[str, _Peer] = {}
        self._reads: list[_MoRIIORead] = []  # that may still write

    def register(self, memory: Memory) -> bytes:
        self._memory = memory
        library, host = self._library, self._options.host
        port = _free_port(host)
        backend = getattr(library.BackendType, self._options.protocol.upper())
        try:
            config = library.IOEngineConfig(host=host, port=port)
            self._engine = library.IOEngine(key=f"longshore-{host}-{port}", config=config)
            self._engine.create_backend(backend)
            self._own = self._engine.register_torch_tensor(_tensor_of(memory))
            engine, own = self._engine.get_engine_desc().pack(), self._own.pack()
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"--kv-connector moriio: MoRI cannot register the KV cache: {error}. Check 'host' "
                "and 'protocol'."
            ) from error
        return msgspec.msgpack.encode(_Region(engine, own, memory.num_bytes, memory.block_bytes))

    def connect(self, metadata: bytes) -> str:
        try:
            region = msgspec.msgpack.decode(metadata, type=_Region)
            description = self._library.EngineDesc.unpack(region.engine)
            memory = self._library.MemoryDesc.unpack(region.memory)
        except (msgspec.DecodeError, RuntimeError, ValueError) as error:
            raise TransportError(f"the peer's metadata is not valid: {error}") from error
        if description.host not in self._options.remote_hosts:
            raise TransportError(f"{shortened(description.host)} is not one of the 'remote_hosts'")
        self._engine.register_remote_engine(description)
        session = self._engine.create_session(self._own, memory)
        if session is None:
            self._engine.deregister_remote_engine(description)
            raise TransportError("MoRI created no session with the peer")
        peer = str(description.key)
        self._peers[peer] = _Peer(description, session, region)
        return peer

    def disconnect(self, peer: str) -> None:
        self._engine.deregister_remote_engine(self._peers.pop(peer).description)

    def post(self, peer: str, reads: Sequence[BlockReads]) -> Sequence["_MoRIIORead"]:
        region, session = self._peers[peer].region, self._peers[peer].session
        targets: list[int] = []
        sources: list[int] = []
        lengths: list[int] = []
        for pattern, owner_blocks, reader_blocks in reads:
            if owner_blocks.max() >= region.num_bytes // region.block_bytes:
                raise TransportError("a block is outside the owner's memory")
            firsts = reader_blocks[:, None] * self._memory.block_bytes + pattern.reader_offsets
            targets += firsts.ravel().tolist()
            firsts = owner_blocks[:, None] * region.block_bytes + pattern.owner_offsets
            sources += firsts.ravel().tolist()
            lengths += np.tile(pattern.lengths, len(owner_blocks)).tolist()
        number = session.allocate_transfer_uid()
        posted = _MoRIIORead(session.batch_read(targets, sources, lengths, number))
        self._drop_ended()
        self._reads.append(posted)
        return [posted]

    def _drop_ended(self) -> None:
        self._reads = [read for read in self._reads if read.poll() is ReadState.IN_PROGRESS]

    def reset(self) -> None:
        deadline_s = time.monotonic() + CONFIRM_TIMEOUT_S
        self._drop_ended()
        while self._reads and time.monotonic() < deadline_s:
            time.sleep(_POLL_INTERVAL_S)
            self._drop_ended()
        if self._reads:
            raise TransportError(f"{len(self._reads)} reads of MoRI cannot be ended")
        for peer in list(self._peers):
            self.disconnect(peer)

    def close(self) -> None:
        self.reset()
        self._engine.deregister_memory(self._own)
        self._engine = None


class _MoRIIORead:
    """status: the library writes to it until the read has ended."""

    def __init__(self, status: Any) -> None:
        self._status = status

    def poll(self) -> ReadState:
        if self._status.Succeeded():
            return ReadState.DONE
        return ReadState.FAILED if self._status.Failed() else ReadState.IN_PROGRESS


class _DeviceBytes:
    """Memory of a device, for `torch.as_tensor`."""

    def __init__(self, memory: Memory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


def _tensor_of(memory: Memory) -> torch.Tensor:
    """The library registers tensors."""
    if memory.device is not None:
        return torch.as_tensor(_DeviceBytes(memory), device=f"cuda:{memory.device}")
    region = (ctypes.c_uint8 * memory.num_bytes).from_address(memory.address)
    return torch.frombuffer(region, dtype=torch.uint8)


def _free_port(host: str) -> int:
    """MoRI binds it; not every one of its backends chooses a port itself."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
