"""NIXL with its UCX backend: RDMA where there is a network for it, else shared memory or TCP.

There are two agents: one that serves the memory to others, and one that reads. NIXL 1.5 cannot end
a read: after `remove_remote_agent` and `release_xfer_handle` the bytes still arrive, as soon as a
stopped owner goes on. Only destroying the reading agent closes its connections for good.
"""

import contextlib
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from longshore.connectors.base.nixl_library import NixlLibrary, load_nixl
from longshore.connectors.pull.layout import MAX_REGION_BYTES, Pattern
from longshore.connectors.pull.options import PullOptions, url_host
from longshore.connectors.pull.transport import BlockReads, Memory, ReadState, TransportError
from longshore.protocol.arrays import Int64Array
from longshore.protocol.errors import ConfigError, shortened
from longshore.protocol.transport.channel import Endpoint, is_loopback

MAX_PREPARED: Final = 1 << 17
"""Descriptors that are prepared for a pattern and a side; for more, each read has its own list."""

MAX_POSTED: Final = 4096
"""Descriptors of one read: posting blocks the thread, about 70 ms for so many over TCP."""

_IN_PROGRESS: Final = "PROC"
_DONE: Final = "DONE"
_FAILED: Final = "ERR"
_UNCONFIRMED: Final = "unconfirmed"
"""NIXL 1.5 reports the first error of a read, whose other parts may still be in progress."""

_OWN: Final = "NIXL_INIT_AGENT"
_MAX_METADATA_BYTES: Final = 1 << 20
_numbers: Final = itertools.count()


class _Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `register` returns: NIXL's metadata of the agent, and where its memory is."""

    agent: bytes
    address: int
    num_bytes: int
    block_bytes: int
    kind: Literal["DRAM", "VRAM"]
    device: int

    def __post_init__(self) -> None:
        if not 0 < self.block_bytes <= self.num_bytes <= MAX_REGION_BYTES:
            raise ValueError(f"{self.num_bytes} bytes in blocks of {self.block_bytes}")

    @property
    def num_blocks(self) -> int:
        return self.num_bytes // self.block_bytes

    def descriptors(
        self, offsets: Int64Array, lengths: Int64Array, blocks: Int64Array
    ) -> npt.NDArray[np.uint64]:
        """(n, 3): address, length and device of each run, block by block."""
        starts = (self.address + blocks[:, None] * self.block_bytes + offsets).ravel()
        found = np.empty((len(starts), 3), np.uint64)
        found[:, 0] = starts
        found[:, 1] = np.tile(lengths, len(blocks))
        found[:, 2] = self.device
        return found


