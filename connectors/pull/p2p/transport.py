"""What the pull connector calls: links to owners when they are needed, and those of readers."""

import ctypes
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Final

import msgspec
import torch

from longshore.connectors.offloading.cuda_copies import cuda_copier, load_runtime
from longshore.connectors.pull.layout import MAX_REGION_BYTES
from longshore.connectors.pull.options import PullOptions
from longshore.connectors.pull.p2p.channel import Channel
from longshore.connectors.pull.p2p.communicator import Library
from longshore.connectors.pull.p2p.gloo import GlooLibrary
from longshore.connectors.pull.p2p.link import (
    Here,
    MappedLink,
    MappingLink,
    P2PRead,
    ReceivingLink,
    SendingLink,
    StartedLinks,
)
from longshore.connectors.pull.p2p.messages import Join, LibraryName, ToOwner, ToReader
from longshore.connectors.pull.p2p.nccl import NcclLibrary
from longshore.connectors.pull.p2p.peer_memory import (
    DRIVER,
    ExportedMemory,
    PeerMemory,
    this_node,
)
from longshore.connectors.pull.p2p.staging import StagingPool, chunks_of
from longshore.connectors.pull.transport import (
    CONFIRM_TIMEOUT_S,
    BlockReads,
    Memory,
    TransportError,
)

logger = logging.getLogger(__name__)

TIMEOUT_SHARE: Final = 0.8
"""Of the reader's `read_timeout_s`: after it, a link ends itself, so that the reader need not close
the connections to all owners."""

MAX_SILENCE_S: Final = 10.0

JOIN_S: Final = 1.0
"""How long the threads of all links may take to end when the transport is closed. One that is in a
call which cannot be ended has no blocks."""


