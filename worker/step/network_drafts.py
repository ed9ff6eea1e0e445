"""The part of a drafter with weights in each step.

After the model's layers, the drafter computes the same tokens, so that its KV is in their slots too
(`follow`). After the sampling it computes the token that was sampled last, which gives the first
draft of the next step, and from each draft the one after it (`propose`). The KV of these lies in
slots after the row's tokens, which later steps write again.

How many drafts were right is only known on the device, and so are the positions of the next ones.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longshore.protocol.arrays import Int64Array
from longshore.worker.attention.backend import LayerHooks
from longshore.worker.attention.grouped import GroupedAttention
from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.attention.segments import decode_segments, length_classes
from longshore.worker.drafting.network import DraftNetwork
from longshore.worker.kv_cache.block_table import BlockTable
from longshore.worker.step.step_batch import StepBatch
from longshore.worker.step.step_task import StepTask

STAGED: Final = "drafts"
"""Name of the host memory of a step's drafts in its staging set."""


@dataclass(frozen=True)
class NetworkStep:
    """What a step's drafter reads, in one array of integers on the host (pinned for CUDA).

    rows:       (n,) rows that get drafts, in the order of the drafts in the staging set.
    num_drafts: of each; 0: none are made.
    sizes:      of the parts of `ints`: see `DraftParts`.
    longest:    (n,) most tokens that a row has after the step, drafts not included.
    """

    rows: Int64Array
    num_drafts: int
    longest: Int64Array
    ints: Tensor
    sizes: Sequence[int]


@dataclass(frozen=True)
class DraftParts:
    """The integers of a step on the device.

    predecessors: (num_tokens,) index in the step of the token before each of its tokens.
    firsts, first_places: (m,) tokens whose predecessor is of an earlier step, and its place in the
                  ring.
    lasts, last_places: (w,) tokens whose hidden states later steps may need, and their places.
    rows, positions: (n,) rows that get drafts; position of the first token that each sampled.
    limits:       (n,) positions for which each has slots.
    samples:      (n * (k + 1),) indices of the sampled tokens of each row; its last one, repeated.
    drafts:       (n * k,) drafts that the step verifies; -1 where there is none.
    """

    predecessors: Tensor
    firsts: Tensor
    first_places: Tensor
    lasts: Tensor
    last_places: Tensor
    rows: Tensor
    positions: Tensor
    limits: Tensor
    samples: Tensor
    drafts: Tensor


