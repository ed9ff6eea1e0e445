"""Builds the plan of a step from the scheduler's tables: only what the workers do not expect."""

from typing import Any, Final

import numpy as np

from longshore.protocol.arrays import Int32Array, Int64Array, int32_array
from longshore.protocol.plan import (
    AppendedBlocks,
    KeptState,
    Rewind,
    RowStart,
    RowState,
    SchedulerOutput,
    digest_changes,
)
from longshore.scheduler.hooks import Hooks
from longshore.scheduler.kv_cache.blocks import BlockCopy
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.request import Request
from longshore.scheduler.step.running import RunningTable
from longshore.scheduler.validation import MAX_ADDED_BYTES

MAX_ADDED_ARRAYS: Final = 3 * 2048
"""Limit for the arrays of a plan's added rows. Each can be a frame, and a message has at most
16,384 frames, which leaves enough for the tables of 8,192 rows with --verify-plan."""


class PlanBuilder:
    """Collects the changes since the last plan, and numbers and chains the plans of an epoch.

    allows_steady: False if the workers need full information about every step.
    """

    def __init__(
        self,
        running: RunningTable,
        kv_cache: KVCacheManager,
        hooks: Hooks,
        *,
        epoch: int,
        feed_back_tokens: bool = False,
        has_drafts: bool = False,
        verify_plan: bool = False,
    ) -> None:
        self._running = running
        self._kv_cache = kv_cache
        self._hooks = hooks
        self._feed_back_tokens = feed_back_tokens
        self._verify_plan = verify_plan
        self.allows_steady = not (verify_plan or feed_back_tokens or has_drafts)
        self.begin_epoch(epoch)

    def begin_epoch(self, epoch: int) -> None:
        """Start again from empty tables: new workers have received no plan."""
        self.epoch = epoch
        self.step = 0
        self._digest = 0
        self._common_prefix_blocks: tuple[int, ...] = ()
        self._clear_changes()

    def _clear_changes(self) -> None:
        # Rows that were emptied, with the ids of their requests.
        self.finished: dict[int, str] = {}
        self.preempted: dict[int, str] = {}
        self.rewound: dict[int, Rewind] = {}  # by row: a later rewind replaces an earlier one
        self.added: list[RowStart] = []
        self._num_added_bytes = self._num_added_arrays = 0
        self.appended: list[AppendedBlocks] = []
        self.copies: list[BlockCopy] = []
        self.zero_block_ids: list[int] = []
        self.uncached: list[int] = []
        self.kept_states: list[KeptState] = []
        self.loads: list[tuple[int, int]] = []  # (row, generation)
        self.has_new_loads = False

    # Changes

    def can_add(self, request: Request) -> bool:
        """Whether the plan can add one more row, because the frames and bytes of a message are
        limited. The first row always fits: `RequestValidator` has checked it."""
        num_bytes = 4 * len(request.token_ids) + request.num_input_bytes
        num_arrays = 3 + len(request.options.multimodal)
        fits = (
            self._num_added_bytes + num_bytes <= MAX_ADDED_BYTES
            and self._num_added_arrays + num_arrays <= MAX_ADDED_ARRAYS
        )
        return fits or not self.added

    def add(self, request: Request, start: RowStart) -> None:
        """A request gets a row in this plan."""
        self.added.append(start)
        self._num_added_bytes += 4 * len(request.token_ids) + request.num_input_bytes
        self._num_added_arrays += 3 + len(start.multimodal)

    @property
    def has_drops(self) -> bool:
        """Whether rows were emptied that the workers still hold."""
        return bool(self.finished or self.preempted)

    @property
    def must_be_sent(self) -> bool:
        """Whether the workers need a plan even if no row computes a token."""
        has_changes = self.has_drops or bool(self.rewound) or self.has_new_loads
        return has_changes or self.features_have_work

    @property
    def features_have_work(self) -> bool:
        """Whether a feature has instructions for the workers, which the next plan takes."""
        return any(feature.has_work() for feature in self._hooks.has_work)

    # The plan

    def build(
        self, num_scheduled: Int64Array, num_tokens: int, *, answered_step: int
    ) -> tuple[SchedulerOutput, tuple[tuple[int, int], ...]]:
        """The plan in which each row computes `num_scheduled` (max_num_seqs,) tokens, `num_tokens`
        in total, and the (row, generation) pairs that load within the step. The caller advances
        the counts afterwards."""
        running = self._running
        for row in (*self.finished, *self.preempted):  # the rewound request has lost its row
            self.rewound.pop(row, None)
        changed = (num_scheduled != running.expected()).nonzero()[0]
        # Empty arrays keep their defaults, which are not sent.
        changes: dict[str, Any] = {
            "rewound": tuple(self.rewound.values()),
            "added": tuple(self.added),
            "appended": tuple(self.appended),
        }
        if len((rejected := running.take_rejected())[0]):
            changes |= zip(("rejected_rows", "rejected_tokens"), rejected, strict=True)
        if self.finished:
            changes["finished_rows"] = np.array(list(self.finished), np.int32)
        if self.preempted:
            changes["preempted_rows"] = np.array(list(self.preempted), np.int32)
        if len(changed):
            changes["scheduled_rows"] = changed.astype(np.int32)
            changes["scheduled_tokens"] = num_scheduled[changed].astype(np.int32)
        if self.copies:
            columns = map(int32_array, zip(*self.copies, strict=True))
            names = ("copy_source_ids", "copy_target_ids", "copy_num_tokens")
            changes |= zip(names, columns, strict=True)
        self._digest = digest_changes(self._digest, **changes)
        self.step += 1
        plan = SchedulerOutput(
            epoch=self.epoch,
            step=self.step,
            previous_step=self.step - 1,
            num_rows=running.num_rows,
            num_scheduled_tokens=num_tokens,
            digest=self._digest,
            answered_step=answered_step,
            **changes,
            common_prefix_blocks=self._common_prefix(),
            **self._rare_fields(num_scheduled, answered_step),
        )
        loads = tuple(self.loads)
        self._clear_changes()
        return plan, loads

    def _rare_fields(self, num_scheduled: Int64Array, answered_step: int) -> dict[str, Any]:
        """Fields that most plans do not have."""
        fields: dict[str, Any] = {}
        if self.zero_block_ids:
            fields["zero_block_ids"] = int32_array(self.zero_block_ids)
        if self._feed_back_tokens:
            rows, token_ids = self._tokens_to_feed_back(num_scheduled)
            fields |= {"sampled_rows": rows, "sampled_tokens": token_ids}
        for feature in self._hooks.fields:
            fields |= feature.fields(self, num_scheduled, answered_step)
        if self.kept_states:
            kept = sorted(self.kept_states, key=lambda state: (state.row, state.num_tokens))
            fields["kept_states"] = tuple(kept)
        if self._verify_plan:
            fields["full_state"] = self._full_state(num_scheduled)
        return fields

    def build_steady(self, num_tokens: int, *, answered_step: int) -> SchedulerOutput:
        """The plan of a steady decode step, in which all rows compute `num_tokens` tokens as
        expected. It contains only appended blocks and what features add. Not with full state."""
        appended, self.appended = tuple(self.appended), []
        self._digest = digest_changes(self._digest, appended=appended)
        self.step += 1
        fields: dict[str, Any] = {}
        for feature in self._hooks.steady_fields:
            fields |= feature.steady_fields(self, answered_step)
        return SchedulerOutput(
            epoch=self.epoch,
            step=self.step,
            previous_step=self.step - 1,
            num_rows=self._running.num_rows,
            num_scheduled_tokens=num_tokens,
            digest=self._digest,
            answered_step=answered_step,
            appended=appended,
            **fields,
        )

    def _tokens_to_feed_back(self, num_scheduled: Int64Array) -> tuple[Int32Array, Int32Array]:
        """Ids sampled since admission that this step computes, and the last known ids of rewound
        rows, which no step has computed yet. A first pipeline stage that does not sample gets them
        only from plans."""
        running = self._running
        positions = running.num_computed.copy()
        is_fed = (num_scheduled > 0) & (positions >= running.num_known)
        rewound = list(self.rewound)
        is_fed[rewound] = True
        positions[rewound] = running.num_known[rewound] - 1
        rows = is_fed.nonzero()[0]
        return int32_array(rows), int32_array(running.token_ids[rows, positions[rows]])

    def _common_prefix(self) -> tuple[int, ...]:
        """The number of leading blocks that all running rows share, if it has changed; it changes
        only with membership. For cascade attention (FlashInfer's term for attending to a shared
        prefix once)."""
        if not (self.added or self.has_drops or self.rewound):
            return ()
        common = self._kv_cache.num_common_prefix_blocks(self._running.order)
        if common == self._common_prefix_blocks:
            return ()
        self._common_prefix_blocks = common
        return common

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
