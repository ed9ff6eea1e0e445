"""Detects writes to full blocks, for `--poison-kv`.

A block whose tokens are all computed does not change any more, while a row holds it. So its
checksum is taken after the step that has filled it (or has found it full), and compared before and
after every later step. A difference within a step is an error of that step; between two steps it is
a transfer's, or another process's.

The checksums are kept with the blocks, so that blocks which a new process adopts can be compared.

Only groups of full attention are guarded: the scheduler does not tell workers when it takes blocks
outside a window from a row, and states are rewritten.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from longshore.protocol.arrays import Int32Array, Int64Array
from longshore.protocol.errors import EngineDead
from longshore.protocol.kv_cache_spec import NULL_BLOCK, FullAttentionSpec, MLAAttentionSpec
from longshore.worker.kv_cache.block_table import BlockTable, MultiGroupBlockTable
from longshore.worker.kv_cache.buffer import KVCache

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]

BATCH: Final = 1024
"""Blocks per operation; a checksum needs as much memory as its blocks."""

MAX_NAMED: Final = 8


class BlockChanged(EngineDead):
    """A full block was overwritten. The message names it."""


class BlockGuard:
    """The checksums of one rank. `plan` is called on the thread that applies plans, all else on the
    compute queue, in order of the steps."""

    def __init__(self, cache: KVCache, tables: MultiGroupBlockTable) -> None:
        self._cache = cache
        self._tables = [
            table
            for table, group in zip(tables.tables, cache.groups, strict=True)
            if isinstance(group.spec, (FullAttentionSpec, MLAAttentionSpec)) and group.layer_names
        ]
        self._checksums: dict[int, int] = {}

    def plan(
        self,
        step: int,
        num_computed: Int64Array,
        num_scheduled: Int64Array,
        added_rows: Sequence[int] = (),
    ) -> "GuardedStep":
        """The guard of a step whose plan has been applied. num_computed: after the step.
        added_rows: blocks of these rows may be loaded in the step."""
        num_before = num_computed - num_scheduled
        num_before[list(added_rows)] = 0
        return GuardedStep(
            self, step, self._full_blocks(num_before), self._full_blocks(num_computed)
        )

    def _full_blocks(self, num_computed: Int64Array) -> Int64s:
        """Ids of the blocks of which all tokens are computed."""
        ids = [np.empty(0, np.int64)]
        for table in self._tables:
            ids += _full_blocks_of(table, num_computed)
        unique: Int64s = np.unique(np.concatenate(ids))
        return unique[unique != NULL_BLOCK]

    def keep(self, block_ids: Int64s) -> None:
        """Forget all other blocks: their owners have released them, or compute them again."""
        kept = set(block_ids.tolist())
        for block_id in self._checksums.keys() - kept:
            del self._checksums[block_id]
            self._cache.recorded[block_id] = 0

    def verify_adopted(self, block_ids: Int32Array) -> None:
        """Check that these blocks are as a former process of this rank has recorded them. Raises
        BlockChanged."""
        recorded = self._cache.recorded[block_ids]
        self._checksums = {
            block_id: value
            for block_id, value in zip(block_ids.tolist(), recorded.tolist(), strict=True)
            if value
        }
        self.verify("while the worker was replaced")
        logger.info("%d adopted blocks are as they were recorded", len(self._checksums))
        self._cache.recorded[:] = 0
        self._checksums.clear()

    def verify(self, when: str) -> None:
        """Raises BlockChanged."""
        known = np.fromiter(self._checksums, np.int64, len(self._checksums))
        found = self._compute(known)
        changed = [block for block, value in found if self._checksums[block] != value]
        if changed:
            listed = ", ".join(map(str, changed[:MAX_NAMED]))
            raise BlockChanged(
                f"full KV blocks were overwritten {when}: {listed} ({len(changed)} in all). Rows "
                "hold them, so tokens would be computed from wrong KV. Look for a transfer or a "
                "kernel that writes outside its own blocks."
            )

    def record(self, block_ids: Int64s) -> None:
        """Take the checksums of blocks that have none."""
        new = [each for each in block_ids.tolist() if each not in self._checksums]
        for block_id, value in self._compute(np.array(new, np.int64)):
            self._checksums[block_id] = self._cache.recorded[block_id] = value

    def _compute(self, block_ids: Int64s) -> Iterator[tuple[int, int]]:
        for first in range(0, len(block_ids), BATCH):
            some = block_ids[first : first + BATCH]
            sums = self._cache.checksums(torch.from_numpy(some).to(self._cache.device))
            yield from zip(some.tolist(), sums.tolist(), strict=True)


@dataclass(frozen=True)
class GuardedStep:
    """before, after: blocks that are full before and after the step."""

    guard: BlockGuard
    step: int
    before: Int64s
    after: Int64s

    def begin(self) -> None:
        """Check on the compute queue, before the step and its loads. Raises BlockChanged."""
        self.guard.keep(self.before)
        self.guard.verify(f"between steps, before step {self.step}")

    def end(self) -> None:
        """Check on the compute queue, after the step and its stores. Raises BlockChanged."""
        self.guard.verify(f"in step {self.step}")
        self.guard.record(self.after)


def _full_blocks_of(table: BlockTable, num_computed: Int64Array) -> Iterator[Int64s]:
    for row in np.flatnonzero(num_computed >= table.block_size).tolist():
        yield table.host[row, : num_computed[row] // table.block_size].astype(np.int64)
