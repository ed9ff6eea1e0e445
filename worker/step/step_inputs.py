"""The inputs of one step, packed on the host so that two copies move them to the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, int32_array
from longshore.protocol.outputs import TokenLogprobs
from longshore.worker.kernels.copy_arrays import copy_arrays
from longshore.worker.kernels.draw_tokens import FRACTION_BITS
from longshore.worker.sampling.columns import SamplingColumns
from longshore.worker.sampling.extras import SamplingExtras, make_extras
from longshore.worker.sampling.sampler import MAX_TEMPERATURE, MIN_TEMPERATURE, Draws
from longshore.worker.sampling.uniform import uniform
from longshore.worker.step.network_drafts import NetworkStep
from longshore.worker.step.planned_drafts import PlannedDrafts
from longshore.worker.step.staging import StagingRing, StagingSet
from longshore.worker.step.step_batch import Int64s
from longshore.worker.step.step_task import StepTask

ALIGNMENT_BYTES: Final = 16
"""Triton compiles a kernel again for the first address that is no multiple of it, while requests
wait."""


class Packer:
    """Concatenates arrays of one element type in a host buffer. Each begins at a multiple of
    ALIGNMENT_BYTES from the start."""

    def __init__(self, buffer: npt.NDArray[np.generic]) -> None:
        self._buffer = buffer
        self._alignment = ALIGNMENT_BYTES // buffer.itemsize
        self.num_used = 0

    def put(
        self, values: npt.NDArray[np.generic], *, padded_to: int | None = None, padding: int = 0
    ) -> slice:
        """Append `values`, and `padding` up to `padded_to` values; returns their slice of the
        buffer and of its copy on the device."""
        first = self.num_used + -self.num_used % self._alignment
        end = first + len(values)
        self.num_used = end if padded_to is None else first + padded_to
        self._buffer[first:end] = values
        self._buffer[end : self.num_used] = padding
        return slice(first, self.num_used)


@dataclass(frozen=True)
class DrawSlices:
    """Slices of the packed columns of `Draws`, in the integers or in the float32s.

    num_whole: see `sample`.
    """

    rows: slice
    top_k: slice
    top_p: slice
    u: slice
    temperature: slice
    min_p: slice
    has_min_p: bool
    num_whole: int

    def on_device(self, ints: Tensor, reals: Tensor) -> Draws:
        return Draws(
            rows=ints[self.rows],
            top_k=ints[self.top_k],
            top_p=ints[self.top_p],
            u=ints[self.u],
            temperature=reals[self.temperature],
            min_p=reals[self.min_p],
            has_min_p=self.has_min_p,
        )


@dataclass(frozen=True)
class StepResult:
    """The results of a step on the host, copied out of the staging set.

    sampled:  (n,) ids, by ascending row.
    num_sampled: number of ids of each sampling row; empty if each has one.
    nan_rows, num_nans: sampled rows with non-finite logits, and the number of these logits.
    """

    sampled: Int32Array
    num_sampled: Int32Array
    nan_rows: Int32Array
    num_nans: Int32Array
    logprobs: TokenLogprobs | None


@dataclass
class StepOutcome:
    """Set on the compute queue.

    is_out_of_memory: the step was not computed.
    drafting_s: the time in which a drafter with weights has made drafts.
    """

    is_out_of_memory: bool = False
    drafting_s: float = 0.0


@dataclass(frozen=True)
class StepInputs:
    """One step's inputs in a staging set, and the slice of each of them.

    num_tokens:   tokens of the step, without padding.
    token_index:  flat indices into the token table of the ids to embed.
    positions:    position of each token.
    slots:        slot of each token, per group; -1 if another rank stores it.
    kept_tokens:  indices in the step of the tokens that this rank stores, with context parallelism.
    decode_rows, decode_lens: see AttentionMetadata.
    cross_rows, cross_lens: the same for cross attention, one entry per token.
    shared_tokens: leading tokens that the decodes have in common, of each group.
    last_tokens:  indices in the step of the tokens that are sampled from, by ascending row.
    destinations: flat indices into the token table where the sampled ids go.
    copied_blocks: source block ids, then target block ids, then the number of tokens to copy of
                   each; each of the three group by group.
    cleared_blocks: ids of blocks to zero after the copies and before any KV is written.
    kept_pages:   pages of states that the step's single tokens leave, then the blocks to which they
                  are copied after the step.
    sampled_rows: (num_sampled,) on the host.
    drafts: those that the step verifies.
    network: what a drafter with weights reads; None: there is none.
    extras: None if no row needs more than a token.
    device_ints: where the integers are copied to, so that graphs find them; None: to new memory.
    num_padded: of a decode step that replays a graph: its rows. What the graph reads is then padded
                to it, so that it is at the same place in every step of as many rows.
    """

    staging: StagingSet
    device_ints: Tensor | None
    num_padded: int | None
    num_tokens: int
    num_ints: int
    num_reals: int
    token_index: slice
    positions: slice
    slots: tuple[slice, ...]
    kept_tokens: slice
    decode_rows: slice
    decode_lens: slice
    cross_rows: slice
    cross_lens: slice
    shared_tokens: slice
    last_tokens: slice
    destinations: slice
    copied_blocks: slice
    cleared_blocks: slice
    kept_pages: slice
    draws: DrawSlices | None
    sampled_rows: Int64s
    drafts: PlannedDrafts | None
    network: NetworkStep | None
    extras: SamplingExtras | None
    outcome: StepOutcome = field(default_factory=StepOutcome)

    def receive(self, sampled: Tensor, non_finite: Tensor) -> None:
        """Start copying the results, (num_sampled,) int32 each, to the host. On the compute
        queue."""
        num_sampled = len(self.sampled_rows)
        tensors = self.staging.tensors
        copy_arrays(
            tensors["sampled"][:num_sampled],
            sampled,
            tensors["non_finite"][:num_sampled],
            non_finite,
        )

    def result(self) -> StepResult:
        """Call it after the step is complete and before its staging set is reused."""
        num_samples = len(self.sampled_rows)
        sampled = np.array(self.staging.arrays["sampled"][:num_samples], np.int32)
        num_nans = np.array(self.staging.arrays["non_finite"][:num_samples], np.int32)
        rows, counts, is_valid = self.sampled_rows, EMPTY_INT32, None
        if self.drafts is not None:
            is_valid = self.drafts.valid_samples(sampled, rows)
            firsts = np.flatnonzero(np.diff(rows, prepend=-1))
            counts = np.add.reduceat(is_valid, firsts, dtype=np.int32)
            num_nans = np.add.reduceat(num_nans * is_valid, firsts, dtype=np.int32)
            sampled, rows = sampled[is_valid], rows[firsts]
        is_bad = num_nans != 0
        scored = None if self.extras is None else self.extras.scored
        return StepResult(
            sampled=int32_array(sampled),
            num_sampled=int32_array(counts),
            nan_rows=int32_array(rows[is_bad]),
            num_nans=int32_array(num_nans[is_bad]),
            logprobs=None if scored is None else scored.result(is_valid),
        )

    def to_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The integers and the float32s on the device. On the compute queue."""
        ints = self.staging.tensors["ints"][: self.num_ints]
        reals = self.staging.tensors["reals"][: self.num_reals]
        device_reals = torch.empty(self.num_reals, dtype=reals.dtype, device=device)
        if self.device_ints is None:
            device_ints = torch.empty(self.num_ints, dtype=ints.dtype, device=device)
        else:
            device_ints = self.device_ints[: self.num_ints]
        copy_arrays(device_ints, ints, device_reals, reals)
        return device_ints, device_reals


