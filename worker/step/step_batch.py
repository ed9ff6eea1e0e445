"""The sequences of one step and their tokens, in the order in which the device computes them.

A row that verifies drafts is several sequences with one token each, every one longer by a token
than the one before it. So a draft is verified by the kernels of decodes, which sum in the same
order with drafts and without.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from longshore.protocol.plan import KeptState
from longshore.worker.attention.metadata import PrefillChunk
from longshore.worker.attention.segments import length_classes

Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepBatch:
    """Sequences with one new token come first, by length class, then the longer chunks.

    rows:   (num_seqs,) row of each sequence; of a row that verifies drafts, one per token.
    starts: (num_seqs,) tokens computed before the step.
    counts: (num_seqs,) tokens computed in the step, at least 1.
    num_decodes: number of sequences with one new token.
    has_drafts: some rows are several sequences.
    primers: (num_seqs,) sequences that compute a token once more, for its hidden state: nothing is
            written or sampled. None: there are none.
    """

    rows: Int64s
    starts: Int64s
    counts: Int64s
    num_decodes: int
    has_drafts: bool = False
    primers: npt.NDArray[np.bool_] | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token; there is at least one."""
        return self.num_decodes == len(self.rows) > 0

    @property
    def ends(self) -> Int64s:
        """(num_seqs,) tokens computed after the step."""
        return self.starts + self.counts

    @property
    def first_tokens(self) -> Int64s:
        """(num_seqs,) index of each sequence's first token in the step."""
        return np.cumsum(self.counts) - self.counts

    @property
    def last_tokens(self) -> Int64s:
        """(num_seqs,) index of each sequence's last token in the step."""
        return np.cumsum(self.counts) - 1

    def tokens_before(self, rows: Int64s, positions: Int64s) -> Int64s:
        """(n,) index in the step of the token before each of these positions of rows, (n,) each,
        which is the last one of a sequence."""
        if not self.has_drafts:
            seq_of_row = np.empty(int(self.rows.max(initial=0)) + 1, np.int64)
            seq_of_row[self.rows] = np.arange(len(self.rows))
            last: Int64s = self.last_tokens[seq_of_row[rows]]
            return last
        width = int(positions.max(initial=0)) + 1
        # Ends beyond all of these positions are of rows that do not sample.
        ends = self.rows * width + np.minimum(self.ends, width - 1)
        order = ends.argsort(kind="stable")
        found = ends[order].searchsorted(rows * width + positions)
        indices: Int64s = self.last_tokens[order[found]]
        return indices

    def with_primers(self, rows: Int64s, positions: Int64s, block_size: int) -> "StepBatch":
        """Compute one token more of these rows, before their tokens in the step."""
        if not len(rows):
            return self
        counts = np.append(np.ones_like(rows), self.counts)
        is_primer = np.arange(len(counts)) < len(rows)
        return _in_order(
            np.append(rows, self.rows),
            np.append(positions, self.starts),
            counts,
            block_size,
            has_drafts=True,
            primers=is_primer,
        )

    def token_rows(self) -> Int64s:
        """(num_tokens,) row of each token."""
        return np.repeat(self.rows, self.counts)

    def positions(self) -> Int64s:
        """(num_tokens,) position of each token in its sequence."""
        offsets = np.repeat(self.starts - self.first_tokens, self.counts)
        return np.arange(len(offsets)) + offsets

    def decode_blocks(self, block_size: int) -> Int64s:
        """(num_decodes,) blocks that each decode attends to."""
        return -(-self.ends[: self.num_decodes] // block_size)

    def shared_blocks(self, num_common: int, block_size: int) -> int:
        """How many of the `num_common` leading blocks of all rows every decode has filled."""
        shortest = int(self.ends[: self.num_decodes].min(initial=num_common * block_size))
        return min(num_common, shortest // block_size)

    def prefill_chunks(
        self, kept_states: Mapping[int, Sequence[KeptState]] | None = None
    ) -> list[PrefillChunk]:
        """kept_states: by row."""
        kept_states = kept_states or {}
        columns = (self.rows, self.first_tokens, self.counts, self.ends)
        lists = (column[self.num_decodes :].tolist() for column in columns)
        return [
            PrefillChunk(row, first_token, num_tokens, seq_len, kept_states.get(row, ()))
            for row, first_token, num_tokens, seq_len in zip(*lists, strict=True)
        ]


def decodes(count: int, num_rows: int, start: int = 0) -> StepBatch:
    """`count` single tokens: the one at `start` of each of `num_rows` rows, then their drafts."""
    sequences = np.arange(count)
    return StepBatch(
        sequences % num_rows,
        start + sequences // num_rows,
        np.ones_like(sequences),
        num_decodes=count,
        has_drafts=count > num_rows,
    )


def make_batch(
    num_scheduled: Int64s,
    num_computed: Int64s,
    block_size: int,
    num_drafts: Int64s | None = None,
) -> StepBatch:
    """num_scheduled, num_computed: (max_num_seqs,); num_computed is the count after the step.
    num_drafts: (max_num_seqs,) of the scheduled tokens, those that are drafts."""
    rows = np.flatnonzero(num_scheduled)
    counts = num_scheduled[rows]
    starts = num_computed[rows] - counts
    if num_drafts is not None:
        copies = np.where(num_drafts[rows] > 0, counts, 1)
        firsts = np.cumsum(copies) - copies
        offsets = np.arange(copies.sum()) - np.repeat(firsts, copies)
        rows, starts = np.repeat(rows, copies), np.repeat(starts, copies) + offsets
        counts = np.repeat(np.where(copies > 1, 1, counts), copies)
    return _in_order(rows, starts, counts, block_size, has_drafts=num_drafts is not None)


def _in_order(
    rows: Int64s,
    starts: Int64s,
    counts: Int64s,
    block_size: int,
    *,
    has_drafts: bool,
    primers: npt.NDArray[np.bool_] | None = None,
) -> StepBatch:
    is_decode = counts == 1
    classes = length_classes(-(-(starts + counts) // block_size))
    order = np.lexsort((np.where(is_decode, classes, 0), ~is_decode))
    return StepBatch(
        rows[order],
        starts[order],
        counts[order],
        int(is_decode.sum()),
        has_drafts,
        None if primers is None else primers[order],
    )


def blocks_to_clear(
    batch: StepBatch, block_table: npt.NDArray[np.int32], block_size: int
) -> Int64s:
    """(n,) ids of blocks that this step begins but does not fill.

    Attention reads the positions after the last token, and masks them. A NaN that an earlier owner
    left there would reach the result in spite of the mask, so the blocks are cleared.
    block_table: the host's copy.
    """
    ends = batch.ends
    columns = (ends - 1) // block_size
    begins = (columns * block_size >= batch.starts) & (ends % block_size != 0)
    if batch.primers is not None:
        begins &= ~batch.primers
    found: Int64s = block_table[batch.rows[begins], columns[begins]].astype(np.int64)
    return found
