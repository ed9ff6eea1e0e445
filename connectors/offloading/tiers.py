"""The tiers below host memory: their interface in the scheduler and in a worker, and what the
manager of all tiers and the handlers send to each other.

Tiers are numbered from the fastest, from 0. Blocks are written to them from host memory, and read
from them into host memory. A tier in the scheduler does no I/O: it answers from what the workers
have told it, and sends them commands, for example a question.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import msgspec
import numpy as np

from longshore.connectors.offloading.ledger import LedgerEvent, PreparedStore
from longshore.connectors.offloading.spec import HintedKeys
from longshore.protocol.events import Locality, Medium

if TYPE_CHECKING:  # only workers need its libraries
    from longshore.connectors.offloading.disk.results import BlockRead, BlockWrite, Outcome


class TierFaults(msgspec.Struct, frozen=True, array_like=True):
    """See the fields of TierStats with these names. For a tier without a server, all are 0."""

    num_failed_operations: int = 0
    num_rejected_operations: int = 0
    num_breaker_openings: int = 0
    num_open_breakers: int = 0


class LowerTier(Protocol):
    """What a tier holds, in the scheduler. A block is there when all ranks have written it.

    name, medium, locality: for messages and KV events.
    """

    name: str
    medium: Medium
    locality: Locality | None

    def has(self, key: bytes) -> bool | None:
        """Whether the block can be read. None: not known yet; the workers will be asked."""

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those that the tier does not have, as far as it knows without asking."""

    def touch(self, keys: Sequence[bytes], position: int) -> None:
        """As `OffloadingManager.touch`."""

    def refresh(self, keys: Sequence[bytes]) -> None:
        """As `OffloadingManager.refresh`."""

    def retain(self, hinted: HintedKeys) -> None:
        """As `OffloadingManager.retain`. By default, a tier ignores hints."""
        return

    def expire(self, now: float) -> None:
        """As `OffloadingManager.expire`."""
        return

    def begin_reads(self, keys: Sequence[bytes]) -> list[int]:
        """Keep blocks that the tier has until `end_reads`. Returns their slots; 0 in a tier without
        slots."""

    def end_reads(self, keys: Sequence[bytes], *, take: bool = False) -> None:
        """All ranks have read these blocks, or failed to. take: they are in host memory now and
        need not be kept here. A tier that belongs to other engines, too, keeps them."""

    @property
    def num_blocks(self) -> int:
        """Blocks that are known to be there, for metrics."""

    @property
    def capacity_blocks(self) -> int:
        """Blocks for which there is room; 0 if that is not known."""

    @property
    def faults(self) -> TierFaults:
        """Since the start of the engine, for metrics."""

    @property
    def can_write(self) -> bool:
        """Whether writes can begin now. If not, blocks wait."""

    def begin_writes(self, keys: Sequence[bytes]) -> PreparedStore | None:
        """Begin to write those of the blocks that are not there. None: there is no room now, and
        they are not written."""

    def end_writes(self, keys: Sequence[bytes], failed: Sequence[bytes]) -> None:
        """All ranks have written these blocks, except for `failed`."""

    def remove(self, keys: Sequence[bytes]) -> None:
        """These blocks are damaged or lost; keys that the tier does not have are ignored."""

    @property
    def has_commands(self) -> bool:
        """Whether `take_commands` would return some."""

    def take_commands(self) -> list[bytes]:
        """Commands for `TierWorker.run` of every rank."""

    def command_ended(self, command: bytes, *, is_failed: bool) -> None:
        """A command has ended on all ranks. is_failed: it raised on one of them. Messages that it
        produced may arrive a little later."""

    def receive(self, rank: int, message: bytes) -> None:
        """A message of the tier's `TierWorker` on one rank."""

    def take_events(self) -> list[LedgerEvent]:
        """What was stored and removed since the last call. Called after each step."""

    def reset(self) -> None:
        """Remove everything. Not called while blocks are read or written."""

    def begin_epoch(self) -> None:
        """All workers were replaced: reads, writes and commands in progress have failed. What the
        tier still has is reported as stored again."""

    def check(self) -> None:
        """Raise LongshoreError if an invariant is violated. For tests."""


class TierWorker(Protocol):
    """A tier in a worker: the I/O of one rank. `read`, `write` and `run` may block; each is called
    on one thread at a time; `read` in parallel with the others.

    name: for the names of its queues.
    medium: for metrics.
    waits_for_writes: `run` is called after the writes submitted before, on their thread; else on a
          thread of its own.
    """

    name: str
    medium: Medium
    waits_for_writes: bool

    def read(self, batch: Sequence["BlockRead"], ends_s: float) -> "list[Outcome]":
        """ends_s: by time.monotonic(). What is not read by then is LATE; what has begun may take a
        little longer, if it cannot be interrupted."""

    def write(self, batch: Sequence["BlockWrite"]) -> "list[Outcome]": ...

    def run(self, command: bytes) -> None:
        """Execute a command of the scheduler's half."""

    def take_messages(self) -> list[bytes]:
        """Messages for `LowerTier.receive`, in order; called after each `run`, and at startup. Of
        large ones return one at a time, and wake the worker."""

    def interrupt(self) -> None:
        """Called on another thread before `close`: end soon what is in progress, as failed, unless
        it is quick."""

    def close(self) -> None:
        """Called once, when nothing is in progress."""


# Messages


def int64s(numbers: Sequence[int]) -> bytes:
    """As the messages below have slots."""
    return np.array(numbers, np.int64).tobytes()


class LoadSource(msgspec.Struct, frozen=True, array_like=True):
    """`tier_data` of a load.

    slots: of host memory, int64, one per block.
    reads: (index of the block, tier, slot there) of blocks to read into their host slots first.
    """

    slots: bytes
    reads: list[tuple[int, int, int]] = []


class Spill(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write blocks from host memory to a lower tier. slots: int64 each."""

    tier: int
    keys: list[bytes]
    groups: bytes
    host_slots: bytes
    slots: bytes


class Stage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read blocks of a lower tier into host memory. slots: int64 each."""

    tier: int
    keys: list[bytes]
    host_slots: bytes
    slots: bytes


class TierCommand(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A command of a lower tier to its workers."""

    tier: int
    command: bytes


TierTask: TypeAlias = Spill | Stage | TierCommand
"""`tier_data` of a tier job."""


HOST_TIER: Final = -1
"""The number of host memory in a TierMessage, which then is HOST_KEPT or HOST_NEW."""

HOST_KEPT: Final = b"kept"
HOST_NEW: Final = b"new"
"""What a rank says when it starts: whether its share of host memory is that of earlier workers."""


class TierMessage(msgspec.Struct, frozen=True, array_like=True):
    """`tier_data` of a report: a message of one rank's TierWorker, or the keys that this rank has
    not read in time, which comes before the end of their job."""

    tier: int
    message: bytes
    late: list[bytes] = []
