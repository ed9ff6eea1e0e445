"""The disk tier in the scheduler: a ledger of slots, which are the same on all ranks.

It is known when every rank has said what it found on its disk.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from longshore.connectors.offloading.ledger import (
    LedgerEvent,
    OffloadLedger,
    PreparedStore,
    complete_stores,
)
from longshore.connectors.offloading.spec import HintedKeys
from longshore.connectors.offloading.tiers import TierFaults
from longshore.protocol.events import Locality, Medium

logger = logging.getLogger(__name__)


CLEAR: Final = b"clear"
"""Command: delete all blocks."""


class DiskContents(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has found on its disk when it started, in several messages.

    num_slots: that the rank's store has.
    """

    num_slots: int
    keys: list[bytes]
    slots: bytes
    is_last: bool


class DiskTier:
    """See LowerTier. Keys of all ranks' disks are in the same slots."""

    name = "disk"
    medium: Medium = "DISK"
    locality: Locality | None = None
    faults = TierFaults()

    def __init__(self, num_ranks: int, make_ledger: Callable[[int], OffloadLedger]) -> None:
        """make_ledger: of this number of slots."""
        self._num_ranks = num_ranks
        self._make_ledger = make_ledger
        self._is_clearing = False  # until all ranks have deleted their blocks
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self._ledger: OffloadLedger | None = None  # until all ranks have said what they found
        self._contents: list[_RankContents | None] = [None] * self._num_ranks
        self._is_clear_unsent = self._is_clearing
        self._was_reset = self._is_clearing  # what the ranks have found is void

    @property
    def _opened(self) -> OffloadLedger:
        assert self._ledger is not None
        return self._ledger

    def has(self, key: bytes) -> bool | None:
        return None if self._ledger is None else key in self._ledger

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        if self._ledger is None:
            return []
        return list(filter(self._ledger.may_store, keys))

    def touch(self, keys: Sequence[bytes], position: int) -> None:
        if self._ledger is not None:
            self._ledger.touch(keys, position)

    def refresh(self, keys: Sequence[bytes]) -> None:
        if self._ledger is not None:
            self._ledger.refresh(keys)

    def retain(self, hinted: HintedKeys) -> None:
        if self._ledger is not None:
            self._ledger.retain(hinted)

    def expire(self, now: float) -> None:
        if self._ledger is not None:
            self._ledger.expire(now)

    def begin_reads(self, keys: Sequence[bytes]) -> list[int]:
        return self._opened.prepare_load(keys)

    def end_reads(self, keys: Sequence[bytes], *, take: bool = False) -> None:
        self._opened.complete_load(keys, take=take)

    @property
    def num_blocks(self) -> int:
        return 0 if self._ledger is None else self._ledger.num_ready

    @property
    def capacity_blocks(self) -> int:
        return 0 if self._ledger is None else self._ledger.capacity

    @property
    def can_write(self) -> bool:
        """A write during a reset could be deleted by it."""
        return self._ledger is not None and not self._is_clearing

    def begin_writes(self, keys: Sequence[bytes]) -> PreparedStore | None:
        return self._opened.prepare_store(keys)

    def end_writes(self, keys: Sequence[bytes], failed: Sequence[bytes]) -> None:
        complete_stores(self._opened, keys, failed)

    def remove(self, keys: Sequence[bytes]) -> None:
        if self._ledger is not None:
            self._ledger.remove(keys)

    @property
    def has_commands(self) -> bool:
        return self._is_clear_unsent

    def take_commands(self) -> list[bytes]:
        commands = [CLEAR] if self._is_clear_unsent else []
        self._is_clear_unsent = False
        return commands

    def command_ended(self, command: bytes, *, is_failed: bool) -> None:
        self._is_clearing = False
        if is_failed:
            logger.warning(
                "the disk tier was reset, but a worker could not delete its blocks; they may be "
                "found again after a restart. Its log has the reason."
            )

    def receive(self, rank: int, message: bytes) -> None:
        if self._ledger is not None:
            return  # a repeated message
        read = msgspec.msgpack.decode(message, type=DiskContents)
        contents = self._contents[rank]
        if contents is None:
            contents = self._contents[rank] = _RankContents()
        contents.num_slots = read.num_slots
        slots = np.frombuffer(read.slots, np.int64).tolist()
        contents.slots.update(zip(read.keys, slots, strict=True))
        contents.is_whole = read.is_last
        ranks = [each for each in self._contents if each is not None and each.is_whole]
        if len(ranks) == self._num_ranks:
            self._open(ranks)

    def _open(self, ranks: Sequence["_RankContents"]) -> None:
        """All ranks have said what they found. A block counts if all have it in one slot."""
        num_slots = min(each.num_slots for each in ranks)
        ledger = self._make_ledger(num_slots)
        first, *others = ranks
        found = {
            key: slot
            for key, slot in first.slots.items()
            if not self._was_reset
            and slot < num_slots
            and all(other.slots.get(key) == slot for other in others)
        }
        if found:
            ledger.insert_ready(list(found), list(found.values()))
        logger.info("disk tier: %d of %d blocks are in use", len(found), num_slots)
        self._ledger = ledger
        self._contents = []

    def take_events(self) -> list[LedgerEvent]:
        return [] if self._ledger is None else self._ledger.take_events()

    def reset(self) -> None:
        self._is_clearing = self._is_clear_unsent = self._was_reset = True
        if self._ledger is not None:
            self._ledger.clear()

    def check(self) -> None:
        if self._ledger is not None:
            self._ledger.check()


class _RankContents:
    """What one rank has found on its disk."""

    def __init__(self) -> None:
        self.num_slots = 0
        self.slots: dict[bytes, int] = {}
        self.is_whole = False
