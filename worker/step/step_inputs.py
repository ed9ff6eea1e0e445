"""The numbers of one step, packed on the host: two copies bring all of them to the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.outputs import TokenLogprobs
from longshore.worker.sampling.columns import SamplingColumns
from longshore.worker.sampling.extras import SamplingExtras, make_extras
from longshore.worker.sampling.sampler import Draws
from longshore.worker.sampling.uniform import uniform
from longshore.worker.step.staging import StagingRing, StagingSet
from longshore.worker.step.step_batch import Int64s, StepBatch


class Packer:
    """Puts arrays of one element type behind each other in a host buffer."""

    def __init__(self, buffer: npt.NDArray[np.generic]) -> None:
        self._buffer = buffer
        self.num_used = 0

    def put(self, values: npt.NDArray[np.generic]) -> slice:
        """Where `values` will be, in the buffer and in its copy on the device."""
        place = slice(self.num_used, self.num_used + len(values))
        self._buffer[place] = values
        self.num_used = place.stop
        return place


@dataclass(frozen=True)
class DrawPlaces:
    """Where the columns of one `Draws` were packed: integers, then float64s."""

    rows: slice
    top_k: slice
    temperature: slice
    top_p: slice
    u: slice
    min_p: slice | None

    def on_device(self, ints: Tensor, reals: Tensor) -> Draws:
        return Draws(
            rows=ints[self.rows],
            temperature=reals[self.temperature],
            top_k=ints[self.top_k],
            top_p=reals[self.top_p],
            u=reals[self.u],
            min_p=None if self.min_p is None else reals[self.min_p],
        )


@dataclass(frozen=True)
class StepAnswer:
    """What a step brought to the host, in memory of its own.

    sampled:  (num_sampled,) ids.
    nan_rows, num_nans: rows among them whose logits were not finite, and how many of them.
    """

    sampled: Int32Array
    nan_rows: Int32Array
    num_nans: Int32Array
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class StepInputs:
    """One step's numbers in a staging set, and where each of them is.

    token_index:  flat indices into the token table of the ids to embed.
    positions:    of each token.
    slots:        of each token, per group; -1 if another rank keeps it.
    kept_tokens:  indices, in the step, of the tokens that this rank keeps, if it shares them.
    decode_rows, decode_lens: see AttentionMetadata.
    cross_rows, cross_lens: the same for cross attention: of each token, if there is any.
    last_tokens:  indices, in the step, of the tokens that are sampled from; by ascending row.
    destinations: flat indices into the token table where the sampled ids go.
    copied_blocks: ids of blocks to copy from, then to copy to, then the tokens to copy of each,
                   each group by group.
    cleared_blocks: ids of blocks to zero behind that, before anything is written.
    sampled_rows: (num_sampled,) on the host.
    extras: None if no row asks for more than a token.
    """

    staging: StagingSet
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
    last_tokens: slice
    destinations: slice
    copied_blocks: slice
    cleared_blocks: slice
    whole_draws: DrawPlaces | None
    cut_draws: DrawPlaces | None
    sampled_rows: Int64s
    extras: SamplingExtras | None

    def receive(self, sampled: Tensor, non_finite: Tensor) -> None:
        """(num_sampled,) int32 each, on their way to the host. On the compute queue."""
        num_sampled = len(self.sampled_rows)
        tensors = self.staging.tensors
        tensors["sampled"][:num_sampled].copy_(sampled, non_blocking=True)
        tensors["non_finite"][:num_sampled].copy_(non_finite, non_blocking=True)

    def answer(self) -> StepAnswer:
        """To be called once the step is complete and before its staging set is used again."""
        num_sampled = len(self.sampled_rows)
        sampled = np.array(self.staging.arrays["sampled"][:num_sampled], np.int32)
        num_nans = np.array(self.staging.arrays["non_finite"][:num_sampled], np.int32)
        is_bad = num_nans != 0
        scored = None if self.extras is None else self.extras.scored
        return StepAnswer(
            sampled=int32_array(sampled),
            nan_rows=int32_array(self.sampled_rows[is_bad]),
            num_nans=int32_array(num_nans[is_bad]),
            logprobs=None if scored is None else scored.answer(),
        )

    def to_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Integers and float64s. On the compute queue; two copies."""
        ints = self.staging.tensors["ints"][: self.num_ints]
        reals = self.staging.tensors["reals"][: self.num_reals]
        return ints.to(device, non_blocking=True), reals.to(device, non_blocking=True)


