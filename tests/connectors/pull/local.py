"""A transport between engines of one process, whose reads tests can delay and fail. It has the same
rules as a library: a read in progress can write at any moment until it has ended or `reset`."""

import ctypes
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import msgspec

from longshore.connectors.pull import transports
from longshore.connectors.pull.scheduler import PullConnector
from longshore.connectors.pull.transport import (
    BlockReads,
    Memory,
    Read,
    ReadState,
    TransportError,
)
from longshore.connectors.pull.worker import PullWorker

_names: Final = itertools.count()


class Network:
    """What happens to reads: state is called at each poll, with the number of the read.

    num_posted: reads so far. posted: set at each post.
    """

    def __init__(self) -> None:
        self.state: Callable[[int], ReadState] = lambda number: ReadState.DONE
        self.num_posted = 0
        self.posted = threading.Event()
        self.num_resets = 0
        self.may_reset = threading.Event()
        self.may_reset.set()


network = Network()


class _Region(msgspec.Struct, frozen=True):
    address: int
    block_bytes: int


class LocalRead:
    def __init__(self, memory: Memory, region: _Region, reads: Sequence[BlockReads]) -> None:
        self._memory, self._region, self._reads = memory, region, reads
        self._number = network.num_posted
        self.is_void = False
        network.num_posted += 1
        network.posted.set()

    def poll(self) -> ReadState:
        if self.is_void:
            return ReadState.FAILED
        state = network.state(self._number)
        if state is ReadState.DONE:
            self._copy()
        return state

    def _copy(self) -> None:
        for pattern, owner_blocks, reader_blocks in self._reads:
            for source, target in zip(owner_blocks.tolist(), reader_blocks.tolist(), strict=True):
                for first, own_first, length in zip(
                    *(array.tolist() for array in pattern), strict=True
                ):
                    ctypes.memmove(
                        self._memory.address + target * self._memory.block_bytes + own_first,
                        self._region.address + source * self._region.block_bytes + first,
                        length,
                    )


class LocalTransport:
    def __init__(self) -> None:
        self._memory: Memory
        self._peers: dict[str, _Region] = {}
        self._reads: list[LocalRead] = []

    def register(self, memory: Memory) -> bytes:
        self._memory = memory
        return msgspec.msgpack.encode(_Region(memory.address, memory.block_bytes))

    def connect(self, metadata: bytes) -> str:
        peer = f"peer-{next(_names)}"
        self._peers[peer] = msgspec.msgpack.decode(metadata, type=_Region)
        return peer

    def disconnect(self, peer: str) -> None:
        del self._peers[peer]

    def post(self, peer: str, reads: Sequence[BlockReads]) -> Sequence[Read]:
        if peer not in self._peers:
            raise TransportError("there is no such peer")
        self._reads.append(LocalRead(self._memory, self._peers[peer], reads))
        return self._reads[-1:]

    def reset(self) -> None:
        network.num_resets += 1
        network.may_reset.wait()
        for read in self._reads:
            read.is_void = True
        self._reads.clear()
        self._peers.clear()

    def close(self) -> None:
        self.reset()


transports.TRANSPORTS["local"] = lambda options: LocalTransport()


class LocalConnector(PullConnector):
    transport = "local"
    worker_half: ClassVar[str] = "tests.connectors.pull.local:LocalWorker"


class LocalWorker(PullWorker):
    transport = "local"
