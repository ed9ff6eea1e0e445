"""The worker's state of each row: the shared row table, block tables, and sampling settings.

All of it is host memory, changed only by plans, before the step is computed. A plan that this
worker cannot execute exactly raises PlanMismatch; the engine then needs a new epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from longshore.protocol.arrays import Int32Array, Int64Array
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.protocol.plan import KeptState, RowStart, SchedulerOutput
from longshore.protocol.rows import PlanFollower, RowTable
from longshore.worker.kv_cache.block_table import MultiGroupBlockTable
from longshore.worker.sampling.columns import SamplingColumns
from longshore.worker.sampling.pooling import PoolingRows


@dataclass(frozen=True)
class BlockCopies:
    """blocks:       source block ids, then target block ids, then the number of tokens to copy of
                  each that this rank stores; each of the three group by group.
    num_of_group: number of copies of each group.
    """

    blocks: npt.NDArray[np.int64]
    num_of_group: Sequence[int]


NO_COPIES: Final = BlockCopies(np.empty(0, np.int64), ())


class WorkerRows:
    """All rows of this worker.

    vocab_size, num_blocks: upper bounds of token and block ids in plans.
    eos_token_ids: not sampled until a row has min_tokens.
    has_connector: plans may have metadata for it.
    """

    def __init__(
        self,
        *,
        tables: MultiGroupBlockTable,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        num_blocks: int,
        epoch: int,
        eos_token_ids: Sequence[int] = (),
        has_connector: bool = False,
    ) -> None:
        self._has_connector = has_connector
        self.rows = RowTable(max_num_seqs)
        self.sampling = SamplingColumns(
            max_num_seqs, vocab_size=vocab_size, eos_token_ids=eos_token_ids
        )
        self.pooling = PoolingRows(max_num_seqs)
        self.tables = tables
        self._follower = PlanFollower(self.rows, epoch=epoch)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._num_blocks = num_blocks
        self.common_prefix_blocks: tuple[int, ...] = ()

    def is_repeat(self, plan: SchedulerOutput) -> bool:
        """Whether `plan` is the one applied last."""
        return self._follower.is_repeat(plan)

    def apply(self, plan: SchedulerOutput) -> Int64Array:
        """Apply the plan's changes; returns the number of tokens each row computes,
        (max_num_seqs,).

        Raises PlanMismatch; some rows may have changed by then.
        """
        if plan.connector_metadata and not self._has_connector:
            raise PlanMismatch(
                f"step {plan.step} has metadata for a KV connector, but this worker has none. "
                "Start scheduler and workers with the same --kv-connector."
            )
        num_scheduled = self._follower.apply(plan)
        for rewind in plan.rewound:
            self.tables.truncate_row(rewind.row, rewind.num_computed_tokens)
        for start in plan.added:
            self._start_row(start)
        for blocks in plan.appended:
            self._check_block_ids(blocks.block_ids)
            self.tables.append_rows(blocks.group, blocks.rows, blocks.block_ids)
        self._check_block_ids(plan.zero_block_ids)
        self._check_copies(plan)
        self._take_common_prefix(plan)
        self._check_step(plan, num_scheduled)
        return num_scheduled

    def _take_common_prefix(self, plan: SchedulerOutput) -> None:
        common = plan.common_prefix_blocks
        if not common:
            return
        if len(common) != len(self.tables.tables) or min(common) < 0:
            raise PlanMismatch(
                f"step {plan.step} has common_prefix_blocks={common}, but it must give a number of "
                f"blocks for each of the {len(self.tables.tables)} KV cache groups"
            )
        self.common_prefix_blocks = common

    def copies(self, plan: SchedulerOutput) -> BlockCopies:
        """The block copies of the plan applied last. The plan does not give their groups: each copy
        is for a row that the plan starts, so the group is the one whose table has its target."""
        if not len(plan.copy_source_ids):
            return NO_COPIES
        num_kept = self.tables.share.num_kept(plan.copy_num_tokens.astype(np.int64))
        columns = np.stack((plan.copy_source_ids, plan.copy_target_ids, num_kept))
        if len(self.tables.tables) == 1:
            return BlockCopies(columns.astype(np.int64).ravel(), (columns.shape[1],))
        in_group = [
            np.isin(plan.copy_target_ids, list(chain(*(s.block_ids[group] for s in plan.added))))
            for group in range(len(self.tables.tables))
        ]
        if not (np.sum(in_group, axis=0) == 1).all():
            raise PlanMismatch(
                f"step {plan.step} copies to blocks {plan.copy_target_ids.tolist()}; each must be "
                "in the table of a row that the step starts, of one KV cache group"
            )
        for table, is_in in zip(self.tables.tables, in_group, strict=True):
            counts = plan.copy_num_tokens[is_in]
            self._check_range("number of copied tokens", counts, table.block_size + 1)
        return BlockCopies(
            np.concatenate(
                [columns[:, is_in] for is_in in in_group], axis=1, dtype=np.int64
            ).ravel(),
            [int(is_in.sum()) for is_in in in_group],
        )

    def kept_states(
        self, plan: SchedulerOutput, num_scheduled: Int64Array
    ) -> dict[int, list[KeptState]]:
        """The states that the plan applied last keeps, by row."""
        kept: dict[int, list[KeptState]] = {}
        num_pages = 0 if self.tables.states is None else self.tables.states.max_blocks
        for state in plan.kept_states:
            row, num_tokens = state.row, state.num_tokens
            self._check_range("row", np.array([row]), self.rows.max_num_seqs)
            self._check_block_ids(state.block_ids)
            end = int(self.rows.num_computed[row])
            earlier = kept.setdefault(row, [])
            first = earlier[-1].num_tokens if earlier else end - int(num_scheduled[row])
            if not first < num_tokens <= end or len(state.block_ids) != num_pages:
                raise PlanMismatch(
                    f"step {plan.step} keeps the state of row {row} after {num_tokens} tokens in "
                    f"{len(state.block_ids)} blocks; it computes {num_scheduled[row]} tokens up to "
                    f"{end}, and a state has {num_pages} blocks"
                )
            earlier.append(state)
        return kept

    def _start_row(self, start: RowStart) -> None:
        row = start.row
        if start.num_known_tokens > self._max_model_len:
            raise PlanMismatch(
                f"request {start.request_id} has {start.num_known_tokens} tokens, but "
                f"max_model_len is {self._max_model_len}"
            )
        if not 0 <= start.num_computed_tokens < start.num_known_tokens:
            raise PlanMismatch(
                f"request {start.request_id} starts with {start.num_computed_tokens} of "
                f"{start.num_known_tokens} tokens computed; at least one must remain to sample from"
            )
        if start.last_computed > self._max_model_len:
            raise PlanMismatch(
                f"row {row} would compute {start.last_computed} tokens, but max_model_len is "
                f"{self._max_model_len}"
            )
        sampling = start.sampling
        edited = [*(sampling.logit_bias or ()), *chain(*sampling.bad_words_token_ids)]
        for token_ids in (
            start.prompt_token_ids,
            start.output_token_ids,
            np.array(edited, np.int64),
        ):
            self._check_range("token id", token_ids, self._vocab_size)
        for block_ids in start.block_ids:
            self._check_block_ids(block_ids)
        self.tables.add_row(row, start.block_ids)
        self.sampling.start(start)
        self.pooling.start(start)

    def _check_block_ids(self, block_ids: Int32Array) -> None:
        self._check_range("block id", block_ids, self._num_blocks)

    def _check_copies(self, plan: SchedulerOutput) -> None:
        sources, targets = plan.copy_source_ids, plan.copy_target_ids
        counts = plan.copy_num_tokens
        if not len(sources) == len(targets) == len(counts):
            raise PlanMismatch(
                f"step {plan.step} copies {len(sources)} blocks to {len(targets)}, with "
                f"{len(counts)} token counts"
            )
        if not len(sources):
            return
        self._check_block_ids(sources)
        self._check_block_ids(targets)
        max_tokens = max(table.block_size for table in self.tables.tables)
        self._check_range("number of copied tokens", counts, max_tokens + 1)
        if len(targets) > self.rows.max_num_seqs * self.tables.max_copies:
            raise PlanMismatch(
                f"step {plan.step} copies {len(targets)} blocks for {self.rows.max_num_seqs} rows"
            )
        written = set(targets.tolist())
        if len(written) < len(targets) or NULL_BLOCK in written:
            raise PlanMismatch(f"step {plan.step} copies to the null block, or twice to one block")

    def _check_range(self, kind: str, ids: Int32Array | Int64Array, end: int) -> None:
        if len(ids) and not 0 <= ids.min() <= ids.max() < end:
            raise PlanMismatch(f"a {kind} is outside 0..{end - 1}: {ids.min()}..{ids.max()}")

    def _check_step(self, plan: SchedulerOutput, num_scheduled: Int64Array) -> None:
        if plan.num_scheduled_tokens > self._max_num_batched_tokens:
            raise PlanMismatch(
                f"step {plan.step} computes {plan.num_scheduled_tokens} tokens; "
                f"max_num_batched_tokens is {self._max_num_batched_tokens}"
            )
        lacking = (num_scheduled > 0) & (self.rows.num_computed > self.tables.capacity())
        if lacking.any():
            row = int(np.flatnonzero(lacking)[0])
            raise PlanMismatch(f"step {plan.step} computes tokens of row {row} without blocks")
        for state in plan.full_state or ():
            held = self.tables.allocated(state.row)
            if not all(map(_are_those_of, held, state.block_ids)):
                raise PlanMismatch(
                    f"step {plan.step}, row {state.row}: the scheduler holds blocks "
                    f"{[ids.tolist() for ids in state.block_ids]}, "
                    f"the worker {[ids.tolist() for ids in held]}"
                )


def _are_those_of(held: Int32Array, scheduled: Int32Array) -> bool:
    """Whether a row's table equals the scheduler's. Null blocks in the scheduler's table match any
    id: the scheduler does not tell workers when it frees blocks outside a window."""
    return len(held) == len(scheduled) and not np.any(
        (held != scheduled) & (scheduled != NULL_BLOCK)
    )
