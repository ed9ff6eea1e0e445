"""The latest statistics of every rank, for those who look at the engine."""

from longshore.protocol.statistics import WorkerStats


class WorkerStatistics:
    """Of one epoch's ranks. num_dropped: reports that were not those of the rank that sent them."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._by_rank: dict[int, WorkerStats] = {}
        self.num_dropped = 0

    def update(self, rank: int, stats: WorkerStats) -> None:
        """rank: whose channel it came on. A report of another epoch or rank is dropped, and so is
        one of fewer steps than are known: it is older, or made up."""
        known = self._by_rank.get(rank)
        is_older = known is not None and stats.num_steps < known.num_steps
        if (stats.epoch, stats.rank) != (self._epoch, rank) or is_older:
            self.num_dropped += 1
        else:
            self._by_rank[rank] = stats

    def latest(self) -> tuple[WorkerStats, ...]:
        """By rising rank; of ranks that have reported."""
        return tuple(self._by_rank[rank] for rank in sorted(self._by_rank))
