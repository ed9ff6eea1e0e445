"""The order in which a request's blocks of several KV cache groups are freed."""

import math
from collections.abc import Sequence
from operator import mul

import numpy as np

from longshore.protocol.arrays import Int32Array
from longshore.scheduler.kv_cache.blocks import FEW_BLOCKS


class FreeOrder:
    """The order in which a request's blocks of several groups are freed.

    Tail first: eviction takes the block that was freed first, and a prefix is more valuable than
    its continuation.

    block_sizes:   tokens per block, by group.
    frees_skipped: by group, whether its tables may begin with null blocks.
    """

    def __init__(self, block_sizes: Sequence[int], frees_skipped: Sequence[bool]) -> None:
        unit = math.gcd(*block_sizes)
        self._strides = [size // unit for size in block_sizes]
        self._is_even = max(self._strides, default=1) == 1
        self._frees_skipped = tuple(frees_skipped)

    def tail_first(self, tables: Sequence[Int32Array]) -> Int32Array:
        """The blocks of two or more groups without null blocks, by the token at which they end,
        latest first, then by group. `tables` are by group, from position 0.

        The blocks are put into a grid with a line per token at which a block can end (in units of
        the greatest common divisor of all block sizes) and a column per group, which is read from
        the bottom up. If tables are long, it begins where more than one group has blocks.
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
        """The line where the group's first block begins, if it has one."""
        if not (self._frees_skipped[group] and len(table)):
            return 0
        return self._strides[group] * int(table.astype(np.bool_).argmax())