class NetworkDrafts:
    """The drafter of one rank, with the hidden states that the next step needs.

    num_drafts: the most of a row in a step.
    """

    def __init__(
        self,
        network: DraftNetwork,
        attention: GroupedAttention,
        tables: Sequence[BlockTable],
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_drafts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """attention: of the drafter's layers. tables: of all groups."""
        self._network, self._attention, self._tables = network, attention, tables
        self._max_num_seqs, self._max_model_len = max_num_seqs, max_model_len
        self.num_drafts = num_drafts
        self._pin_memory = device.type == "cuda"
        # Of each row, the hidden states of the last tokens of a step by their position: which of
        # them comes before the next step's first token depends on how many drafts were right. The
        # last line is zeros, before the first token of all.
        self._ring_size = num_drafts + 1
        self._ring: Tensor | None = None
        if network.reads_hidden:
            shape = max_num_seqs * self._ring_size + 1, network.hidden_size
            self._ring = torch.zeros(shape, dtype=dtype, device=device)
        self._num_kept = np.zeros(max_num_seqs, np.int64)
        self.staged = {STAGED: ((max_num_seqs, num_drafts), torch.int32)}

    # On the host, in the order of the plans

    def forget(self, rows: Sequence[int]) -> None:
        """What was kept of these rows is not of the tokens that they have now."""
        self._num_kept[list(rows)] = 0

    def primers(self, rows: Int64Array, starts: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The tokens to compute once more, because the hidden states before a step's first tokens
        are not there: after a prefix hit, a pull, a preemption. Returns rows and positions. rows,
        starts: (n,) of the step."""
        if self._ring is None:
            return rows[:0], starts[:0]
        chosen = (starts > 0) & (self._num_kept[rows] == 0)
        primed, first = np.unique(rows[chosen], return_index=True)
        return primed, starts[chosen][first] - 1

    def plan(self, task: StepTask, num_padded: int | None = None) -> NetworkStep:
        """num_padded: see StepInputs."""
        batch, sampled_rows = task.batch, task.sampled_rows
        sampled_positions, drafts = task.sampled_positions, task.drafts
        ring_parts = self._ring_parts(batch, num_padded)
        rows, firsts, counts = np.unique(sampled_rows, return_index=True, return_counts=True)
        longest = sampled_positions[firsts] + counts
        # Decodes of similar length make one segment.
        order = np.argsort(length_classes(longest), kind="stable")
        rows, firsts, counts, longest = (x[order] for x in (rows, firsts, counts, longest))
        offsets = np.arange(self.num_drafts + 1)
        samples = firsts[:, np.newaxis] + np.minimum(offsets, counts[:, np.newaxis] - 1)
        verified = np.full((len(rows), self.num_drafts), -1, np.int64)
        if drafts is not None:
            line_of = np.empty(self._max_num_seqs, np.int64)
            line_of[rows] = np.arange(len(rows))
            starts = np.searchsorted(drafts.rows, drafts.rows)
            places = np.arange(len(drafts.rows)) - starts
            verified[line_of[drafts.rows], places] = drafts.token_ids
        limits = np.minimum.reduce([table.capacity()[rows] for table in self._tables])
        limits = np.minimum(limits, self._max_model_len)
        positions = sampled_positions[firsts]
        parts = (*ring_parts, rows, positions, limits, samples.ravel(), verified.ravel())
        ints = torch.from_numpy(np.concatenate(parts, dtype=np.int64))
        if self._pin_memory:
            ints = ints.pin_memory()
        return NetworkStep(rows, task.num_drafts, longest, ints, [len(part) for part in parts])

    def _ring_parts(self, batch: StepBatch, num_padded: int | None) -> list[Int64Array]:
        if self._ring is None:
            return [np.empty(0, np.int64)] * 5
        rows, positions = batch.token_rows(), batch.positions()
        width = self._max_model_len + 1
        keys = rows * width + positions
        order = np.argsort(keys, kind="stable")
        found = np.minimum(keys[order].searchsorted(keys - 1), len(keys) - 1)
        predecessors = order[found]
        is_first = (keys[predecessors] != keys - 1) | (positions == 0)
        firsts = np.flatnonzero(is_first)
        first_places = np.where(
            positions[firsts] > 0,
            self._places(rows[firsts], positions[firsts] - 1),
            self._max_num_seqs * self._ring_size,
        )
        ends = np.zeros(self._max_num_seqs, np.int64)
        np.maximum.at(ends, batch.rows, batch.ends)
        self._num_kept[batch.rows] = ends[batch.rows]
        lasts = np.flatnonzero(positions >= ends[rows] - self._ring_size)
        last_places = self._places(rows[lasts], positions[lasts])
        padded = np.zeros(max(len(keys), num_padded or 0), np.int64)
        padded[: len(keys)] = predecessors
        return [padded, firsts, first_places, lasts, last_places]

    def begun_blocks(self, step: NetworkStep, table: BlockTable) -> Int64Array:
        """(n,) ids of blocks that begin after the tokens of the step, and in which it may write
        drafts' KV; see `blocks_to_clear`."""
        size = table.block_size
        first = -(-(step.longest - 1) // size)
        last = np.minimum(
            (step.longest + step.num_drafts - 2) // size, table.num_blocks[step.rows] - 1
        )
        counts = np.maximum(last - first + 1, 0) if step.num_drafts else np.zeros_like(first)
        rows = np.repeat(step.rows, counts)
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        found: Int64Array = table.host[rows, np.repeat(first, counts) + offsets].astype(np.int64)
        return found

    def _places(self, rows: Int64Array, positions: Int64Array) -> Int64Array:
        places: Int64Array = rows * self._ring_size + positions % self._ring_size
        return places

    # On the compute queue

    def parts(self, step: NetworkStep, device: torch.device) -> DraftParts:
        ints = step.ints.to(device, non_blocking=True)
        return DraftParts(*torch.split(ints, list(step.sizes)))

    def follow(
        self,
        parts: DraftParts,
        token_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        metadata: Sequence[AttentionMetadata],
        hooks: LayerHooks | None,
    ) -> None:
        """Write the KV of the step's tokens. token_ids, positions, hidden: of each token; hidden is
        before the model's last norm. metadata: by group."""
        if self._ring is not None:
            hidden = self._network.states_of(hidden)
            previous = hidden.index_select(0, parts.predecessors)
            kept = self._ring.index_select(0, parts.first_places)
            previous.index_copy_(0, parts.firsts, kept)
            last = hidden.index_select(0, parts.lasts)
            self._ring.index_copy_(0, parts.last_places, last)
            hidden = previous
        attention = self._attention.begin_step(metadata, hooks)
        self._network.forward(token_ids, hidden, positions, attention)

    def propose(
        self, step: NetworkStep, parts: DraftParts, sampled: Tensor, staged: Tensor
    ) -> float:
        """Make the drafts of the next step, and start copying them to the host. Returns the seconds
        that the host took.

        sampled: (num_sampled,) int32. staged: of the staging set.
        """
        started = time.perf_counter()
        num_rows, num_drafts = len(step.rows), self.num_drafts
        if not num_rows or not step.num_drafts:
            return 0.0
        samples = sampled.index_select(0, parts.samples).view(num_rows, num_drafts + 1)
        is_right = samples[:, :-1] == parts.drafts.view(num_rows, num_drafts)
        num_right = is_right.long().cumprod(dim=1).sum(dim=1)
        token_ids = samples.gather(1, num_right[:, None]).squeeze(1)
        positions = parts.positions + num_right
        hidden = token_ids  # not read
        if self._ring is not None:
            places = parts.rows * self._ring_size + (positions - 1) % self._ring_size
            hidden = self._ring.index_select(0, places)
        drafts = sampled.new_empty((num_rows, step.num_drafts))
        for number in range(step.num_drafts):
            metadata = self._metadata(parts, positions, step.longest + number)
            hidden = self._network.forward(
                token_ids,
                hidden,
                positions.clamp(max=self._max_model_len - 1),
                self._attention.begin_step(metadata),
            )
            token_ids = self._network.next_tokens(hidden)
            drafts[:, number] = token_ids
            positions = positions + 1
        staged[:num_rows, : step.num_drafts].copy_(drafts, non_blocking=True)
        return time.perf_counter() - started

    def _metadata(
        self, parts: DraftParts, positions: Tensor, longest: npt.NDArray[np.int64]
    ) -> list[AttentionMetadata]:
        """Of a token of each row, in every group."""
        lens = (positions + 1).clamp(max=self._max_model_len)
        longest = np.minimum(longest, self._max_model_len)
        is_beyond = positions >= parts.limits
        metadata = []
        for table in self._tables:
            size = table.block_size
            columns = (lens - 1) // size
            blocks = table.device_table[parts.rows, columns].long()
            slots = torch.where(is_beyond, -1, blocks * size + (lens - 1) % size)
            segments = decode_segments(-(-longest // size), size)
            metadata.append(
                AttentionMetadata(slots, table.device_table, parts.rows, lens, segments, ())
            )
        return metadata

    def drafts(self, step: NetworkStep, staged: Tensor) -> dict[int, list[int]]:
        """The drafts of each row, when the step has ended. staged: of the staging set."""
        lines = staged[: len(step.rows), : step.num_drafts].tolist()
        return dict(zip(step.rows.tolist(), lines, strict=True))