class _Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `register` returns. session: random; who knows it may read. library: of the owner.
    exported: for readers on the same node; None: they cannot map the memory."""

    session: Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    library: LibraryName
    num_bytes: int
    block_bytes: int
    exported: ExportedMemory | None = None

    def __post_init__(self) -> None:
        if not 0 < self.block_bytes <= self.num_bytes <= MAX_REGION_BYTES:
            raise ValueError(f"{self.num_bytes} bytes in blocks of {self.block_bytes}")


class P2PTransport:
    def __init__(self, options: PullOptions) -> None:
        self._options = options
        self._timeout_s = options.read_timeout_s * TIMEOUT_SHARE
        self._session = os.urandom(16)
        self._memory: Memory
        self._peer_memory: PeerMemory | None = None
        self._regions: dict[str, _Region] = {}  # by peer
        self._links: dict[str, ReceivingLink] = {}  # by peer
        self._ending: list[ReceivingLink] = []  # that may still write to a block
        self._started = StartedLinks()

    def register(self, memory: Memory) -> bytes:
        """Raises ConfigError without the library, or if it cannot listen."""
        self._memory = memory
        library = self._library()
        exported = self._exported()
        make = partial(Here, library, memory)
        self._sending_here = make(StagingPool(library), self._started, self._timeout_s)
        self._receiving_here = make(StagingPool(library), self._started, self._timeout_s)
        silence_s = min(MAX_SILENCE_S, self._timeout_s)
        self._channel = Channel(self._options, self._make_sending, silence_s)
        logger.info("p2p_nccl: KV blocks are transferred by %s", library.name)
        if library.name == "nccl":
            logger.warning(
                "--kv-connector p2p_nccl is not verified on GPUs: NCCL and CUDA IPC were tested "
                "only with fakes. Compare outputs before you rely on it."
            )
        region = _Region(
            self._session,
            self._options.host,
            self._channel.port,
            library.name,
            memory.num_bytes,
            memory.block_bytes,
            exported,
        )
        return msgspec.msgpack.encode(region)

    def _library(self) -> Library:
        index = self._memory.device
        if index is None:
            return GlooLibrary(self._options.host)
        device = torch.device("cuda", index)
        return NcclLibrary(
            index,
            lambda: cuda_copier(device, self._memory.block_bytes, "within the device"),
            device,
        )

    def _open_peer_memory(self, index: int) -> PeerMemory:
        """Raises OSError."""
        return PeerMemory(load_runtime(), ctypes.CDLL(DRIVER), lambda: torch.cuda.device(index))

    def _exported(self) -> ExportedMemory | None:
        if self._memory.device is None:
            return None
        try:
            self._peer_memory = self._open_peer_memory(self._memory.device)
            return self._peer_memory.export(self._memory)
        except (OSError, RuntimeError) as error:
            logger.info(
                "p2p_nccl: other processes of this node cannot map the KV cache (%s), so NCCL "
                "copies it. Memory of torch's expandable segments cannot be mapped.",
                error,
            )
            return None

    def _make_sending(
        self, join: Join, send: Callable[[ToReader], None], on_end: Callable[[], None]
    ) -> SendingLink:
        """On the thread of the channel."""
        if join.session != self._session:
            raise TransportError("the reader does not know this engine; it was restarted")
        self._started.check()
        if join.library == "mapped":
            return MappedLink(self._sending_here, send, on_end)
        if join.library != self._sending_here.library.name:
            raise TransportError(f"the reader uses {join.library}")
        return SendingLink(self._sending_here, send, on_end)

    def connect(self, metadata: bytes) -> str:
        try:
            region = msgspec.msgpack.decode(metadata, type=_Region)
        except msgspec.DecodeError as error:
            raise TransportError(f"the peer's metadata is not valid: {error}") from error
        if region.host not in self._options.remote_hosts:
            raise TransportError(f"{region.host} is not one of the 'remote_hosts'")
        own = self._receiving_here.library.name
        if region.library != own:
            raise TransportError(f"the owner's blocks are read by {region.library}, not {own}")
        peer = region.session.hex()
        self._regions[peer] = region
        return peer

    def disconnect(self, peer: str) -> None:
        del self._regions[peer]
        self._end_link(peer, "its owner was disconnected")

    def post(self, peer: str, reads: Sequence[BlockReads]) -> Sequence[P2PRead]:
        if self._channel.failure is not None:
            raise RuntimeError("the side channel has failed") from self._channel.failure
        region = self._regions[peer]
        num_blocks = region.num_bytes // region.block_bytes
        if any(read.owner_blocks.max() >= num_blocks for read in reads):
            raise TransportError("a block is outside the owner's memory")
        link = self._links.get(peer)
        if link is None or link.failure is not None:
            self._end_link(peer, "")
            self._started.check()
            make = self._making_link(region)
            link = self._links[peer] = self._channel.open(make, region.host, region.port)
        chunks = partial(chunks_of, reads, region.block_bytes, self._memory.block_bytes)
        read = P2PRead(link, chunks, time.monotonic() + self._timeout_s)
        link.put(read)
        return [read]

    def _making_link(
        self, region: _Region
    ) -> Callable[[Callable[[ToOwner], None], Callable[[], None]], ReceivingLink]:
        exported = region.exported
        if exported is not None and self._peer_memory is not None and exported.node == this_node():
            try:
                mapping = self._peer_memory.map(exported)
            except RuntimeError as error:
                logger.info("p2p_nccl: the memory of an owner cannot be mapped: %s", error)
            else:
                return partial(MappingLink, mapping, region.session, self._receiving_here)
        return partial(ReceivingLink, region.session, self._receiving_here)

    def _end_link(self, peer: str, reason: str) -> None:
        self._ending = [link for link in self._ending if not link.has_ended()]
        if (link := self._links.pop(peer, None)) is not None:
            link.end(reason)
            self._ending.append(link)

    def reset(self) -> None:
        for peer in list(self._links):
            self._end_link(peer, "all links were ended by force")
        deadline_s = time.monotonic() + CONFIRM_TIMEOUT_S
        for link in self._ending:
            if not link.has_ended(max(deadline_s - time.monotonic(), 0.0)):
                raise TransportError("a copy from staging memory to KV blocks does not end")
        self._regions.clear()

    def close(self) -> None:
        self.reset()
        sending = self._channel.close(CONFIRM_TIMEOUT_S)
        if sending is None:
            raise TransportError("the thread of the side channel does not end")
        for link in sending:
            link.end("its owner is shutting down")
        deadline_s = time.monotonic() + CONFIRM_TIMEOUT_S
        for link in sending:
            if not link.has_ended(max(deadline_s - time.monotonic(), 0.0)):
                raise TransportError("a copy from KV blocks to staging memory does not end")
        self._started.join(JOIN_S)