class NixlTransport:
    def __init__(self, options: PullOptions) -> None:
        """Raises ConfigError if NIXL is not installed."""
        if is_loopback(Endpoint(f"tcp://{url_host(options.host)}:0")):
            os.environ.setdefault("UCX_NET_DEVICES", "lo")  # UCX would listen on all interfaces
        try:
            self._nixl = load_nixl()
        except ImportError as error:
            raise ConfigError(
                f"--kv-connector nixl needs NIXL, which cannot be imported ({error}). Install it: "
                "pip install --no-deps 'nixl>=1.5' 'nixl-cu13>=1.5'"
            ) from error
        self._errors = self._nixl.errors
        self._own: _Region
        self._server: Any = None
        self._agent: Any = None  # which reads; made when it is needed
        self._regions: dict[str, _Region] = {}  # by peer
        self._prepared: dict[tuple[str, int], tuple[Pattern, Any]] = {}
        self._reads: set[_NixlRead] = set()

    def register(self, memory: Memory) -> bytes:
        sizes = memory.address, memory.num_bytes, memory.block_bytes
        if memory.device is None:
            self._own = _Region(b"", *sizes, kind="DRAM", device=0)
        else:
            self._own = _Region(b"", *sizes, kind="VRAM", device=memory.device)
        try:
            self._server = self._new_agent("serve")
            metadata = self._server.get_agent_metadata()
        except self._errors as error:
            raise ConfigError(
                f"--kv-connector nixl: NIXL cannot register the KV cache: {error}. UCX_TLS, "
                "UCX_NET_DEVICES and UCX_LOG_LEVEL select and show the network that UCX uses."
            ) from error
        return msgspec.msgpack.encode(msgspec.structs.replace(self._own, agent=metadata))

    def _new_agent(self, purpose: str) -> Any:
        # Unique in the network: a peer is known by the name of its agent.
        name = f"longshore-{purpose}-{os.getpid()}-{next(_numbers)}-{os.urandom(8).hex()}"
        api, own = self._nixl.api, self._own
        agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        agent.register_memory([(own.address, own.num_bytes, own.device, "")], own.kind)
        return agent

    def connect(self, metadata: bytes) -> str:
        if len(metadata) > _MAX_METADATA_BYTES:
            raise TransportError(f"the peer's metadata has {len(metadata)} bytes")
        try:
            region = msgspec.msgpack.decode(metadata, type=_Region)
        except msgspec.DecodeError as error:
            raise TransportError(f"the peer's metadata is not valid: {error}") from error
        try:
            if self._agent is None:
                self._agent = self._new_agent("read")
            name = self._agent.add_remote_agent(region.agent)
        except self._errors as error:
            raise TransportError(f"NIXL cannot connect: {shortened(str(error))}") from error
        peer = name.decode() if isinstance(name, bytes) else str(name)
        self._regions[peer] = region
        return peer

    def disconnect(self, peer: str) -> None:
        del self._regions[peer]
        for key in [key for key in self._prepared if key[0] in (peer, _OWN)]:
            del self._prepared[key]
        with contextlib.suppress(*self._errors):  # it is gone
            self._agent.remove_remote_agent(peer)

    def post(self, peer: str, reads: Sequence[BlockReads]) -> Sequence["_NixlRead"]:
        posted: list[_NixlRead] = []
        for read in reads:
            for part in _parts(read):
                try:
                    handle = self._make(peer, part)
                except self._errors as error:
                    if not posted:
                        raise TransportError(
                            f"NIXL cannot read: {shortened(str(error))}"
                        ) from error
                    posted.append(_NixlRead(self._nixl, self._agent, None, _FAILED, self._reads))
                    return posted
                state = _state_of(self._nixl, self._agent.transfer, handle)
                posted.append(_NixlRead(self._nixl, self._agent, handle, state, self._reads))
                if state not in (_IN_PROGRESS, _DONE):
                    return posted
        return posted

    def _make(self, peer: str, read: BlockReads) -> Any:
        region, own, pattern = self._regions[peer], self._own, read.pattern
        count = len(pattern.lengths)
        if max(region.num_blocks, own.num_blocks) * count <= MAX_PREPARED:
            return self._agent.make_prepped_xfer(
                "READ",
                self._prepare(_OWN, own, pattern, pattern.reader_offsets),
                _indices(read.reader_blocks, count),
                self._prepare(peer, region, pattern, pattern.owner_offsets),
                _indices(read.owner_blocks, count),
            )
        ours = own.descriptors(pattern.reader_offsets, pattern.lengths, read.reader_blocks)
        theirs = region.descriptors(pattern.owner_offsets, pattern.lengths, read.owner_blocks)
        return self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(ours, own.kind),
            self._agent.get_xfer_descs(theirs, region.kind),
            peer,
        )

    def _prepare(self, side: str, region: _Region, pattern: Pattern, offsets: Int64Array) -> Any:
        """The descriptors of the pattern in all blocks of one side, a peer or _OWN."""
        key = side, id(pattern)
        if key not in self._prepared:
            blocks = np.arange(region.num_blocks)
            descriptors = region.descriptors(offsets, pattern.lengths, blocks)
            handle = self._agent.prep_xfer_dlist(side, descriptors, region.kind)
            self._prepared[key] = pattern, handle  # with the pattern, so that its id stays unique
        return self._prepared[key][1]

    def reset(self) -> None:
        for read in self._reads:
            read.abandon()
        self._reads.clear()
        self._regions.clear()
        self._prepared.clear()
        agent, self._agent = self._agent, None
        if agent is not None:
            _destroy(agent)

    def close(self) -> None:
        self.reset()
        server, self._server = self._server, None
        if server is not None:
            _destroy(server)


class _NixlRead:
    """reads: of the transport, from which it is removed when it has ended."""

    def __init__(
        self, nixl: NixlLibrary, agent: Any, handle: Any, state: str, reads: set["_NixlRead"]
    ) -> None:
        self._nixl = nixl
        self._agent, self._handle, self._state = agent, handle, state
        self._reads = reads
        reads.add(self)

    def poll(self) -> ReadState:
        if self._state == _IN_PROGRESS:
            self._state = _state_of(self._nixl, self._agent.check_xfer_state, self._handle)
        if self._state == _IN_PROGRESS:
            return ReadState.IN_PROGRESS
        if self._state == _UNCONFIRMED:
            return ReadState.UNCONFIRMED
        self._reads.discard(self)
        self._release()
        return ReadState.DONE if self._state == _DONE else ReadState.FAILED

    def abandon(self) -> None:
        """The agent is about to be destroyed, and with it the read."""
        self._state = _FAILED
        self._release()

    def _release(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(*self._nixl.errors):  # it is released with the agent
                self._agent.release_xfer_handle(self._handle)
        self._handle = self._agent = None  # or the agent could not be destroyed


def _state_of(nixl: NixlLibrary, call: Callable[[Any], str], handle: Any) -> str:
    """What a call says about a read. After another error than that its connection is closed, parts
    of it may still be in progress."""
    try:
        state = call(handle)
    except nixl.disconnected:
        return _FAILED
    except nixl.errors:
        return _UNCONFIRMED
    return state if state in (_IN_PROGRESS, _DONE) else _UNCONFIRMED


def _destroy(agent: Any) -> None:
    """Close the connections of an agent, whose destructor does it. Raises TransportError if that
    cannot be confirmed."""
    library_agent, agent.agent = agent.agent, None
    gc.collect()
    if sys.getrefcount(library_agent) > 2:  # this one, and the argument
        raise TransportError("NIXL's agent is still referred to, so its reads cannot be ended")


def _parts(read: BlockReads) -> Iterator[BlockReads]:
    """The read in parts of at most MAX_POSTED descriptors, if a block has no more."""
    step = max(1, MAX_POSTED // len(read.pattern.lengths))
    for first in range(0, len(read.owner_blocks), step):
        part = slice(first, first + step)
        yield BlockReads(read.pattern, read.owner_blocks[part], read.reader_blocks[part])


def _indices(blocks: Int64Array, count: int) -> npt.NDArray[np.int32]:
    return (blocks[:, None] * count + np.arange(count)).ravel().astype(np.int32)
