"""From the scheduler's tables to the message of a step: only what the workers do not expect."""

from typing import Final

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, Int64Array, int32_array
from longshore.protocol.plan import (
    AppendedBlocks,
    RowStart,
    RowState,
    SchedulerOutput,
    digest_changes,
)
from longshore.scheduler.kv_cache_manager import KVCacheManager
from longshore.scheduler.running import RunningTable

MAX_ADDED_ROWS: Final = 2048
"""Rows that one plan adds at most: each takes up to three frames, of which a message has 16,384.
That leaves room for the tables of 8,192 rows under --verify-plan."""

MAX_ADDED_TOKENS: Final = 16 << 20
"""Known token ids of the added rows, all together: 64 MiB."""


class PlanBuilder:
    """Collects the changes since the last plan, and numbers and chains the plans of an epoch."""

    def __init__(
        self,
        running: RunningTable,
        kv_cache: KVCacheManager,
        *,
        epoch: int,
        verify_plan: bool,
        feed_back_tokens: bool,
    ) -> None:
        self._running = running
        self._kv_cache = kv_cache
        self._epoch = epoch
        self._verify_plan = verify_plan
        self._feed_back_tokens = feed_back_tokens
        self.step = 0
        self._digest = 0
        self.finished_rows: list[int] = []
        self.preempted_rows: list[int] = []
        self.added: list[RowStart] = []
        self._num_added_tokens = 0
        self.appended: list[AppendedBlocks] = []

    def can_add(self, num_tokens: int) -> bool:
        """Whether the plan may name one more row with so many known tokens: a message is bounded in
        frames and bytes. The first row always fits."""
        is_small = self._num_added_tokens + num_tokens <= MAX_ADDED_TOKENS
        return not self.added or (is_small and len(self.added) < MAX_ADDED_ROWS)

    def add(self, start: RowStart) -> None:
        """A request takes a row with this plan."""
        self.added.append(start)
        self._num_added_tokens += start.num_known_tokens

    @property
    def has_drops(self) -> bool:
        """Rows were emptied that the workers still believe held."""
        return bool(self.finished_rows or self.preempted_rows)

    def build(self, num_scheduled: Int64Array) -> SchedulerOutput:
        """The plan in which each row computes `num_scheduled` (max_num_seqs,) tokens; the counts
        themselves advance afterwards."""
        running = self._running
        changed = np.flatnonzero(num_scheduled != running.expected())
        finished_rows = int32_array(self.finished_rows)
        preempted_rows = int32_array(self.preempted_rows)
        added, appended = tuple(self.added), tuple(self.appended)
        scheduled_rows = int32_array(changed)
        scheduled_tokens = int32_array(num_scheduled[changed])
        self._digest = digest_changes(
            self._digest,
            finished_rows=finished_rows,
            preempted_rows=preempted_rows,
            added=added,
            appended=appended,
            scheduled_rows=scheduled_rows,
            scheduled_tokens=scheduled_tokens,
        )
        sampled_rows, sampled_tokens = self._tokens_to_feed_back(num_scheduled)
        previous_step = self.step
        self.step += 1
        self.finished_rows, self.preempted_rows, self.added, self.appended = [], [], [], []
        self._num_added_tokens = 0
        return SchedulerOutput(
            epoch=self._epoch,
            step=self.step,
            previous_step=previous_step,
            num_rows=running.num_rows,
            num_scheduled_tokens=int(num_scheduled.sum()),
            digest=self._digest,
            finished_rows=finished_rows,
            preempted_rows=preempted_rows,
            added=added,
            appended=appended,
            scheduled_rows=scheduled_rows,
            scheduled_tokens=scheduled_tokens,
            sampled_rows=sampled_rows,
            sampled_tokens=sampled_tokens,
            full_state=self._full_state(num_scheduled) if self._verify_plan else None,
        )

    def _tokens_to_feed_back(self, num_scheduled: Int64Array) -> tuple[np.ndarray, np.ndarray]:
        """Ids sampled since admission that this step computes: a first pipeline stage that does
        not sample has them from nobody else."""
        running = self._running
        if not self._feed_back_tokens:
            return EMPTY_INT32, EMPTY_INT32
        rows = np.flatnonzero((num_scheduled > 0) & (running.num_computed >= running.num_known))
        return int32_array(rows), int32_array(running.token_ids[rows, running.num_computed[rows]])

    def _full_state(self, num_scheduled: Int64Array) -> tuple[RowState, ...]:
        running = self._running
        return tuple(
            RowState(
                row,
                int(running.generation[row]),
                int(running.num_computed[row]),
                int(num_scheduled[row]),
                self._kv_cache.block_ids(row),
            )
            for row in running.order.tolist()
        )
