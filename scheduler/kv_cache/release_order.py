"""In which order a request's blocks of several groups go back to the pool.

Tail first: eviction takes the oldest free block, and a prefix is worth more than its continuation.
"""

import math
from collections.abc import Sequence
from operator import mul

import numpy as np

from longshore.protocol.arrays import Int32Array
from longshore.scheduler.kv_cache.block_pool import FEW_BLOCKS


class ReleaseOrder:
    """For two groups or more, with blocks of these sizes.

    block_sizes: tokens per block, by group.
    forgets:     by group, whether its tables may begin with null blocks.
    """

    def __init__(self, block_sizes: Sequence[int], frees_skipped: Sequence[bool]) -> None:
        unit = math.gcd(*block_sizes)
        self._strides = [size // unit for size in block_sizes]
        self._is_even = max(self._strides) == 1
        self._forgets = tuple(frees_skipped)

    def tail_first(self, tables: Sequence[Int32Array]) -> Int32Array:
        """The blocks of all groups but for null ones, whichever ends at a later token first, and of
        those that end at the same token in order of group. `tables` are by group, from position 0.

        A grid has a line per token at which a block may end, counted in the greatest common divisor
        of all block sizes, and a column per group; it is read from the bottom up. If tables are
        long, it begins where more than one group has blocks.
        """
        lengths = list(map(len, tables))
        top, lone = 0, 0
        if max(lengths) > FEW_BLOCKS:
            firsts = list(map(self._first_line, range(len(tables)), tables))
            lone, top = firsts.index(min(firsts)), sorted(firsts)[1]
        if self._is_even and min(lengths) == max(lengths):
            grid = np.array([table[top:] for table in tables] if top else tables).T
        else:
            grid = np.zeros((max(map(mul, lengths, self._strides)) - top, len(tables)), np.int32)
            for column, stride, table in zip(grid.T, self._strides, tables, strict=True):
                rest = table[top // stride :]
                first = (top // stride + 1) * stride - 1 - top
                column[first : first + stride * len(rest) : stride] = rest
        lines = grid[::-1].ravel()
        block_ids: Int32Array = lines[lines.nonzero()]
        if not top:
            return block_ids
        above = tables[lone][: top // self._strides[lone]][::-1]
        return np.concatenate((block_ids, above[above.nonzero()]))

    def _first_line(self, group: int, table: Int32Array) -> int:
        """Where the group's first block begins, if it has any."""
        if not (self._forgets[group] and len(table)):
            return 0
        return self._strides[group] * int(table.astype(np.bool_).argmax())
