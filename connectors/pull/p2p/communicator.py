"""What links need of a communication library."""

import enum
from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor

from longshore.connectors.offloading.copies import Copier
from longshore.connectors.pull.p2p.messages import LibraryName
from longshore.connectors.pull.p2p.rendezvous import Rendezvous
from longshore.protocol.errors import LongshoreError

WaitUntil: TypeAlias = Callable[[float], None]
"""Waits for a transfer until a moment of `time.monotonic()`. Raises CommunicatorError if the
transfer has failed, or is late. After an error the communicator cannot be used any more."""


class CommunicatorError(LongshoreError):
    """The communicator of a link has failed."""


class Side(enum.IntEnum):
    """The rank of a process in a communicator of two."""

    READER = 0
    OWNER = 1

    @property
    def other(self) -> "Side":
        return Side(1 - self)


class Communicator(Protocol):
    """Two ranks: the owner sends, and the reader receives in the same order. All methods but
    `abort` are called on one thread."""

    def send(self, data: Tensor, number: int) -> WaitUntil:
        """Begin to send a contiguous tensor of bytes, which stays as it is until the wait ends."""

    def receive(self, data: Tensor, number: int) -> WaitUntil:
        """Begin to receive, as `send`."""

    def abort(self) -> None:
        """On any thread: end all calls and transfers, as far as the library can. May block."""

    def close(self) -> bool:
        """End everything; returns whether the library certainly uses no tensor any more."""


class Library(Protocol):
    """A library in one process. copier: between staging memory and KV blocks."""

    name: LibraryName
    copier: Copier

    def allocate(self, num_bytes: int) -> Tensor:
        """Staging memory, as bytes."""

    def connect(self, side: Side, rendezvous: Rendezvous, timeout_s: float) -> Communicator:
        """Blocks until the other side has done the same. Raises CommunicatorError."""
