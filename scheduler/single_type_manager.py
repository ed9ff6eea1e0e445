"""Which blocks a row holds in one KV cache group, for one kind of attention."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from longshore.protocol.arrays import Int32Array, Int64Array
from longshore.protocol.kv_cache_spec import FullAttentionSpec
from longshore.scheduler.block_pool import BlockPool

_NO_BLOCKS: Final[list[int]] = []


class FullAttentionManager:
    """Block tables of a group whose tokens attend to everything before them.

    table:      (max_num_seqs, max_blocks) int32, block ids in order of position; the memory of
                a row is touched only as far as it is used.
    num_blocks: (max_num_seqs,) int64, blocks held.
    num_named:  (max_num_seqs,) int64, leading blocks that have their name.

    A row's table only grows, until it is freed as a whole.
    """

    def __init__(
        self,
        spec: FullAttentionSpec,
        pool: BlockPool,
        *,
        group: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.block_size = spec.block_size
        self.group = group
        self._pool = pool
        self.table: np.ndarray[tuple[int, int], np.dtype[np.int32]] = np.zeros(
            (max_num_seqs, spec.max_blocks(max_model_len)), np.int32
        )
        self.num_blocks: Int64Array = np.zeros(max_num_seqs, np.int64)
        self.num_named: Int64Array = np.zeros(max_num_seqs, np.int64)

    def find_longest_hit(self, names: Sequence[bytes], max_tokens: int) -> list[int]:
        """Blocks of the longest cached prefix of at most `max_tokens`, left to right up to the
        first miss. Holds nothing: `start` does."""
        hits: list[int] = []
        get_cached_block, groups = self._pool.get_cached_block, (self.group,)
        for name in names[: max_tokens // self.block_size]:
            found = get_cached_block(name, groups)
            if found is None:
                break
            hits += found
        return hits or _NO_BLOCKS

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def num_blocks_short(self, num_tokens: Int64Array) -> Int64Array:
        """(max_num_seqs,) blocks each row lacks to hold `num_tokens` (same shape) tokens."""
        wanted = (num_tokens + (self.block_size - 1)) // self.block_size
        short: Int64Array = np.maximum(wanted - self.num_blocks, 0)
        return short

    def start(self, row: int, hits: Sequence[int], new_block_ids: Sequence[int]) -> None:
        """A request takes an empty row: cached blocks first (one more reference each, taken by
        the caller), then new ones."""
        num_hits, count = len(hits), len(hits) + len(new_block_ids)
        self.table[row, :num_hits] = hits
        self.table[row, num_hits:count] = new_block_ids
        self.num_blocks[row] = count
        self.num_named[row] = num_hits

    def append(self, rows: Int64Array, counts: Int64Array, block_ids: Sequence[int]) -> Int64Array:
        """Row `rows[i]` gets the next `counts[i]` of `block_ids`; returns the row of each block."""
        first = self.num_blocks[rows]
        if len(rows) == len(block_ids):
            self.table[rows, first] = block_ids
            self.num_blocks[rows] = first + 1
            return rows
        row_of_block = np.repeat(rows, counts)
        start_of_row = np.repeat(np.cumsum(counts) - counts, counts)
        positions = np.repeat(first, counts) + np.arange(len(block_ids)) - start_of_row
        self.table[row_of_block, positions] = block_ids
        self.num_blocks[rows] = first + counts
        return row_of_block

    def rows_to_name(self, num_tokens: Int64Array) -> Int64Array:
        """Rows that hold full blocks of their first `num_tokens` (max_num_seqs,) without a name."""
        return np.flatnonzero(num_tokens // self.block_size > self.num_named)

    def cache_blocks(self, row: int, names: Sequence[bytes], num_tokens: int) -> None:
        """Name the full blocks of the first `num_tokens` tokens that have no name yet."""
        first, last = int(self.num_named[row]), num_tokens // self.block_size
        block_ids = self.table[row, first:last].tolist()
        self._pool.cache_full_blocks(block_ids, names[first:last], self.group)
        self.num_named[row] = last

    def block_ids(self, row: int) -> Int32Array:
        """A copy of the row's table, in order of position."""
        table: Int32Array = self.table[row, : self.num_blocks[row]]
        return table.copy()

    def free(self, row: int) -> None:
        """Give the row's blocks back, tail first: eviction takes the oldest free block, and a
        prefix is worth more than its continuation."""
        block_ids: list[int] = self.table[row, : self.num_blocks[row]].tolist()
        block_ids.reverse()
        self._pool.free_blocks(block_ids)
        self.num_blocks[row] = 0
        self.num_named[row] = 0
