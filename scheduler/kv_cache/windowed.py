"""Groups whose layers do not attend to all earlier tokens: sliding windows, chunks, `states`.

Blocks that no later token reads are freed while the request runs, and a prefix hit does not need
its first blocks. The kinds differ in one function, `num_skipped_tokens`: how many leading tokens
the token after `num_tokens` others does not read. It determines which blocks are freed and which
blocks a hit needs. Positions without a block have the null block, so that all others keep their
position.
"""

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, BoolArray, Int32Array, Int64Array
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.scheduler.kv_cache.blocks import BlockIds
from longshore.scheduler.kv_cache.full import SingleTypeManager

Tokens = TypeVar("Tokens", int, Int64Array)


class WindowedManager(SingleTypeManager):
    """What sliding windows and chunks have in common. num_freed: (max_num_seqs,) int64, leading
    entries that have been searched for blocks to free."""

    frees_skipped = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.num_freed: Int64Array = np.zeros_like(self.num_blocks)

    def num_skipped_tokens(self, num_tokens: Tokens) -> Tokens:
        """Leading tokens that the token after `num_tokens` others does not read; negative means
        none. Never decreases as `num_tokens` increases."""
        raise NotImplementedError

    @cached_property
    def _serves_hits(self) -> BoolArray | None:
        # A hit that needs a block needs also the ones between it and the end of the found prefix,
        # and the later that ends, the fewer leading blocks it needs: the next possible end decides.
        alignment, num_dropped = self._hit_alignment, self._num_dropped
        positions = np.arange(self._max_positions())
        ends = (positions * self.block_size // alignment + 1) * alignment
        hits = np.maximum(ends, alignment + num_dropped) - num_dropped
        serves = np.maximum(self.num_skipped_tokens(hits), 0) // self.block_size <= positions
        return None if serves.all() else serves

    def first_needed(self, num_tokens: int) -> int:
        return max(self.num_skipped_tokens(num_tokens), 0) // self.block_size

    def positions(self, first: int, last: int, num_computed: int) -> Sequence[int]:
        return range(min(max(first, self.first_needed(num_computed)), last), last)

    def start(self, row: int, hits: BlockIds, new_block_ids: BlockIds) -> Int32Array:
        self.num_freed[row] = 0
        return super().start(row, hits, new_block_ids)

    def truncate(self, row: int, num_tokens: int) -> Int32Array:
        cut = super().truncate(row, num_tokens)
        self.num_freed[row] = min(self.num_freed[row], self.num_blocks[row])
        return cut

    def free_skipped(
        self, num_settled: Int64Array, admission_order: Int64Array, *, only_cached: bool
    ) -> Int32Array:
        """Remove from all rows the blocks that no token after their `num_settled` (max_num_seqs,)
        tokens reads. Returns these blocks, rows of lower `admission_order` first, each row's last
        block first.

        only_cached: keep blocks that are not cached yet.
        """
        num_skipped = np.maximum(self.num_skipped_tokens(num_settled), 0) // self.block_size
        last = np.minimum(num_skipped, self.num_cached_blocks if only_cached else self.num_blocks)
        rows = np.flatnonzero(last > self.num_freed)
        if len(rows) == 0:
            return EMPTY_INT32
        rows = rows[admission_order[rows].argsort()]
        last = last[rows]
        counts = last - self.num_freed[rows]
        num_entries = int(counts.sum())
        if num_entries == len(rows):  # one each, as in decode
            entries = rows, last - 1
        else:
            nth_of_row = np.arange(num_entries) - np.repeat(counts.cumsum() - counts, counts)
            entries = np.repeat(rows, counts), np.repeat(last, counts) - 1 - nth_of_row
        freed = self.table[entries]
        self.table[entries] = NULL_BLOCK
        self.num_freed[rows] = last
        block_ids: Int32Array = freed[freed != NULL_BLOCK]
        return block_ids

    def blocks_in_use(self, row: int) -> Int32Array:
        entries = self.table[row, self.num_freed[row] : self.num_blocks[row]]
        block_ids: Int32Array = entries[entries != NULL_BLOCK]
        return block_ids

    def num_blocks_of_rows(self, rows: Int64Array) -> int:
        return sum(len(self.blocks_in_use(row)) for row in rows.tolist())

    def num_common_blocks(self, rows: Int64Array) -> int:
        """None, because later tokens do not read the front of a table."""
        return 0


class SlidingWindowManager(WindowedManager):
    """Tokens attend to themselves and to the `sliding_window - 1` tokens before."""

    def num_skipped_tokens(self, num_tokens: Tokens) -> Tokens:
        window: int = self.spec.sliding_window
        return num_tokens - window + 1


class ChunkedLocalManager(WindowedManager):
    """Tokens attend to themselves and to earlier tokens of their chunk."""

    def num_skipped_tokens(self, num_tokens: Tokens) -> Tokens:
        size: int = self.spec.attention_chunk_size
        return num_tokens // size * size


class SettledCounts:
    """How many tokens of each running row are settled, which means that no rewind discards them.

    Settled tokens are verified and were computed before the oldest unanswered plan: a rejected
    draft or a failed step rewinds the row no further than that, or to its start.
    """

    def __init__(self) -> None:
        self._before: deque[tuple[int, Int64Array, Int64Array]] = deque()

    def before_plan(
        self,
        num_computed: Int64Array,
        num_verified: Int64Array,
        generation: Int64Array,
        *,
        step: int,
        answered_step: int,
    ) -> Int64Array:
        """(max_num_seqs,) settled tokens of each row, when plan `step` is about to be made and all
        plans up to `answered_step` are answered. The arguments are the current columns."""
        before = self._before
        before.append((step, num_computed.copy(), generation.copy()))
        while len(before) > 1 and before[1][0] <= answered_step + 1:
            before.popleft()
        _, then_computed, then_generation = before[0]
        settled = np.minimum(np.minimum(num_computed, num_verified), then_computed)
        settled[generation != then_generation] = 0
        return settled

    def clear(self) -> None:
        """A new epoch begins, with no plans."""
        self._before.clear()
