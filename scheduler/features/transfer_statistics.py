"""What the ranks have moved between media, as they report it: for metrics, and for decisions that
depend on bandwidth."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import add
from typing import Any, Final

from msgspec.structs import astuple

from longshore.protocol.events import Medium
from longshore.protocol.statistics import (
    OPERATION_BYTES_BOUNDS,
    TierStats,
    TransferOperation,
    TransferStats,
)

OLD_SHARE: Final = 0.95
"""Weight of all earlier operations in the bandwidth, per operation: the last 20 count most."""


class _Totals:
    """Of one source and destination. sums: of the counts of TransferOperation, which TransferStats
    has in the same order."""

    def __init__(self) -> None:
        self.by_bytes = [0] * (len(OPERATION_BYTES_BOUNDS) + 1)
        self.sums: list[Any] = [0, 0, 0.0, 0, 0]
        self.recent_bytes = self.recent_s = 0.0

    def add(self, operation: TransferOperation) -> None:
        self.by_bytes[bisect_left(OPERATION_BYTES_BOUNDS, operation.num_bytes)] += 1
        self.sums = list(map(add, self.sums, astuple(operation)[2:]))
        if operation.num_bytes:
            self.recent_bytes = OLD_SHARE * self.recent_bytes + operation.num_bytes
            self.recent_s = OLD_SHARE * self.recent_s + operation.seconds


class TransferStatistics:
    """What transfers have moved since the start of the engine, over all epochs. num_operations:
    those of all ranks."""

    def __init__(self) -> None:
        self._totals: dict[tuple[Medium, Medium], _Totals] = {}
        self.num_operations = 0

    def add(self, operation: TransferOperation) -> None:
        """A rank has reported an operation."""
        self.num_operations += 1
        pair = (operation.source, operation.destination)
        totals = self._totals.get(pair)
        if totals is None:
            totals = self._totals[pair] = _Totals()
        totals.add(operation)

    def bandwidth(self, source: Medium, destination: Medium) -> float | None:
        """Bytes per second of one rank in its recent operations; None if nothing was moved yet."""
        totals = self._totals.get((source, destination))
        if totals is None or not totals.recent_s:
            return None
        return totals.recent_bytes / totals.recent_s

    def totals(
        self, queued_blocks: Mapping[tuple[Medium, Medium], int]
    ) -> tuple[TransferStats, ...]:
        """The statistics of each source and destination that were used, or have queued blocks."""
        pairs = sorted(self._totals.keys() | queued_blocks.keys())
        return tuple(self._stats(*pair, queued_blocks.get(pair, 0)) for pair in pairs)

    def _stats(self, source: Medium, destination: Medium, num_queued: int) -> TransferStats:
        totals = self._totals.get((source, destination)) or _Totals()
        counts = (*totals.sums, num_queued)
        return TransferStats(source, destination, tuple(totals.by_bytes), *counts)


def sums_by_medium(tiers: Sequence[TierStats]) -> tuple[TierStats, ...]:
    """One per medium: a connector can have several tiers in the same one."""
    by_medium: dict[Medium, TierStats] = {}
    for tier in tiers:
        known = by_medium.setdefault(tier.medium, tier)
        if known is not tier:
            counts = zip(astuple(known)[1:], astuple(tier)[1:], strict=True)
            by_medium[tier.medium] = TierStats(tier.medium, *map(sum, counts))
    return tuple(by_medium.values())
