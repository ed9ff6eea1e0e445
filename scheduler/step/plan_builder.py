"""From the scheduler's tables to the message of a step: only what the workers do not expect."""

from typing import Any, Final

import numpy as np

from longshore.connectors.base import StepView
from longshore.protocol.arrays import EMPTY_INT32, Int32Array, Int64Array, int32_array
from longshore.protocol.plan import (
    AppendedBlocks,
    Rewind,
    RowStart,
    RowState,
    SchedulerOutput,
    digest_changes,
)
from longshore.scheduler.kv_cache.blocks import BlockCopy
from longshore.scheduler.parts import Parts
from longshore.scheduler.request import Request
from longshore.scheduler.validation import MAX_ADDED_BYTES

MAX_ADDED_ARRAYS: Final = 3 * 2048
"""Arrays that one plan's added rows bring: each may be a frame, of which a message has 16,384. That
leaves room for the tables of 8,192 rows under --verify-plan."""


class PlanBuilder:
    """Collects the changes since the last plan, and numbers and chains the plans of an epoch."""

    def __init__(self, parts: Parts, *, epoch: int, verify_plan: bool) -> None:
        self._running = parts.running
        self._kv_cache = parts.kv_cache
        self._encoder = parts.encoder
        self._connector = parts.connector
        self._feed_back_tokens = parts.config.feed_back_tokens
        self._verify_plan = verify_plan
        self.begin_epoch(epoch)

    def begin_epoch(self, epoch: int) -> None:
        """New workers have empty tables and have seen no plan."""
        self.epoch = epoch
        self.step = 0
        self._digest = 0
        self._common_prefix_blocks: tuple[int, ...] = ()
        self._clear_changes()

    def _clear_changes(self) -> None:
        self._finished: dict[int, str] = {}
        self._preempted: dict[int, str] = {}
        self._rewound: dict[int, Rewind] = {}
        self._added: list[RowStart] = []
        self._num_added_bytes = self._num_added_arrays = 0
        self.appended: list[AppendedBlocks] = []
        self.copies: list[BlockCopy] = []
        self.zero_block_ids: list[int] = []
        self.uncached: list[int] = []
        self.loads: list[int] = []
        self.num_invalid_draft_tokens = 0
        self.has_new_loads = False

    # Changes

    def can_add(self, request: Request) -> bool:
        """Whether the plan may name one more row: a message is bounded in frames and bytes. The
        first row always fits: intake has seen to that."""
        num_bytes = 4 * request.num_tokens + request.num_input_bytes
        num_arrays = 3 + len(request.multimodal)
        fits = (
            self._num_added_bytes + num_bytes <= MAX_ADDED_BYTES
            and self._num_added_arrays + num_arrays <= MAX_ADDED_ARRAYS
        )
        return fits or not self._added

    def add(self, request: Request, start: RowStart) -> None:
        """A request takes a row with this plan."""
        self._added.append(start)
        self._num_added_bytes += 4 * request.num_tokens + request.num_input_bytes
        self._num_added_arrays += 3 + len(start.multimodal)

    def drop_finished(self, row: int, request_id: str) -> None:
        """The request on this row has ended."""
        self._finished[row] = request_id
        self._rewound.pop(row, None)

    def drop_preempted(self, row: int, request_id: str) -> None:
        """The request on this row has been preempted."""
        self._preempted[row] = request_id
        self._rewound.pop(row, None)

    def add_rewind(self, rewind: Rewind) -> None:
        """A row is sent back; a second time before the plan is the same as both at once."""
        first = self._rewound.get(rewind.row)
        if first is not None:
            rewind = Rewind(
                rewind.row,
                min(first.num_computed_tokens, rewind.num_computed_tokens),
                first.num_discarded_tokens + rewind.num_discarded_tokens,
                rewind.num_known_tokens,
            )
        self._rewound[rewind.row] = rewind

    @property
    def has_drops(self) -> bool:
        """Rows were emptied that the workers still believe held."""
        return bool(self._finished or self._preempted)

    @property
    def must_be_sent(self) -> bool:
        """The workers must hear of something although no row computes anything."""
        return (
            self.has_drops
            or bool(self._rewound)
            or self.has_new_loads
            or (self._connector is not None and self._connector.has_pending_work)
        )

    # The plan

    def build(
        self, num_scheduled: Int64Array, num_tokens: int, *, answered_step: int
    ) -> tuple[SchedulerOutput, tuple[int, ...]]:
        """The plan in which each row computes `num_scheduled` (max_num_seqs,) tokens, `num_tokens`
        in all; the counts themselves advance afterwards. With it come the generations that load
        within the step."""
        running = self._running
        changed = (num_scheduled != running.expected()).nonzero()[0]
        changes: dict[str, Any] = {
            "finished_rows": int32_array(list(self._finished)),
            "preempted_rows": int32_array(list(self._preempted)),
            "rewound": tuple(self._rewound.values()),
            "added": tuple(self._added),
            "appended": tuple(self.appended),
            "scheduled_rows": int32_array(changed),
            "scheduled_tokens": int32_array(num_scheduled[changed]),
        }
        if self.copies:
            columns = map(int32_array, zip(*self.copies, strict=True))
            names = ("copy_source_ids", "copy_target_ids", "copy_num_tokens")
            changes |= zip(names, columns, strict=True)
        self._digest = digest_changes(self._digest, **changes)
        sampled_rows, sampled_tokens = self._tokens_to_feed_back(num_scheduled)
        draft_rows, draft_tokens = self._drafts(num_scheduled)
        previous_step = self.step
        self.step += 1
        plan = SchedulerOutput(
            epoch=self.epoch,
            step=self.step,
            previous_step=previous_step,
            num_rows=running.num_rows,
            num_scheduled_tokens=num_tokens,
            digest=self._digest,
            answered_step=answered_step,
            **changes,
            sampled_rows=sampled_rows,
            sampled_tokens=sampled_tokens,
            draft_rows=draft_rows,
            draft_tokens=draft_tokens,
            num_invalid_draft_tokens=self.num_invalid_draft_tokens,
            encoder_inputs=self._encoder.take_encoder_inputs(),
            freed_encoder_hashes=self._encoder.take_freed(),
            common_prefix_blocks=self._common_prefix(),
            zero_block_ids=int32_array(self.zero_block_ids),
            has_structured_output=self._samples_masked(num_scheduled),
            connector_metadata=self._connector_metadata(answered_step),
            full_state=self._full_state(num_scheduled) if self._verify_plan else None,
        )
        loads = tuple(self.loads)
        self._clear_changes()
        return plan, loads

    def build_steady(self, num_tokens: int, *, answered_step: int) -> SchedulerOutput:
        """The plan of a standing step, in which all rows compute `num_tokens` as expected: it says
        which blocks are appended, if any. Not for a connector, or full state."""
        appended, self.appended = tuple(self.appended), []
        self._digest = digest_changes(self._digest, appended=appended)
        self.step += 1
        return SchedulerOutput(
            epoch=self.epoch,
            step=self.step,
            previous_step=self.step - 1,
            num_rows=self._running.num_rows,
            num_scheduled_tokens=num_tokens,
            digest=self._digest,
            answered_step=answered_step,
            appended=appended,
            freed_encoder_hashes=self._encoder.take_freed(),
        )

    def _tokens_to_feed_back(self, num_scheduled: Int64Array) -> tuple[Int32Array, Int32Array]:
        """Ids sampled since admission that this step computes, and the last known ones of rows
        that are sent back, which no step has computed yet: a first pipeline stage that does not
        sample has them from nobody else."""
        running = self._running
        if not self._feed_back_tokens:
            return EMPTY_INT32, EMPTY_INT32
        positions = running.num_computed.copy()
        is_fed = (num_scheduled > 0) & (positions >= running.num_known)
        rewound = list(self._rewound)
        is_fed[rewound] = True
        positions[rewound] = running.num_known[rewound] - 1
        rows = is_fed.nonzero()[0]
        return int32_array(rows), int32_array(running.token_ids[rows, positions[rows]])

    def _drafts(self, num_scheduled: Int64Array) -> tuple[Int32Array, Int32Array]:
        """Drafts that this step verifies, a row listed once per draft."""
        running = self._running
        if not running.drafts.shape[1]:
            return EMPTY_INT32, EMPTY_INT32
        counts = running.num_drafts_in(num_scheduled)
        rows = np.flatnonzero(counts)
        ids = [running.drafts[row, : counts[row]] for row in rows.tolist()]
        if not ids:
            return EMPTY_INT32, EMPTY_INT32
        return int32_array(np.repeat(rows, counts[rows])), np.concatenate(ids)

    def _samples_masked(self, num_scheduled: Int64Array) -> bool:
        running = self._running
        if not np.count_nonzero(running.has_grammar):
            return False
        ends = running.num_computed + num_scheduled >= running.num_known
        return bool((running.has_grammar & (num_scheduled > 0) & ends).any())

    def _common_prefix(self) -> tuple[int, ...]:
        """Leading blocks that all running rows share, if that is news. It changes only with
        membership: what a row appends is its own."""
        if not (self._added or self.has_drops or self._rewound):
            return ()
        common = self._kv_cache.num_common_prefix_blocks(self._running.order)
        if common == self._common_prefix_blocks:
            return ()
        self._common_prefix_blocks = common
        return common

    def _connector_metadata(self, answered_step: int) -> bytes:
        if self._connector is None:
            return b""
        return self._connector.build_connector_meta(
            StepView(
                step=self.step,
                answered_step=answered_step,
                admitted=[start.request_id for start in self._added],
                uncached=self.uncached,
                cached=self._kv_cache.full_blocks.take_cached(),
                preempted=list(self._preempted.values()),
                finished=list(self._finished.values()),
            )
        )

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
