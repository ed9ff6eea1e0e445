"""The blocks of each row in order of position: one block table per KV cache group.

Plans change the host's copy; each step then updates the device's copy on the compute queue. Only
what rows have gained is transferred, all in one copy, so a step costs the same however long rows
are. A row is append-only, except that it is overwritten when it starts and truncated by a rewind.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longshore.protocol.errors import PlanMismatch
from longshore.worker.kv_cache.context_share import WHOLE_CONTEXT, ContextShare
from longshore.worker.kv_cache.slot_mapping import slots_at
from longshore.worker.queues.compute_queue import Completion
from longshore.worker.step.staging import StagingRing

IntArray = npt.NDArray[np.integer]


class BlockTable:
    """The block table of one group.

    block_size:        tokens of one allocated block that this rank stores.
    kernel_block_size: tokens of one block as attention sees it; a divisor of block_size. If it is
                       smaller, an allocated id k expands to k * r ... k * r + r - 1, where r is
                       block_size / kernel_block_size.
    share:             this rank's share of the tokens, with context parallelism. An entry then
                       covers the tokens of all sharing ranks, and so does the attribute
                       `block_size`.
    host:              (max_num_seqs, max_blocks) int32.
    num_blocks:        (max_num_seqs,) int64, number of valid entries of each row.
    device_table:      like `host`, on the device, as of the last commit that was run.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        kernel_block_size: int | None = None,
        share: ContextShare = WHOLE_CONTEXT,
    ) -> None:
        self.kept_block_size = kernel_block_size or block_size
        if block_size % self.kept_block_size:
            raise ValueError(
                f"kernel_block_size={kernel_block_size} does not divide block_size={block_size}"
            )
        if self.kept_block_size % share.interleave:
            raise ValueError(
                f"interleave={share.interleave} does not divide the block size, "
                f"{self.kept_block_size}"
            )
        self.share = share
        self.block_size = self.kept_block_size * share.size
        self._blocks_per_id = block_size // self.kept_block_size
        self.max_blocks = -(-max_model_len // (block_size * share.size)) * self._blocks_per_id
        self.host = np.zeros((max_num_seqs, self.max_blocks), np.int32)
        self._flat_host = self.host.reshape(-1)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.device_table = torch.zeros(
            (max_num_seqs, self.max_blocks), dtype=torch.int32, device=device
        )
        self._columns = torch.arange(self.max_blocks, device=device)
        self._num_committed = np.zeros(max_num_seqs, np.int64)  # leading entries of each row
        self._staging = StagingRing(
            {
                "starts": ((max_num_seqs,), torch.int64),
                "entries": ((max_num_seqs * self.max_blocks,), torch.int32),
            },
            pin_memory=device.type == "cuda",
        )

    def append_row(self, row: int, block_ids: IntArray) -> None:
        """Append blocks to one row; an empty list changes nothing."""
        self.append_rows(np.full(len(block_ids), row, np.int64), block_ids)

    def append_rows(self, rows: IntArray, block_ids: IntArray) -> None:
        """Append `block_ids[i]` to row `rows[i]`; blocks of one row keep their order.

        Raises PlanMismatch if a row would hold more blocks than the longest request needs.
        """
        if len(rows) == 0:
            return
        order = np.argsort(rows, kind="stable")
        rows, block_ids = rows[order].astype(np.int64), self._expand(block_ids[order])
        rows = np.repeat(rows, self._blocks_per_id)
        held, first, counts = np.unique(rows, return_index=True, return_counts=True)
        columns = self.num_blocks[rows] + np.arange(len(rows)) - np.repeat(first, counts)
        if columns.max() >= self.max_blocks:
            raise PlanMismatch(
                f"row {rows[columns.argmax()]} would hold {columns.max() + 1} blocks; "
                f"the longest request needs {self.max_blocks}"
            )
        self.host[rows, columns] = block_ids
        self.num_blocks[held] += counts

    def add_row(self, row: int, block_ids: IntArray) -> None:
        """Start a row with these blocks, overwriting its entries."""
        self.num_blocks[row] = self._num_committed[row] = 0
        self.append_row(row, block_ids)

    def truncate_row(self, row: int, num_tokens: int) -> None:
        """Keep only the blocks that the row's first `num_tokens` tokens need."""
        num_ids = -(-num_tokens // (self.block_size * self._blocks_per_id))
        self.num_blocks[row] = min(self.num_blocks[row], num_ids * self._blocks_per_id)
        self._num_committed[row] = min(self._num_committed[row], self.num_blocks[row])

    def move_row(self, source: int, destination: int) -> None:
        """Move a row's blocks to `destination`; `source` is empty afterwards."""
        self.add_row(destination, self.allocated(source))
        self.num_blocks[source] = self._num_committed[source] = 0

    def swap_row(self, one: int, other: int) -> None:
        """Exchange the blocks of two rows."""
        pair, swapped = [one, other], [other, one]
        self.host[pair] = self.host[swapped]
        self.num_blocks[pair] = self.num_blocks[swapped]
        self._num_committed[pair] = 0

    def allocated(self, row: int) -> npt.NDArray[np.int32]:
        """The row's allocated block ids, in order of position."""
        entries = self.host[row, : self.num_blocks[row]]
        return entries[:: self._blocks_per_id] // self._blocks_per_id

    def capacity(self) -> npt.NDArray[np.int64]:
        """(max_num_seqs,) tokens for which each row has blocks."""
        return self.num_blocks * self.block_size

    def step_slots(
        self,
        rows: npt.NDArray[np.int64],
        places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    ) -> npt.NDArray[np.int64]:
        """The slot of each token, -1 if another rank stores it; every position must have a block.
        places: the column of each position, and the offset in it."""
        return slots_at(self.host, rows, places, self.kept_block_size, self.share)

    def commit(self) -> "TableUpload | None":
        """The upload that brings the device's copy up to date; None if it is. Run uploads in
        order."""
        num_new = self.num_blocks - self._num_committed
        rows = np.flatnonzero(num_new)
        if len(rows) == 0:
            return None
        width = int(num_new.max())
        firsts = np.minimum(self._num_committed[rows], self.max_blocks - width)
        starts = rows * self.max_blocks + firsts
        self._num_committed[:] = self.num_blocks
        staging = self._staging.acquire()
        num_entries = len(rows) * width
        staging.arrays["starts"][: len(rows)] = starts
        indices = (starts[:, None] + np.arange(width)).reshape(-1)
        staging.arrays["entries"][:num_entries] = self._flat_host[indices]
        return TableUpload(
            self.device_table,
            staging.tensors["starts"][: len(rows)],
            self._columns[:width],
            staging.tensors["entries"][:num_entries],
            staging.guard,
        )

    def _expand(self, block_ids: IntArray) -> npt.NDArray[np.int32]:
        if self._blocks_per_id == 1:
            return block_ids.astype(np.int32, copy=False)
        offsets = np.arange(self._blocks_per_id, dtype=np.int32)
        return (block_ids[:, None].astype(np.int32) * self._blocks_per_id + offsets).reshape(-1)


class StateTable(BlockTable):
    """The pages of each row's state, which are not tied to its tokens. All are given when the row
    starts. `max_model_len` is the tokens of as many blocks."""

    def truncate_row(self, row: int, num_tokens: int) -> None:
        """A rewound row computes its state again, in the same pages."""

    def capacity(self) -> npt.NDArray[np.int64]:
        return np.where(self.num_blocks == self.max_blocks, np.iinfo(np.int64).max, 0)

    def step_slots(
        self,
        rows: npt.NDArray[np.int64],
        places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    ) -> npt.NDArray[np.int64]:
        """Tokens have no slots of their own."""
        return np.zeros(len(rows), np.int64)


class TableUpload:
    """New entries to copy to the device: `width` of each changed row, which are also older ones of
    the rows that have gained less. `guard` it with the operation that runs it.

    starts:  (n,) int64, on the host: index of each row's first entry, over all rows.
    columns: (width,) int64, on the device: 0, 1, ...
    entries: (n * width,) int32, on the host.
    """

    def __init__(
        self,
        device_table: Tensor,
        starts: Tensor,
        columns: Tensor,
        entries: Tensor,
        guard: Callable[[Completion], None],
    ) -> None:
        self._device_table = device_table
        self._starts = starts
        self._columns = columns
        self.entries = entries
        self.guard = guard

    def run(self) -> None:
        """Update the device's copy. On the compute queue; one copy for all rows."""
        device = self._device_table.device
        starts = self._starts.to(device, non_blocking=True)
        entries = self.entries.to(device, non_blocking=True)
        indices = (starts.unsqueeze(1) + self._columns).view(-1)
        self._device_table.view(-1).index_copy_(0, indices, entries)


class MultiGroupBlockTable:
    """The block tables of all KV cache groups.

    states:     that of the states, if there are any.
    max_copies: blocks that are copied for one row at most.
    """

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables = tuple(tables)
        self.block_sizes = tuple(table.block_size for table in tables)
        self.device_tables = tuple(table.device_table for table in tables)
        self.share = tables[0].share if tables else WHOLE_CONTEXT
        self.states = next((table for table in tables if isinstance(table, StateTable)), None)
        self.max_copies = len(tables) + (0 if self.states is None else self.states.max_blocks)

    def append_rows(self, group: int, rows: IntArray, block_ids: IntArray) -> None:
        """Append blocks to rows of one group. Raises PlanMismatch if there is no such group."""
        if not 0 <= group < len(self.tables):
            raise PlanMismatch(
                f"a plan appends blocks to KV cache group {group}; there are {len(self.tables)}"
            )
        self.tables[group].append_rows(rows, block_ids)

    def append_row(self, row: int, block_ids: Sequence[IntArray]) -> None:
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.append_row(row, ids)

    def add_row(self, row: int, block_ids: Sequence[IntArray]) -> None:
        if len(block_ids) != len(self.tables):
            raise PlanMismatch(
                f"row {row} has blocks for {len(block_ids)} KV cache groups; there are "
                f"{len(self.tables)}"
            )
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.add_row(row, ids)

    def move_row(self, source: int, destination: int) -> None:
        for table in self.tables:
            table.move_row(source, destination)

    def swap_row(self, one: int, other: int) -> None:
        for table in self.tables:
            table.swap_row(one, other)

    def truncate_row(self, row: int, num_tokens: int) -> None:
        for table in self.tables:
            table.truncate_row(row, num_tokens)

    def allocated(self, row: int) -> list[npt.NDArray[np.int32]]:
        """The row's allocated block ids, per group."""
        return [table.allocated(row) for table in self.tables]

    def capacity(self) -> npt.NDArray[np.int64]:
        """(max_num_seqs,) tokens for which each row has blocks in every group."""
        return np.minimum.reduce([table.capacity() for table in self.tables])

    def slots(
        self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> list[npt.NDArray[np.int64]]:
        """The slot of each token, per group; -1 if another rank stores it."""
        places = {size: np.divmod(positions, size) for size in set(self.block_sizes)}
        return [table.step_slots(rows, places[table.block_size]) for table in self.tables]

    def commit(self) -> list[TableUpload]:
        """The uploads of the groups that changed."""
        return [upload for table in self.tables if (upload := table.commit()) is not None]