class StepInputsBuilder:
    """Packs steps into a ring of staging sets.

    token_width: ids that one row of the token table holds.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        token_width: int,
        num_blocks: int,
        num_groups: int,
        vocab_size: int,
        pin_memory: bool,
    ) -> None:
        self._vocab_size = vocab_size
        self._pin_memory = pin_memory
        self._max_num_seqs = max_num_seqs
        self._token_width = token_width
        # Per token: index, position, its place among those kept, cross row and length, slots. Per
        # row: decode row and length, last token, destination, rows and top_k of the draws, and per
        # group a cleared block, and a copied one with target and number of tokens. A plan may clear
        # every block besides.
        num_ints = (5 + num_groups) * max_num_batched_tokens + num_blocks
        num_ints += (6 + 4 * num_groups) * max_num_seqs
        self._ring = StagingRing(
            {
                "ints": ((num_ints,), torch.int64),
                "reals": ((4 * max_num_seqs,), torch.float64),
                "sampled": ((max_num_seqs,), torch.int32),
                "non_finite": ((max_num_seqs,), torch.int32),
            },
            pin_memory=pin_memory,
        )

    def build(
        self,
        batch: StepBatch,
        *,
        slots: Sequence[Int64s],
        kept_tokens: Int64s,
        cross_lens: Int64s,
        sampled_rows: Int64s,
        sampled_positions: Int64s,
        copied_blocks: Int64s,
        cleared_blocks: Int64s,
        sampling: SamplingColumns,
    ) -> StepInputs:
        """slots: per group. kept_tokens, cross_lens, copied_blocks, cleared_blocks: see StepInputs.
        sampled_rows, sampled_positions: (n,) ascending rows, and the position each token takes.

        The caller must guard the inputs' staging set with the operation that reads it.
        """
        staging = self._ring.acquire()
        ints, reals = Packer(staging.arrays["ints"]), Packer(staging.arrays["reals"])
        positions = batch.positions()
        seq_of_row = np.empty(self._max_num_seqs, np.int64)
        seq_of_row[batch.rows] = np.arange(len(batch.rows))
        draws = _Drawn(sampling, sampled_rows, sampled_positions)
        return StepInputs(
            staging=staging,
            token_index=ints.put(batch.token_rows() * self._token_width + positions),
            positions=ints.put(positions),
            slots=tuple(ints.put(of_group) for of_group in slots),
            kept_tokens=ints.put(kept_tokens),
            decode_rows=ints.put(batch.rows[: batch.num_decodes]),
            decode_lens=ints.put(batch.ends[: batch.num_decodes]),
            cross_rows=ints.put(batch.token_rows()[: len(cross_lens)]),
            cross_lens=ints.put(cross_lens),
            last_tokens=ints.put(batch.last_tokens[seq_of_row[sampled_rows]]),
            destinations=ints.put(sampled_rows * self._token_width + sampled_positions),
            copied_blocks=ints.put(copied_blocks),
            cleared_blocks=ints.put(cleared_blocks),
            whole_draws=draws.pack(draws.is_drawn & ~draws.is_cut, ints, reals),
            cut_draws=draws.pack(draws.is_drawn & draws.is_cut, ints, reals),
            sampled_rows=sampled_rows,
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


class _Drawn:
    """Which sampling rows of a step are drawn, and with what."""

    def __init__(self, columns: SamplingColumns, rows: Int64s, positions: Int64s) -> None:
        self._temperature = columns.temperature[rows]
        self._top_k = columns.top_k[rows]
        self._top_p = columns.top_p[rows]
        self._min_p = columns.min_p[rows]
        self._seeds = columns.seed[rows]
        self._output_positions = positions - columns.num_prompt[rows]
        self.is_drawn = self._temperature > 0
        self.is_cut = (self._top_k > 0) | (self._top_p < 1)

    def pack(self, chosen: npt.NDArray[np.bool_], ints: Packer, reals: Packer) -> DrawPlaces | None:
        if not chosen.any():
            return None
        min_p = self._min_p[chosen]
        return DrawPlaces(
            rows=ints.put(np.flatnonzero(chosen)),
            top_k=ints.put(self._top_k[chosen]),
            temperature=reals.put(self._temperature[chosen]),
            top_p=reals.put(self._top_p[chosen]),
            u=reals.put(uniform(self._seeds[chosen], self._output_positions[chosen])),
            min_p=reals.put(min_p) if min_p.any() else None,
        )
