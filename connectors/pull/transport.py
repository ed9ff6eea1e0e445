"""What moves the bytes: reads of another process's memory, by an existing library."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from longshore.connectors.pull.layout import Pattern
from longshore.protocol.arrays import Int64Array
from longshore.protocol.errors import LongshoreError

CONFIRM_TIMEOUT_S: Final = 10.0
"""How long a library may take to confirm that a read has ended, once it is closed by force."""


class TransportError(LongshoreError):
    """The library rejected a peer or a read; nothing was begun."""


class PullStuck(LongshoreError):
    """What reads or writes the blocks of a pull cannot be ended; only a new process ends it."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The KV cache of one rank.

    address, num_bytes: of all blocks together.
    block_bytes: from one block to the next.
    device: index of the CUDA device; None: host memory.
    """

    address: int
    num_bytes: int
    block_bytes: int
    device: int | None = None


class BlockReads(NamedTuple):
    """Read `pattern` from each block of `owner_blocks` into the one of `reader_blocks` at the same
    index. Transports may keep what they prepare for a (peer, `Pattern` object)."""

    pattern: Pattern
    owner_blocks: Int64Array
    reader_blocks: Int64Array


class ReadState(enum.Enum):
    IN_PROGRESS = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()
    """It has ended without success; nothing is written any more."""
    UNCONFIRMED = enum.auto()
    """It has failed, but may write until `reset`."""


class Read(Protocol):
    """A read in progress; made by `Transport.post`."""

    def poll(self) -> ReadState:
        """Never blocks. To be called until it has ended, and not again."""


class Transport(Protocol):
    """The library, in one rank. All methods but `register` are called on one thread; `register` is
    called first, once."""

    def register(self, memory: Memory) -> bytes:
        """Let other processes read this memory, and return what they need for `connect`. Reads by
        others need no call in this process."""

    def connect(self, metadata: bytes) -> str:
        """Connect to a rank of another engine, by what its `register` returned; returns the name of
        the peer for the other calls. Raises TransportError."""

    def disconnect(self, peer: str) -> None:
        """Disconnect from a peer of which no read is in progress."""

    def post(self, peer: str, reads: Sequence[BlockReads]) -> Sequence[Read]:
        """Begin to read from a peer. Raises TransportError; then nothing has begun."""

    def reset(self) -> None:
        """Close all connections by force. When this returns, no read of this process is in progress
        and no peer is connected. Others can still read the registered memory."""

    def close(self) -> None:
        """End everything; the memory is no longer registered."""
