"""Metrics of blocks: allocation, access and eviction, for a sample of blocks to limit the cost.

The block pool reports to a `BlockMetrics`, whether prefix caching is on or not. Without one, each
call of the pool only checks for it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Residency:
    born: float
    last_use: float
    gaps: list[float] = field(default_factory=list)


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
        self._residencies: dict[int, _Residency] = {}
        self._lives: deque[BlockLife] = deque(maxlen=max_lives)

    def allocated(self, block_ids: Int32Array) -> None:
        self.num_allocated += len(block_ids)
        for block_id in self._sampled(block_ids):
            now = self._clock()
            self._residencies[block_id] = _Residency(now, now)

    def accessed(self, block_ids: Int32Array) -> None:
        self.num_accessed += len(block_ids)
        for block_id in self._sampled(block_ids):
            residency = self._residencies.get(block_id)
            if residency is not None:  # otherwise it was allocated before recording began
                now = self._clock()
                residency.gaps.append(now - residency.last_use)
                residency.last_use = now

    def evicted(self, block_ids: Int32Array) -> None:
        self.num_evicted += len(block_ids)
        for block_id in self._sampled(block_ids):
            residency = self._residencies.pop(block_id, None)
            if residency is not None:
                now = self._clock()
                self._lives.append(
                    BlockLife(now - residency.born, now - residency.last_use, tuple(residency.gaps))
                )

    def take_lives(self) -> list[BlockLife]:
        """Lives that ended since the last call, oldest first."""
        lives = list(self._lives)
        self._lives.clear()
        return lives

    def _sampled(self, block_ids: Int32Array) -> list[int]:
        sampled: list[int] = block_ids[block_ids % self._sample_every == 0].tolist()
        return sampled
