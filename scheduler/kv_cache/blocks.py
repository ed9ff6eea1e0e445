"""Values that pass between the KV cache and its callers: a cached prefix, blocks to allocate, held
blocks, blocks to copy. All but the last are per KV cache group, in order of position, with the null
block at positions that need no block.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, Int32Array

BlockIds: TypeAlias = Int32Array | list[int]
"""A few blocks are passed as a list: an array of one block costs more than its allocation."""

FEW_BLOCKS: Final = 96
"""Up to this many blocks a scalar loop is faster than the fixed cost of vector operations."""

FEW_FREED_BLOCKS: Final = 36
"""The same for freeing blocks."""


class ComputedBlocks(NamedTuple):
    """A cached prefix of `num_tokens` tokens: `block_ids[group]` in order of position, the null
    block where a group needs none. state: the pages of the state after it, to be copied."""

    block_ids: tuple[BlockIds, ...]
    num_tokens: int
    state: BlockIds = EMPTY_INT32


class BlockDemand(NamedTuple):
    """What a request that starts needs: its cached prefix and `num_new` new blocks.
    `positions[group]` are the entries of its block table that get one, up to `ends[group]`.

    num_needed: free blocks that this takes: the new ones, and cached ones without a reference.
    """

    computed: ComputedBlocks
    positions: Sequence[Sequence[int]]
    ends: Sequence[int]
    num_new: int
    num_needed: int


class HeldBlocks(NamedTuple):
    """Block tables without a row: `block_ids[group]` in order of position. The owner of this value
    owns one reference to each block except the null block, until it is attached or released."""

    block_ids: tuple[Int32Array, ...]

    @property
    def num_blocks(self) -> int:
        """Entries of all groups, null blocks included."""
        return sum(map(len, self.block_ids))

    def ids(self) -> set[int]:
        """The set of blocks."""
        return set(np.concatenate(self.block_ids).tolist())


class BlockCopy(NamedTuple):
    """The first `num_tokens` tokens of block `source_id` are copied to `target_id`."""

    source_id: int
    target_id: int
    num_tokens: int


def table_entries(first: int, end: int, positions: Sequence[int], block_ids: BlockIds) -> BlockIds:
    """The table entries [first, end): these blocks at `positions`, null blocks elsewhere."""
    if end - first == len(positions):
        return block_ids
    entries = np.zeros(end - first, np.int32)
    entries[np.array(positions, np.int64) - first] = block_ids
    return entries
