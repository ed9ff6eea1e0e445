"""Groups whose layers do not look at everything before a token: blocks that nobody will read again
are given back while the request runs, and a cached prefix need not be there from its first token.

One function tells the kinds apart: how many leading tokens the token behind `num_tokens` others has
no use for. What is given back and what a hit must consist of both follow from it. Positions without
a block hold the null block, so that all others stay where they are.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, Int64Array, int32_array
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import (
    NULL_BLOCK,
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.kv_cache.block_pool import BlockIds
from longshore.scheduler.kv_cache.full import SingleTypeManager, register_manager

_Tokens = TypeVar("_Tokens", int, Int64Array)


class WindowedManager(SingleTypeManager):
    """What the kinds have in common. num_freed: (max_num_seqs,) int64, leading entries that
    have been gone through for blocks to give back."""

    frees_skipped = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.num_freed: Int64Array = np.zeros_like(self.num_blocks)

    def num_skipped_tokens(self, num_tokens: _Tokens) -> _Tokens:
        """Leading tokens that the token behind `num_tokens` others has no use for; below 0 means
        none. Never falls as `num_tokens` rises."""
        raise NotImplementedError

    def first_needed(self, num_tokens: int) -> int:
        return max(self.num_skipped_tokens(num_tokens), 0) // self.block_size

    def positions(self, first: int, last: int, num_computed: int) -> Sequence[int]:
        return range(min(max(first, self.first_needed(num_computed)), last), last)

    def start(self, row: int, hits: BlockIds, new_block_ids: BlockIds) -> None:
        super().start(row, hits, new_block_ids)
        self.num_freed[row] = 0

    def truncate(self, row: int, num_tokens: int) -> Int32Array:
        cut = super().truncate(row, num_tokens)
        self.num_freed[row] = min(self.num_freed[row], self.num_blocks[row])
        return cut

    def free_skipped(
        self, num_settled: Int64Array, seniority: Int64Array, *, only_cached: bool
    ) -> Int32Array:
        """Take from all rows the blocks that no token behind their `num_settled` (max_num_seqs,)
        tokens needs; returns them, rows of lower `seniority` first, each row's last block first.

        only_cached: keep those that wait for their name.
        """
        num_skipped = np.maximum(self.num_skipped_tokens(num_settled), 0) // self.block_size
        last = np.minimum(num_skipped, self.num_cached_blocks if only_cached else self.num_blocks)
        rows = np.flatnonzero(last > self.num_freed)
        if len(rows) == 0:
            return EMPTY_INT32
        rows = rows[seniority[rows].argsort()]
        last = last[rows]
        counts = last - self.num_freed[rows]
        num_entries = int(counts.sum())
        if num_entries == len(rows):  # one each, as in decode
            entries = rows, last - 1
        else:
            nth_of_row = np.arange(num_entries) - np.repeat(counts.cumsum() - counts, counts)
            entries = np.repeat(rows, counts), np.repeat(last, counts) - 1 - nth_of_row
        forgotten = self.table[entries]
        self.table[entries] = NULL_BLOCK
        self.num_freed[rows] = last
        block_ids: Int32Array = forgotten[forgotten != NULL_BLOCK]
        return block_ids

    def blocks_in_use(self, row: int) -> Int32Array:
        entries = self.table[row, self.num_freed[row] : self.num_blocks[row]]
        block_ids: Int32Array = entries[entries != NULL_BLOCK]
        return block_ids

    def num_blocks_of_rows(self, rows: Int64Array) -> int:
        return sum(len(self.blocks_in_use(row)) for row in rows.tolist())

    def num_common_blocks(self, rows: Int64Array) -> int:
        """None: what is at the front of a table is no use to anybody."""
        return 0


@register_manager(SlidingWindowSpec)
class SlidingWindowManager(WindowedManager):
    """Tokens attend to themselves and to the `sliding_window - 1` before."""

    def num_skipped_tokens(self, num_tokens: _Tokens) -> _Tokens:
        window: int = self.spec.sliding_window
        return num_tokens - window + 1


@register_manager(ChunkedLocalAttentionSpec)
class ChunkedLocalManager(WindowedManager):
    """Tokens attend to those before them in their chunk."""

    def num_skipped_tokens(self, num_tokens: _Tokens) -> _Tokens:
        size: int = self.spec.attention_chunk_size
        return num_tokens // size * size


@register_manager(MambaSpec)
class MambaManager(WindowedManager):
    """A state in place of KV: the last one is all that the next token needs.

    A step reads the state in the block of the last token computed before it, and writes to the
    block of its own last token; blocks in between are null. A step ends in the block in which it
    begins, or at a block border, and that is the next one if it begins within a block
    (`aligned_chunk`). So a full block that is not null holds the state at its end: a snapshot,
    which serves whoever has the same prefix. Not in the step that computes it, in which the states
    of all rows are read before any is written.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._cached_in_step: set[int] = set()

    def num_skipped_tokens(self, num_tokens: _Tokens) -> _Tokens:
        return num_tokens - 1

    def aligned_chunk(self, num_computed: int, num_new: int) -> int:
        """How many of `num_new` tokens a step may compute behind `num_computed`."""
        size, offset = self.block_size, num_computed % self.block_size
        if offset + num_new <= size:
            return num_new
        return size - offset if offset else num_new - num_new % size

    def aligned_chunks(self, num_computed: Int64Array, num_new: Int64Array) -> Int64Array:
        """The same for columns."""
        size, offset = self.block_size, num_computed % self.block_size
        allowed = np.where(offset > 0, size - offset, num_new - num_new % size)
        return np.where(offset + num_new <= size, num_new, allowed)

    def positions(self, first: int, last: int, num_computed: int) -> Sequence[int]:
        wanted = {self.first_needed(num_computed), last - 1} if num_computed else {last - 1}
        return sorted(position for position in wanted if first <= position < last)

    def num_new_blocks(self, counts: Int64Array) -> int:
        return len(counts)

    def lay_out(self, counts: Int64Array, block_ids: BlockIds) -> Int32Array:
        entries = np.zeros(counts.sum(), np.int32)
        entries[np.cumsum(counts) - 1] = int32_array(block_ids)
        return entries

    def step_begins(self) -> None:
        """States named so far are written before any that the coming step reads."""
        self._cached_in_step.clear()

    def find(self, hashes: Sequence[bytes]) -> BlockIds:
        found = super().find(hashes)
        if self._cached_in_step and not self._cached_in_step.isdisjoint(found):
            return found[: [block_id in self._cached_in_step for block_id in found].index(True)]
        return found

    def _cache_blocks(self, block_ids: list[int], hashes: Sequence[bytes]) -> None:
        super()._cache_blocks(block_ids, hashes)
        self._cached_in_step.update(block_ids)


def check_states(
    config: SchedulerConfig, specs: Iterable[KVCacheSpec], *, has_connector: bool
) -> None:
    """Raise ConfigError for settings that a model with states cannot be run with."""
    if not any(isinstance(spec, MambaSpec) for spec in specs):
        return
    why = None
    if config.num_speculative_tokens or config.num_lookahead_tokens:
        why = "num_speculative_tokens: a state cannot be taken back behind a rejected draft"
    elif not config.enable_chunked_prefill:
        why = "enable_chunked_prefill=false: a prompt is cut so that states fall on block borders"
    elif has_connector:
        why = "kv_connector: connectors move KV of tokens, not states"
    if why is not None:
        raise ConfigError(f"this model keeps states (Mamba layers) and cannot run with {why}")
