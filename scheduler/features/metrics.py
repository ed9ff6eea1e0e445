"""Metrics of blocks: allocation, access and eviction, for a sample of blocks to limit the cost.

The block pool reports to a `BlockMetrics`, whether prefix caching is on or not; without one it only
checks for it. The scheduler process has none; other users of `Scheduler` can pass one.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from longshore.protocol.arrays import Int32Array


class BlockMetrics(Protocol):
    """Receives reports of the pool; ids are int32, all different within a call."""

    def allocated(self, block_ids: Int32Array) -> None:
        """These blocks were allocated. Called after `evicted`."""

    def accessed(self, block_ids: Int32Array) -> None:
        """These cached blocks were hit: each has one more reference."""

    def evicted(self, block_ids: Int32Array) -> None:
        """These cached blocks lose their hashes and contents, because they are allocated again."""


@dataclass(frozen=True, slots=True)
class BlockLife:
    """One sampled block from its allocation to its eviction, in seconds.

    idle_s:       since its last access, or its allocation if there was none.
    reuse_gaps_s: from its allocation to the first access, and from each access to the next.
    """

    lifetime_s: float
    idle_s: float
    reuse_gaps_s: tuple[float, ...]


class SampledBlockMetrics:
    """Records the lives of one block in `sample_every`; counts are exact.

    clock:     seconds, monotonic.
    max_lives: lives kept until `take_lives`; the oldest are dropped.
    """

    def __init__(
        self, clock: Callable[[], float], *, sample_every: int = 128, max_lives: int = 10_000
    ) -> None:
        self.num_allocated = 0
        self.num_accessed = 0
        self.num_evicted = 0
        self._clock = clock
        self._sample_every = sample_every
        # By sampled block, the times of its allocation and of each access since.
        self._used_at: dict[int, list[float]] = {}
        self._lives: deque[BlockLife] = deque(maxlen=max_lives)

    def allocated(self, block_ids: Int32Array) -> None:
        self.num_allocated += len(block_ids)
        for block_id in self._sampled(block_ids):
            self._used_at[block_id] = [self._clock()]

    def accessed(self, block_ids: Int32Array) -> None:
        self.num_accessed += len(block_ids)
        for block_id in self._sampled(block_ids):
            if block_id in self._used_at:  # otherwise it was allocated before recording began
                self._used_at[block_id].append(self._clock())

    def evicted(self, block_ids: Int32Array) -> None:
        self.num_evicted += len(block_ids)
        for block_id in self._sampled(block_ids):
            used_at = self._used_at.pop(block_id, None)
            if used_at is not None:
                now = self._clock()
                gaps = tuple(later - earlier for earlier, later in pairwise(used_at))
                self._lives.append(BlockLife(now - used_at[0], now - used_at[-1], gaps))

    def take_lives(self) -> list[BlockLife]:
        """Lives that ended since the last call, oldest first."""
        lives = list(self._lives)
        self._lives.clear()
        return lives

    def _sampled(self, block_ids: Int32Array) -> list[int]:
        sampled: list[int] = block_ids[block_ids % self._sample_every == 0].tolist()
        return sampled
