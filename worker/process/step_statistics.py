"""Times and token counts of this rank's steps, reported about once a second."""

from bisect import bisect_left
from typing import Final

from longshore.protocol.statistics import (
    STEP_GAP_BOUNDS,
    STEP_SECONDS_BOUNDS,
    STEP_TOKENS_BOUNDS,
    WorkerStats,
)

REPORT_INTERVAL_S: Final = 1.0


class StepStatistics:
    """Statistics of one rank in one epoch. `now_s` arguments are times of one monotonic clock."""

    def __init__(self, *, epoch: int, rank: int) -> None:
        self._epoch = epoch
        self._rank = rank
        self._by_seconds = [0] * (len(STEP_SECONDS_BOUNDS) + 1)
        self._by_tokens = [0] * (len(STEP_TOKENS_BOUNDS) + 1)
        self._by_gap = [0] * (len(STEP_GAP_BOUNDS) + 1)
        self._gap_s = 0.0
        self._compute_s = 0.0
        self._num_tokens = 0
        self._longest_step_s = 0.0
        self._due_s: float | None = None

    def count(
        self, compute_s: float, num_tokens: int, now_s: float, gap_s: float | None = None
    ) -> None:
        """Add one finished step: its seconds on the device, its tokens, and the idle seconds before
        it (see ModelRunnerOutput)."""
        if gap_s is not None:
            self._by_gap[bisect_left(STEP_GAP_BOUNDS, gap_s)] += 1
            self._gap_s += gap_s
        self._by_seconds[bisect_left(STEP_SECONDS_BOUNDS, compute_s)] += 1
        self._by_tokens[bisect_left(STEP_TOKENS_BOUNDS, num_tokens)] += 1
        self._compute_s += compute_s
        self._num_tokens += num_tokens
        self._longest_step_s = max(self._longest_step_s, compute_s)
        if self._due_s is None:
            self._due_s = now_s + REPORT_INTERVAL_S

    def due_in_s(self, now_s: float) -> float | None:
        """Seconds until the next report, 0 if it is due; None if there is nothing to report."""
        return None if self._due_s is None else max(0.0, self._due_s - now_s)

    def take(self, *, resident_bytes: int, device_bytes: int) -> WorkerStats:
        """The report to send now. The next one is due only after another step."""
        longest_step_s, self._longest_step_s = self._longest_step_s, 0.0
        self._due_s = None
        return WorkerStats(
            epoch=self._epoch,
            rank=self._rank,
            steps_by_seconds=tuple(self._by_seconds),
            steps_by_tokens=tuple(self._by_tokens),
            compute_s=self._compute_s,
            num_tokens=self._num_tokens,
            longest_step_s=longest_step_s,
            resident_bytes=resident_bytes,
            device_bytes=device_bytes,
            steps_by_gap=tuple(self._by_gap),
            gap_s=self._gap_s,
        )
