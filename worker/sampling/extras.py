"""What some rows of a step need in addition to a token: logit edits, penalties, log probabilities.

They are packed on the host and applied on the device. Steps without such rows have no extras, and
only rows that ask for them pay for them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longshore.worker.sampling.columns import (
    ASKS_EDITS,
    ASKS_LOGPROBS,
    ASKS_PENALTIES,
    ASKS_PROMPT_LOGPROBS,
    SamplingColumns,
)
from longshore.worker.sampling.logit_edits import (
    EditSlices,
    LogitEdits,
    pack_edits,
)
from longshore.worker.sampling.logprobs import (
    MAX_SCORED_ELEMENTS,
    ScoredTokens,
    score,
)
from longshore.worker.sampling.penalties import (
    Penalties,
    PenaltySlices,
    pack_penalties,
)
from longshore.worker.step.step_batch import Int64s, StepBatch
from longshore.worker.step.token_table import TokenTable
from longshore.worker.step.upload import PackedUpload, Upload


@dataclass(frozen=True)
class SamplingExtras:
    """The extras of one step, on the host. The slices are of `upload`.

    prompt_slices: scored prompt tokens: their indices in the step and in the token table. They are
                   the first entries of `scored`.
    samples:       indices of the sampling rows whose token is scored: the remaining entries.
    """

    upload: PackedUpload
    edits: EditSlices | None
    penalties: PenaltySlices | None
    prompt_slices: tuple[slice, slice] | None
    samples: slice | None
    scored: ScoredTokens | None

    def on_device(self, device: torch.device) -> "DeviceExtras":
        """Copy the same to the device: two copies, on the compute queue."""
        ints, reals = self.upload.to_device(device)
        prompt = None
        if self.prompt_slices is not None:
            sources, targets = self.prompt_slices
            prompt = (ints[sources], ints[targets])
        return DeviceExtras(
            edits=None if self.edits is None else self.edits.on_device(ints, reals),
            penalties=None if self.penalties is None else self.penalties.on_device(ints, reals),
            prompt=prompt,
            samples=None if self.samples is None else ints[self.samples],
            scored=self.scored,
        )


@dataclass(frozen=True)
class DeviceExtras:
    """The extras of one step, on the device. All calls are on the compute queue.

    prompt: of each scored prompt token, (n,) int64 each: the index in the step of the token before
            it, and its own flat index into the token table.
    """

    edits: LogitEdits | None
    penalties: Penalties | None
    prompt: tuple[Tensor, Tensor] | None
    samples: Tensor | None
    scored: ScoredTokens | None

    def score_prompt(
        self, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], tokens: TokenTable
    ) -> None:
        """Score the prompt tokens of the step. hidden: (num_tokens, hidden_size).

        Computed in pieces, because the logits of a chunk are far larger than its hidden states.
        """
        if self.prompt is None or self.scored is None:
            return
        sources, targets = self.prompt
        step = max(1, MAX_SCORED_ELEMENTS // self.scored.vocab_size)
        for start in range(0, len(sources), step):
            piece = slice(start, start + step)
            logits = logits_of(hidden.index_select(0, sources[piece]))
            token_ids = tokens.gather(targets[piece])
            self.scored.receive(start, score(logits, token_ids, self.scored.num_listed))

    def edit(self, logits: Tensor, tokens: TokenTable) -> Tensor | None:
        """Apply edits and penalties to logits, (num_sampled, vocab_size), in place. Returns a copy
        of the original rows that `score_sampled` needs."""
        raw = None if self.samples is None else logits.index_select(0, self.samples)
        if self.edits is not None:
            self.edits.apply(logits, tokens)
        if self.penalties is not None:
            self.penalties.apply(logits, tokens)
        if self.edits is not None:
            self.edits.force(logits, tokens)
        return raw

    def score_sampled(self, raw: Tensor | None, sampled: Tensor) -> None:
        """Score the sampled tokens, (num_sampled,) int32. raw: the result of `edit`."""
        if raw is None or self.samples is None or self.scored is None:
            return
        num_prompt = 0 if self.prompt is None else len(self.prompt[0])
        token_ids = sampled.index_select(0, self.samples)
        self.scored.receive(num_prompt, score(raw, token_ids, self.scored.num_listed))


def make_extras(
    columns: SamplingColumns,
    batch: StepBatch,
    *,
    sampled_rows: Int64s,
    sampled_positions: Int64s,
    token_width: int,
    vocab_size: int,
    pin_memory: bool,
) -> SamplingExtras | None:
    """Make the extras, or None if no row of the step needs any. sampled_rows, sampled_positions:
    see StepTask."""
    asked = columns.asks[batch.rows]
    if batch.primers is not None:
        asked = np.where(batch.primers, 0, asked)
    if not asked.any():
        return None
    packing = _Packing(columns, sampled_rows, sampled_positions, token_width, vocab_size)
    edits, penalties = packing.edits(), packing.penalties()
    prompt = _prompt_tokens(columns, batch, np.flatnonzero(asked & ASKS_PROMPT_LOGPROBS))
    samples = packing.asking_for(ASKS_LOGPROBS)
    scored = None
    if len(prompt.rows) or len(samples):
        scored = ScoredTokens(
            np.concatenate((prompt.rows, sampled_rows[samples])),
            np.concatenate((prompt.positions, sampled_positions[samples])),
            np.concatenate(
                (columns.prompt_logprobs[prompt.rows], columns.logprobs[sampled_rows[samples]])
            ),
            samples,
            vocab_size=vocab_size,
            pin_memory=pin_memory,
        )
    if edits is None and penalties is None and scored is None:
        return None
    return SamplingExtras(
        edits=edits,
        penalties=penalties,
        prompt_slices=packing.prompt(prompt) if len(prompt.rows) else None,
        samples=packing.upload.ints(samples) if len(samples) else None,
        scored=scored,
        upload=packing.upload.pack(pin_memory=pin_memory),  # last, after everything is added
    )


@dataclass(frozen=True)
class _PromptTokens:
    """Prompt tokens to score, (n,) each: row, position, and index in the step of the token before
    it."""

    rows: Int64s
    positions: Int64s
    sources: Int64s


def _prompt_tokens(columns: SamplingColumns, batch: StepBatch, chosen: Int64s) -> _PromptTokens:
    """The prompt tokens that the step's logits predict, of the sequences `chosen`: a chunk of
    positions [start, end) predicts positions start + 1 to end, up to the end of the prompt."""
    rows, starts = batch.rows[chosen], batch.starts[chosen]
    counts = np.minimum(batch.ends[chosen] + 1, columns.num_prompt[rows]) - (starts + 1)
    counts = np.maximum(counts, 0)
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return _PromptTokens(
        rows=np.repeat(rows, counts),
        positions=np.repeat(starts + 1, counts) + offsets,
        sources=np.repeat(batch.first_tokens[chosen], counts) + offsets,
    )


class _Packing:
    """Packs the extras of the sampling rows into one upload."""

    def __init__(
        self,
        columns: SamplingColumns,
        rows: Int64s,
        positions: Int64s,
        token_width: int,
        vocab_size: int,
    ) -> None:
        self.upload = Upload()
        self._columns = columns
        self._rows = rows
        self._positions = positions
        self._asks = columns.asks[rows]
        self._token_width = token_width
        self._vocab_size = vocab_size

    def asking_for(self, asks: int) -> Int64s:
        """Indices of the sampling rows that have the bit `asks`."""
        return np.flatnonzero(self._asks & asks)

    def edits(self) -> EditSlices | None:
        samples = self.asking_for(ASKS_EDITS)
        if not len(samples):
            return None
        rows, positions = self._rows[samples], self._positions[samples]
        return pack_edits(
            [edits for row in rows.tolist() if (edits := self._columns.edits[row]) is not None],
            samples=samples,
            num_outputs=positions - self._columns.num_prompt[rows],
            table_ends=rows * self._token_width + positions,
            table_rows=rows,
            token_width=self._token_width,
            vocab_size=self._vocab_size,
            upload=self.upload,
        )

    def penalties(self) -> PenaltySlices | None:
        samples = self.asking_for(ASKS_PENALTIES)
        if not len(samples):
            return None
        rows = self._rows[samples]
        return pack_penalties(
            samples=samples,
            rows=rows,
            num_prompt=self._columns.num_prompt[rows],
            num_tokens=self._positions[samples],
            repetition=self._columns.repetition_penalty[rows],
            presence=self._columns.presence_penalty[rows],
            frequency=self._columns.frequency_penalty[rows],
            upload=self.upload,
        )

    def prompt(self, tokens: _PromptTokens) -> tuple[slice, slice]:
        targets = tokens.rows * self._token_width + tokens.positions
        return self.upload.ints(tokens.sources), self.upload.ints(targets)
