"""What is on its way from host memory to a lower tier.

Blocks are written behind once they are in host memory, or written back when it evicts them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from longshore.connectors.base.groups import is_private
from longshore.connectors.offloading.ledger import OffloadLedger, PreparedStore
from longshore.connectors.offloading.tiers import LowerTier, Spill, int64s

MAX_SPILLING_SHARE: Final = 0.25
"""Share of the host tier's blocks that may be written to lower tiers at a time: a slow tier must
not keep the host tier from evicting. Others wait, and those that are evicted meanwhile are not
written."""

FREE_SHARE: Final = 0.125
"""With write-back, blocks are evicted and written to the tier below until this share of the host
tier is free: a store cannot wait until the blocks that it displaces have been written."""

MAX_JOB_BLOCKS: Final = 256
"""Blocks per job between tiers, so that a load does not wait for a long one."""


@dataclass
class Counts:
    """Since the start of the engine, see TierStats."""

    num_hit_tokens: int = 0
    num_dropped_blocks: int = 0


class Below:
    """A lower tier, and the blocks on their way to it."""

    def __init__(
        self, number: int, tier: LowerTier, host: OffloadLedger, num_tiers: int, writes_back: bool
    ) -> None:
        """number:   of the tier.
        num_tiers:   that share MAX_SPILLING_SHARE.
        writes_back: it gets what host memory evicts; else what is queued by `write_behind`.
        """
        self.number = number
        self.tier = tier
        self.writes_back = writes_back
        self.counts = Counts()
        self._host = host
        self._max_spilling = max(1, int(MAX_SPILLING_SHARE * host.capacity / num_tiers))
        self._queued: deque[bytes] = deque()  # in order; some may be evicted meanwhile
        self._spills: dict[int, list[bytes]] = {}  # keys of the jobs in progress, by job

    @property
    def num_spilling(self) -> int:
        return sum(map(len, self._spills.values()))

    @property
    def num_queued(self) -> int:
        """Number of blocks that wait to be written, or are being written."""
        return len(self._queued) + self.num_spilling

    @property
    def has_spills(self) -> bool:
        """Whether `begin_spills` would return some."""
        return bool(self._num_may_spill and (self._queued or self._num_to_evict))

    @property
    def _num_may_spill(self) -> int:
        """Number of blocks that may begin to be written now."""
        return max(0, self._max_spilling - self.num_spilling) if self.tier.can_write else 0

    @property
    def _num_to_evict(self) -> int:
        """Number of blocks to write back now, so that stores find free slots."""
        if not self.writes_back:
            return 0
        host = self._host
        num_wanted = max(1, int(FREE_SHARE * host.capacity)) - host.num_free - self.num_spilling
        return max(0, min(num_wanted, self._num_may_spill, host.num_evictable))

    def write_behind(self, keys: Iterable[bytes]) -> int:
        """Write those that are in host memory. The first blocks of a prompt are worth more than
        those after them. Returns how many are left out."""
        present = [key for key in keys if key in self._host and not is_private(key)]
        queued = present[: self._host.capacity - len(self._queued)]
        self._queued.extend(queued)
        return len(present) - len(queued)

    def begin_spills(self, next_id: Callable[[], int]) -> list[tuple[int, Spill]]:
        """Jobs to begin, with their ids."""
        begun: list[tuple[int, Spill]] = []
        while (num_evict := self._num_to_evict) or (self._queued and self._num_may_spill):
            if num_evict:
                spill = self._begin_eviction(min(num_evict, MAX_JOB_BLOCKS))
            else:
                num_blocks = min(len(self._queued), MAX_JOB_BLOCKS, self._num_may_spill)
                spill = self._begin_spill([self._queued.popleft() for _ in range(num_blocks)])
            if spill is not None:
                begun.append((next_id(), spill))
                self._spills[begun[-1][0]] = spill.keys
        return begun

    def is_spilling(self, job_id: int) -> bool:
        """Whether the job is one of `begin_spills`."""
        return job_id in self._spills

    def spill_ended(self, job_id: int, failed: Sequence[int]) -> None:
        """The job has ended on all ranks."""
        keys = self._spills.pop(job_id)
        self._host.complete_load(keys)
        self.tier.end_writes(keys, [keys[index] for index in failed])

    def _begin_spill(self, keys: Iterable[bytes]) -> Spill | None:
        wanted = dict.fromkeys(keys)
        present = [key for key in wanted if key in self._host]
        prepared = self.tier.begin_writes(present)
        num_begun = 0 if prepared is None else len(present)
        self.counts.num_dropped_blocks += len(wanted) - num_begun
        if prepared is None or not prepared.keys:
            return None
        return self._spill(prepared, self._host.prepare_load(prepared.keys))

    def _begin_eviction(self, num_blocks: int) -> Spill | None:
        keys, slots = self._host.begin_evictions(num_blocks)
        prepared = self.tier.begin_writes(keys)
        written = [] if prepared is None else prepared.keys
        self._host.complete_load([key for key in keys if key not in set(written)])
        if prepared is None:
            self.counts.num_dropped_blocks += len(keys)
        if prepared is None or not written:
            return None
        host_slots = dict(zip(keys, slots, strict=True))
        return self._spill(prepared, [host_slots[key] for key in written])

    def _spill(self, prepared: PreparedStore, host_slots: Sequence[int]) -> Spill:
        groups = bytes(key[-1] for key in prepared.keys)
        slots = int64s(host_slots), int64s(prepared.slots)
        return Spill(self.number, prepared.keys, groups, *slots)

    def reset(self) -> None:
        """Remove everything. Not called while blocks are written."""
        self._queued.clear()
        self.tier.reset()

    def begin_epoch(self) -> None:
        """All workers were replaced: jobs in progress have failed, and are begun again."""
        self._queued.extendleft(key for keys in self._spills.values() for key in keys)
        self._spills.clear()
        self.tier.begin_epoch()


def count_displaced(prepared: PreparedStore | None, tiers: Iterable[Below]) -> PreparedStore | None:
    """Count the blocks that host memory evicts for `prepared`, which it returns, before they could
    be written back."""
    if prepared is not None and prepared.evicted_keys:
        for below in tiers:
            if below.writes_back:
                lost = [key for key in prepared.evicted_keys if not is_private(key)]
                below.counts.num_dropped_blocks += len(lost)
    return prepared
