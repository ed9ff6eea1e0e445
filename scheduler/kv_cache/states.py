"""Groups that keep states instead of KV, and where the chunks of a step must end for them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from longshore.protocol.arrays import Int32Array, Int64Array, int32_array
from longshore.scheduler.kv_cache.blocks import BlockIds
from longshore.scheduler.kv_cache.full import SingleTypeManager
from longshore.scheduler.kv_cache.windowed import Tokens, WindowedManager


class MambaManager(WindowedManager):
    """States instead of KV: the next token needs only the last one.

    A step reads the state in the block of the last token computed before it, and writes to the
    block of its own last token; blocks in between are null. A step ends in the block in which it
    begins, or at a block boundary, which is the next one if it begins within a block
    (`aligned_chunk`). So a full block that is not null holds the state at its end: a snapshot that
    every request with the same prefix can use, but not in the step that computes it, which reads
    the states of all rows before it writes any.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._cached_in_step: set[int] = set()

    def num_skipped_tokens(self, num_tokens: Tokens) -> Tokens:
        return num_tokens - 1

    def aligned_chunk(self, num_computed: int, num_new: int) -> int:
        """How many of `num_new` tokens a step may compute after `num_computed`."""
        size, offset = self.block_size, num_computed % self.block_size
        if offset + num_new <= size:
            return num_new
        return size - offset if offset else num_new - num_new % size

    def aligned_chunks(self, num_computed: Int64Array, num_new: Int64Array) -> Int64Array:
        """`aligned_chunk` for columns."""
        size, offset = self.block_size, num_computed % self.block_size
        allowed = np.where(offset > 0, size - offset, num_new - num_new % size)
        return np.where(offset + num_new <= size, num_new, allowed)

    def positions(self, first: int, last: int, num_computed: int) -> Sequence[int]:
        wanted = {self.first_needed(num_computed), last - 1} if num_computed else {last - 1}
        return sorted(position for position in wanted if first <= position < last)

    def rows_short(self, num_tokens: Int64Array) -> tuple[Int64Array, Int64Array, int]:
        rows, counts, _ = super().rows_short(num_tokens)
        return rows, counts, len(rows)

    def lay_out(self, counts: Int64Array, block_ids: BlockIds) -> Int32Array:
        entries = np.zeros(counts.sum(), np.int32)
        entries[np.cumsum(counts) - 1] = int32_array(block_ids)
        return entries

    def step_begins(self) -> None:
        """A new step begins: it can read all states cached so far."""
        self._cached_in_step.clear()

    def find(self, hashes: Sequence[bytes]) -> BlockIds:
        found = super().find(hashes)
        if self._cached_in_step and not self._cached_in_step.isdisjoint(found):
            return found[: [block_id in self._cached_in_step for block_id in found].index(True)]
        return found

    def _cache_blocks(self, block_ids: list[int], hashes: Sequence[bytes], step: int) -> None:
        super()._cache_blocks(block_ids, hashes, step)
        self._cached_in_step.update(block_ids)


class StateGroups:
    """The groups with states of a KV cache, of which there may be none.

    junctions: by row, where its prefix ends as far as another request has computed it too; a step
               that would pass this length ends there, so that a state is kept.
    """

    def __init__(self, managers: Sequence[SingleTypeManager], max_num_seqs: int) -> None:
        self._managers = [each for each in managers if isinstance(each, MambaManager)]
        self.junctions: Int64Array = np.zeros(max_num_seqs, np.int64)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._managers)

    def begin_step(self) -> None:
        """See `MambaManager.step_begins`."""
        for manager in self._managers:
            manager.step_begins()

    def aligned_chunk(self, num_computed: int, num_new: int, junction: int = 0) -> int:
        """How many of `num_new` tokens, at least one, a step may compute after `num_computed`:
        groups with states need chunks that end at block boundaries (`MambaManager`), and at the
        `junction` (see `junctions`)."""
        if num_computed < junction < num_computed + num_new:
            num_new = junction - num_computed
        allowed = 0
        while self._managers and allowed != num_new:
            allowed = num_new
            for manager in self._managers:
                num_new = manager.aligned_chunk(num_computed, num_new)
        return num_new

    def chunk_after_load(self, num_computed: int, num_new: int) -> int:
        """How many of `num_new` tokens the first step may compute after a load of `num_computed`.
        Groups with states have a block for the next token already: a chunk that passes its end
        would leave it without a state, but it would be cached."""
        left = (size - num_computed % size for size in (each.block_size for each in self._managers))
        return min(num_new, *left) if self._managers else num_new

    def aligned_chunks(self, num_computed: Int64Array, num_new: Int64Array) -> Int64Array:
        """`aligned_chunk` for columns."""
        left = self.junctions - num_computed
        num_new = np.where((left > 0) & (left < num_new), left, num_new)
        is_cut = bool(self._managers)
        while is_cut:
            before = num_new
            for manager in self._managers:
                num_new = manager.aligned_chunks(num_computed, num_new)
            is_cut = bool((num_new != before).any())
        return num_new