class StepInputsBuilder:
    """Packs the inputs of steps into a ring of staging sets.

    max_samples: tokens that a step samples at most.
    token_width: token ids per row of the token table.
    num_state_pages: blocks of a row's state.
    num_begun_blocks: blocks of a group that a row begins at most in a step without filling them.
    staged:      host memory of further results in each set: shape and dtype, by name.
    device:      keeps the integers of every step at one address, for graphs; None: it need not.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_samples: int,
        max_num_batched_tokens: int,
        token_width: int,
        num_blocks: int,
        num_groups: int,
        num_state_pages: int,
        num_begun_blocks: int = 1,
        vocab_size: int,
        pin_memory: bool,
        staged: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._pin_memory = pin_memory
        self._token_width = token_width
        # Per token: index, position, kept token, cross row and length, slots. Per sample: decode
        # row and length, last token, destination, four integers of the draw. Per row: the cleared
        # blocks of each group, and a copied block with its target and number of tokens; a state is
        # copied whole, before the step, and to where it is kept, after it. In addition a plan may
        # clear every block. Each array may begin one integer later than the one before it ends.
        num_ints = (5 + num_groups) * max_num_batched_tokens + 8 * max_samples + num_blocks
        num_ints += (
            (3 + num_begun_blocks) * num_groups + 5 * num_state_pages
        ) * max_num_seqs + num_groups
        num_ints += 16 + num_groups
        self._ring = StagingRing(
            {
                "ints": ((num_ints,), torch.int64),
                "reals": ((2 * max_samples + 3,), torch.float32),
                "sampled": ((max_samples,), torch.int32),
                "non_finite": ((max_samples,), torch.int32),
                **(staged or {}),
            },
            pin_memory=pin_memory,
        )
        self._device_ints: Tensor | None = None
        if device is not None:
            self._device_ints = torch.zeros(num_ints, dtype=torch.int64, device=device)

    def build(
        self,
        task: StepTask,
        *,
        slots: Sequence[Int64s],
        kept_tokens: Int64s,
        cross_lens: Int64s,
        shared_tokens: Int64s,
        cleared_blocks: Int64s,
        kept_pages: Int64s,
        num_padded: int | None = None,
        network: NetworkStep | None = None,
    ) -> StepInputs:
        """slots: per group. The others: see StepInputs.

        The caller must guard the inputs' staging set with the operation that reads it.
        """
        batch, sampling = task.batch, task.sampling
        sampled_rows, sampled_positions = task.sampled_rows, task.sampled_positions
        staging = self._ring.acquire()
        ints, reals = Packer(staging.arrays["ints"]), Packer(staging.arrays["reals"])
        positions = batch.positions()
        put = partial(ints.put, padded_to=num_padded)  # of what graphs read
        token_index = batch.token_rows() * self._token_width + positions
        return StepInputs(
            staging=staging,
            device_ints=self._device_ints,
            num_padded=num_padded,
            num_tokens=len(positions),
            token_index=put(token_index),
            positions=put(positions),
            slots=tuple(put(of_group, padding=-1) for of_group in slots),
            decode_rows=put(batch.rows[: batch.num_decodes]),
            decode_lens=put(batch.ends[: batch.num_decodes]),
            shared_tokens=ints.put(shared_tokens),
            last_tokens=put(batch.tokens_before(sampled_rows, sampled_positions)),
            kept_tokens=ints.put(kept_tokens),
            cross_rows=ints.put(batch.token_rows()[: len(cross_lens)]),
            cross_lens=ints.put(cross_lens),
            destinations=ints.put(sampled_rows * self._token_width + sampled_positions),
            copied_blocks=ints.put(task.copies.blocks),
            cleared_blocks=ints.put(cleared_blocks),
            kept_pages=ints.put(kept_pages),
            draws=_pack_draws(sampling, sampled_rows, sampled_positions, ints, reals),
            sampled_rows=sampled_rows,
            drafts=task.drafts,
            network=network,
            extras=make_extras(
                sampling,
                batch,
                sampled_rows=sampled_rows,
                sampled_positions=sampled_positions,
                token_width=self._token_width,
                vocab_size=self._vocab_size,
                pin_memory=self._pin_memory,
            ),
            num_ints=ints.num_used,
            num_reals=reals.num_used,
        )


def _pack_draws(
    columns: SamplingColumns, rows: Int64s, positions: Int64s, ints: Packer, reals: Packer
) -> DrawSlices | None:
    """The sampling rows that draw at random, and their settings. None if there are none."""
    is_drawn = columns.temperature[rows] > 0
    if not is_drawn.any():
        return None
    is_cut = (columns.top_k[rows] > 0) | (columns.top_p[rows] < 1)
    whole, cut = np.flatnonzero(is_drawn & ~is_cut), np.flatnonzero(is_drawn & is_cut)
    samples = np.concatenate((whole, cut))
    rows, positions = rows[samples], positions[samples]
    u = uniform(columns.seed[rows], positions - columns.num_prompt[rows])
    min_p = columns.min_p[rows]
    return DrawSlices(
        rows=ints.put(samples),
        top_k=ints.put(columns.top_k[rows]),
        top_p=ints.put(_as_integers(columns.top_p[rows])),
        u=ints.put(_as_integers(u)),
        temperature=reals.put(columns.temperature[rows].clip(MIN_TEMPERATURE, MAX_TEMPERATURE)),
        min_p=reals.put(min_p),
        has_min_p=bool(min_p.any()),
        num_whole=len(whole),
    )


def _as_integers(fractions: npt.NDArray[np.float64]) -> Int64s:
    """Multiples of 2**-FRACTION_BITS; exact from 2**-10 on."""
    return (fractions * 2.0**FRACTION_BITS).astype(np.int64)
