"""The block tables of one KV cache group, one manager class per kind of attention.

This module has the base class and the kinds that keep every block while a request runs. Kinds that
free blocks early are in `windowed`; `coordinator` chooses the class for a spec.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import compress
from typing import Any, ClassVar, Final

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, BoolArray, Int32Array, Int64Array, int32_array
from longshore.protocol.kv_cache_spec import LongestRequest, of_all_ranks
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.blocks import BlockIds

_NO_ROWS: Final[Int64Array] = np.empty(0, np.int64)


class SingleTypeManager:
    """Block tables of one group, for attention to all earlier tokens.

    table:      (max_num_seqs, positions) int32, block ids in order of position; memory is used
                only as far as a row is written.
    num_blocks: (max_num_seqs,) int64, table entries in use.
    num_cached_blocks: (max_num_seqs,) int64, leading entries that need no caching.
    block_size: tokens per block, on all ranks that share its tokens.

    hit_alignment: every prefix hit has a multiple of this many tokens; None: of `block_size`.
    num_dropped: tokens, a multiple of that, by which a found prefix is longer than its hit.

    caches_prefixes: full blocks have hashes and can be found.
    frees_skipped:   some positions need no block (any more) and have the null block.
    grows:           a row gets blocks while it runs.

    A row's ids never change, except for blocks that are freed early and the one that a fork copies
    before its first step. A table only grows at its end, until it is truncated or taken. The
    caller owns the references; nothing here counts them.
    """

    caches_prefixes: ClassVar[bool] = True
    frees_skipped: ClassVar[bool] = False
    grows: ClassVar[bool] = True

    def __init__(
        self,
        spec: Any,
        pool: BlockPool,
        *,
        group: int,
        max_num_seqs: int,
        longest: LongestRequest,
        tokens_per_hash: int | None = None,
        hit_alignment: int | None = None,
        num_dropped: int = 0,
    ) -> None:
        self.spec = spec
        self.group = group
        shared = of_all_ranks(spec, longest.context_parallel_size)
        self.block_size: int = shared.block_size
        self.hashes_per_block = self.block_size // (tokens_per_hash or self.block_size)
        self._max_model_len = longest.num_tokens
        self._max_blocks: int = shared.max_blocks(longest)
        self._pool = pool
        self.table: np.ndarray[tuple[int, int], np.dtype[np.int32]] = np.zeros(
            (max_num_seqs, self._max_positions()), np.int32
        )
        self.num_blocks: Int64Array = np.zeros(max_num_seqs, np.int64)
        self.num_cached_blocks: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._hit_alignment, self._num_dropped = hit_alignment or self.block_size, num_dropped
        # The same memory for one row at a time, which costs half as much as through numpy.
        self._num_blocks_item = memoryview(self.num_blocks)
        self._num_cached_item = memoryview(self.num_cached_blocks)

    def _max_positions(self) -> int:
        """Table entries of the longest request."""
        return -(-self._max_model_len // self.block_size)

    @cached_property
    def _serves_hits(self) -> BoolArray | None:
        """(positions,) whether some hit needs the block at a position; None if all do. Blocks that
        no hit needs are not cached."""
        return None

    # How many blocks

    def num_positions(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        """Table entries that `num_tokens` tokens fill or begin, within `max_model_len`."""
        return -(-min(num_tokens, self._max_model_len) // self.block_size)

    def num_blocks_for(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at a time."""
        return min(self.num_positions(num_tokens, num_encoder_tokens), self._max_blocks)

    def first_needed(self, num_tokens: int) -> int:
        """The first block that computing the token after `num_tokens` others reads or writes."""
        return 0

    def positions(self, first: int, last: int, num_computed: int) -> Sequence[int]:
        """The positions in [first, last) that get a block, ascending, `last - 1` included.
        num_computed: tokens whose KV a connector loads into these blocks, or 0."""
        return range(first, last)

    def has_needed(self, table: Int32Array, num_tokens: int) -> bool:
        """Whether a row with this table can resume after `num_tokens` tokens."""
        end = self.num_positions(num_tokens)
        return len(table) >= end and bool(table[self.first_needed(num_tokens) : end].all())

    def rows_short(self, num_tokens: Int64Array) -> tuple[Int64Array, Int64Array, int]:
        """Rows that lack entries for their `num_tokens` (max_num_seqs,) tokens, ascending; how
        many entries each lacks; and how many new blocks all of them need."""
        wanted = np.minimum(num_tokens, self._max_model_len)
        rows = np.flatnonzero(wanted > self.num_blocks * self.block_size)
        if not len(rows):
            return rows, rows, 0
        counts: Int64Array = -(-wanted[rows] // self.block_size) - self.num_blocks[rows]
        return rows, counts, int(counts.sum())

    def lay_out(self, counts: Int64Array, block_ids: BlockIds) -> Int32Array:
        """The entries of rows that lack `counts` each, made of their new blocks."""
        return int32_array(block_ids)

    # A row's life

    def start(self, row: int, hits: BlockIds, new_block_ids: BlockIds) -> Int32Array:
        """Fill an empty row: cached blocks first, then new ones, with null blocks at positions
        that need no block. Returns a copy of the row's table."""
        if isinstance(hits, list) and isinstance(new_block_ids, list):
            block_ids = np.array(hits + new_block_ids, np.int32)
        else:
            block_ids = np.concatenate((int32_array(hits), int32_array(new_block_ids)))
        self.table[row, : len(block_ids)] = block_ids
        self._num_blocks_item[row] = len(block_ids)
        self._num_cached_item[row] = len(hits)
        return block_ids

    def attach(self, row: int, block_ids: Int32Array, num_cached_blocks: int) -> None:
        """Fill an empty row with these blocks. Leading blocks that are cached, and at least
        `num_cached_blocks`, are not cached again."""
        if self.caches_prefixes:
            num_cached_blocks = max(num_cached_blocks, self._pool.num_leading_cached(block_ids))
        self.start(row, block_ids[:num_cached_blocks], block_ids[num_cached_blocks:])

    def append(self, rows: Int64Array, counts: Int64Array, block_ids: BlockIds) -> Int64Array:
        """Append the next `counts[i]` of `block_ids` to row `rows[i]`; returns the row of each."""
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

    def append_to_row(self, row: int, block_ids: BlockIds) -> None:
        """Append these blocks to one row."""
        first = self._num_blocks_item[row]
        self.table[row, first : first + len(block_ids)] = block_ids
        self._num_blocks_item[row] = first + len(block_ids)

    def truncate(self, row: int, num_tokens: int) -> Int32Array:
        """Cut the row to the blocks of `num_tokens` tokens; returns the blocks that were cut."""
        keep = self.num_positions(num_tokens)
        cut: Int32Array = self.table[row, keep : self.num_blocks[row]].copy()
        self.num_blocks[row] -= len(cut)
        cached = self.table[row, : min(int(self.num_cached_blocks[row]), keep)]
        self.num_cached_blocks[row] = self._pool.num_leading_cached(cached)
        return cut

    def redirect(self, row: int, position: int, block_id: int) -> None:
        """Replace the row's block at `position` by one that the row fills itself."""
        self.table[row, position] = block_id
        self._num_cached_item[row] = min(self._num_cached_item[row], position)

    def block_ids(self, row: int) -> Int32Array:
        """A copy of the row's table, in order of position."""
        table: Int32Array = self.table[row, : self._num_blocks_item[row]]
        return table.copy()

    def take(self, rows: list[int]) -> list[Int32Array]:
        """The blocks of each row, in order of position; the rows are empty then."""
        if len(rows) == 1:  # a fifth of the time
            (row,) = rows
            block_ids: Int32Array = self.table[row, : self._num_blocks_item[row]].copy()
            self._num_blocks_item[row] = self._num_cached_item[row] = 0
            return [block_ids]
        counts = self.num_blocks[rows].tolist()
        tables = self.table[rows, : max(counts)]
        self.num_blocks[rows] = 0
        self.num_cached_blocks[rows] = 0
        return [table[:count] for table, count in zip(tables, counts, strict=True)]

    def blocks_in_use(self, row: int) -> Int32Array:
        """The row's blocks without those freed early, in order of position; possibly a view."""
        block_ids: Int32Array = self.table[row, : self._num_blocks_item[row]]
        return block_ids

    def num_blocks_of_rows(self, rows: Int64Array) -> int:
        """Blocks in the tables of these rows; shared blocks count once per row."""
        return int(self.num_blocks[rows].sum())

    def held(self) -> Int32Array:
        """The blocks of all rows, once per row that holds them."""
        positions = np.arange(self.table.shape[1])
        held: Int32Array = self.table[positions < self.num_blocks[:, None]]
        return held

    def clear(self) -> None:
        """Empty all rows."""
        self.num_blocks[:] = 0
        self.num_cached_blocks[:] = 0

    # The prefix cache

    def find(self, hashes: Sequence[bytes]) -> BlockIds:
        """One block per hash, up to the first hash without a block. Takes no reference."""
        return self._pool.find_cached_prefix(hashes, self.group)

    def rows_to_cache(self, num_tokens: Int64Array) -> Int64Array:
        """Rows with a full block, among their first `num_tokens` (max_num_seqs,) tokens, that is
        not cached yet."""
        return np.flatnonzero(num_tokens >= (self.num_cached_blocks + 1) * self.block_size)

    def cache_row(self, row: int, hashes: Sequence[bytes], num_full: int, step: int = 0) -> None:
        """Cache the row's blocks up to `num_full` that are not cached yet; `hashes` is its chain.
        In a cached prefix, a block may have been uncached while later ones stayed cached. step: the
        plan that computes them; 0: they are computed."""
        first = self._num_cached_item[row]
        if num_full > first:
            block_ids = self.table[row, first:num_full].tolist()
            if self.hashes_per_block > 1:
                hashes = self.hashes_of_blocks(hashes, first, num_full)
            else:
                hashes = hashes[first:num_full]
            if self._serves_hits is not None:
                serves = self._serves_hits[first:num_full].tolist()
                block_ids, hashes = list(compress(block_ids, serves)), [*compress(hashes, serves)]
            self._cache_blocks(block_ids, hashes, step)
            self._num_cached_item[row] = num_full

    def serves_hits(self, first: int, last: int) -> Sequence[bool]:
        """Whether some hit needs the blocks at positions [first, last)."""
        if self._serves_hits is None:
            return [True] * (last - first)
        serves: list[bool] = self._serves_hits[first:last].tolist()
        return serves

    def cache_rows(
        self,
        rows: Int64Array,
        num_full: Int64Array,
        chains: Sequence[Sequence[bytes]],
        step: int = 0,
    ) -> None:
        """`cache_row` for each row `rows[i]`, with `num_full[i]` and `chains[i]`, in order."""
        first = self.num_cached_blocks[rows]
        if (num_full - first == 1).all():
            if self._serves_hits is not None:
                serves = self._serves_hits[first]
                self.num_cached_blocks[rows] = num_full
                rows, first, num_full = rows[serves], first[serves], num_full[serves]
                chains = list(compress(chains, serves.tolist()))
            last_links = (num_full * self.hashes_per_block - 1).tolist()
            last_hashes = [chain[link] for chain, link in zip(chains, last_links, strict=True)]
            block_ids = self.table[rows, first].tolist()
            self._cache_blocks(block_ids, last_hashes, step)
            self.num_cached_blocks[rows] = num_full
        else:
            for row, hashes, count in zip(rows.tolist(), chains, num_full.tolist(), strict=True):
                self.cache_row(row, hashes, count, step)

    def _cache_blocks(self, block_ids: list[int], hashes: Sequence[bytes], step: int) -> None:
        self._pool.cache_blocks(block_ids, hashes, self.group, step)

    def hashes_of_blocks(
        self, hashes: Sequence[bytes], first: int = 0, last: int | None = None
    ) -> Sequence[bytes]:
        """Hashes of the blocks [first, last) from the chain."""
        per_block = self.hashes_per_block
        if per_block == 1:
            return hashes[first:last]
        end = None if last is None else last * per_block
        return hashes[(first + 1) * per_block - 1 : end : per_block]

    # What rows share

    def num_common_blocks(self, rows: Int64Array) -> int:
        """Number of leading blocks that all `rows` share, found with doubling steps."""
        if len(rows) == 0 or self.table[rows[0], 0] != self.table[rows[-1], 0]:
            return 0
        limit = int(self.num_blocks[rows].min())
        first, last = 0, min(1, limit)
        while first < limit:
            table = self.table[rows, first:last]
            is_common = (table == table[0]).all(axis=0)
            if not is_common.all():
                return first + int(is_common.argmin())
            first, last = last, min(2 * last, limit)
        return limit


class FullAttentionManager(SingleTypeManager):
    """Tokens attend to all earlier tokens; also multi-head latent attention."""


class CrossAttentionManager(SingleTypeManager):
    """Tokens attend to the encoder's tokens. All blocks are allocated at the start, for the number
    of encoder tokens. Nothing is cached, because the content does not follow from the tokens."""

    caches_prefixes = False
    grows = False

    def _max_positions(self) -> int:
        return self._max_blocks

    def num_positions(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        return -(-num_encoder_tokens // self.block_size)

    def rows_short(self, num_tokens: Int64Array) -> tuple[Int64Array, Int64Array, int]:
        return _NO_ROWS, _NO_ROWS, 0

    def truncate(self, row: int, num_tokens: int) -> Int32Array:
        return EMPTY_INT32

    def num_common_blocks(self, rows: Int64Array) -> int:
        return 0
