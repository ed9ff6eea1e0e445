"""What passes between the KV cache and those who ask it for blocks: prefixes found, blocks wanted,
blocks held, blocks to copy. All but the last are per KV cache group, in order of position, with the
null block where none is needed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from longshore.protocol.arrays import Int32Array
from longshore.scheduler.kv_cache.block_pool import BlockIds


class ComputedBlocks(NamedTuple):
    """A cached prefix: `block_ids[group]` in order of position, `num_tokens` in all. The null block
    stands where a group needs none."""

    block_ids: tuple[BlockIds, ...]
    num_tokens: int


class BlockDemand(NamedTuple):
    """What a request that starts needs: its cached prefix, and `num_new` blocks. `positions[group]`
    are the positions in its table that get one, up to `ends[group]`."""

    computed: ComputedBlocks
    positions: tuple[Sequence[int], ...]
    ends: tuple[int, ...]
    num_new: int

    @property
    def num_blocks(self) -> int:
        """With the prefix, as if nobody held it."""
        if self.computed.num_tokens == 0:
            return self.num_new
        return self.num_new + sum(map(len, self.computed.block_ids))


class HeldBlocks(NamedTuple):
    """Blocks of somebody who is on no row: `block_ids[group]` in order of position. Whoever has
    this owns one reference to each of them but the null block, until it is attached or released."""

    block_ids: tuple[Int32Array, ...]


class BlockCopy(NamedTuple):
    """The first `num_tokens` tokens of block `source_id` are to be copied to `target_id`."""

    source_id: int
    target_id: int
    num_tokens: int


def laid_out(first: int, end: int, positions: Sequence[int], block_ids: BlockIds) -> BlockIds:
    """The table entries [first, end): these blocks at `positions`, null blocks between."""
    if end - first == len(positions):
        return block_ids
    entries = np.zeros(end - first, np.int32)
    entries[np.array(positions, np.int64) - first] = block_ids
    return entries
