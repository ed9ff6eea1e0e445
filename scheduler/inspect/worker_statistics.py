"""The latest statistics of every rank."""

from longshore.protocol.statistics import WorkerStats


class WorkerStatistics:
    """Statistics of one epoch. num_dropped: invalid or outdated reports."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._by_rank: dict[int, WorkerStats] = {}
        self.num_dropped = 0

    def update(self, rank: int, stats: WorkerStats) -> None:
        """Receive a report from the channel of `rank`. One of another epoch or rank is dropped,
        and so is one with fewer steps than the last, which is outdated or invalid."""
        known = self._by_rank.get(rank)
        is_older = known is not None and stats.num_steps < known.num_steps
        if (stats.epoch, stats.rank) != (self._epoch, rank) or is_older:
            self.num_dropped += 1
        else:
            self._by_rank[rank] = stats

    def latest(self) -> tuple[WorkerStats, ...]:
        """The latest statistics by rank, of the ranks that have reported."""
        return tuple(self._by_rank[rank] for rank in sorted(self._by_rank))
