"""Whether a worker's output fits the plan that it answers. Reads only."""

from dataclasses import dataclass

import numpy as np

from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.scheduler.features.logprobs import lengths_agree
from longshore.scheduler.step.in_flight import PlannedStep, StepsInFlight
from longshore.scheduler.step.running import RunningTable


class InvalidOutput(LongshoreError):
    """A worker's output fits no plan that it was sent; the epoch cannot continue."""


@dataclass(frozen=True, slots=True)
class OutputValidator:
    """What an output must be, for the plan that is due. `plan_of` raises InvalidOutput else."""

    running: RunningTable
    in_flight: StepsInFlight
    vocab_size: int

    def plan_of(self, output: ModelRunnerOutput) -> PlannedStep:
        """The plan that `output` answers."""
        planned = self.in_flight.oldest()
        if planned is None or planned.step != output.step:
            expected = "none" if planned is None else f"step {planned.step}"
            raise InvalidOutput(f"a worker answered step {output.step}; {expected} was due")
        text = self._flaw(planned, output)
        if text is not None:
            raise InvalidOutput(f"step {output.step}: {text}")
        return planned

    def _flaw(self, planned: PlannedStep, output: ModelRunnerOutput) -> str | None:
        tokens, counts = output.sampled_tokens, output.num_sampled
        num_rows = len(planned.sampling.rows)
        num_tokens = num_rows
        if len(counts):
            limits = 1 if planned.num_drafts is None else planned.num_drafts + 1
            if len(counts) != num_rows or ((counts < 1) | (counts > limits)).any():
                return (
                    f"{num_rows} rows sample one token each and one more per accepted draft; "
                    "num_sampled says otherwise"
                )
            num_tokens = int(counts.sum())
        if len(tokens) != num_tokens:
            return f"{num_rows} rows sample {num_tokens} tokens, {len(tokens)} tokens came"
        if self._is_outside(tokens):
            return f"a token id outside 0..{self.vocab_size - 1} was sampled"
        drafts = output.draft_tokens
        if len(drafts) != len(output.draft_rows) or self._is_outside(drafts):
            return f"drafts are token ids of 0..{self.vocab_size - 1}, one per draft row"
        if len(output.nan_rows) or len(output.num_nans):
            if not np.isin(output.nan_rows, planned.rows).all():
                return "a row that sampled nothing is not finite"
            if len(output.num_nans) != len(output.nan_rows) or (output.num_nans < 1).any():
                return "each row that is not finite has a number of such logits, of at least 1"
        if len(output.pooled) != len(output.pooled_rows):
            return "vectors and rows of them differ in number"
        if not planned.sampling.is_plain:
            row = self._unpooled_row(planned, output)
            if row is not None:
                return f"no vector came for row {row}"
        return None if output.logprobs is None else self._bad_logprobs(planned, output)

    def _is_outside(self, token_ids: Int32Array) -> bool:
        """Some id is not of the vocabulary; negative ones are the largest when read unsigned."""
        if not len(token_ids):
            return False
        unsigned = token_ids.view(np.uint32)
        return bool(unsigned[unsigned.argmax()] >= self.vocab_size)  # cheaper than max()

    def _unpooled_row(self, planned: PlannedStep, output: ModelRunnerOutput) -> int | None:
        """A pooling request of the plan that still expects its vector and has none."""
        answered = {*output.pooled_rows.tolist(), *output.nan_rows.tolist()}
        for row, generation in zip(
            planned.rows.tolist(), planned.generations.tolist(), strict=True
        ):
            if row in answered:
                continue
            request = self.in_flight.occupant(row, generation).request
            if request.pooling is not None and not request.is_finished:
                return int(row)
        return None

    def _bad_logprobs(self, planned: PlannedStep, output: ModelRunnerOutput) -> str | None:
        entries, scored = output.logprobs, planned.scored
        assert entries is not None
        if not lengths_agree(entries):
            return "the columns of its log probabilities differ in length"
        if not len(entries.owners):
            return None
        if self._is_outside(entries.token_ids):
            return f"a log probability is of a token id outside 0..{self.vocab_size - 1}"
        flaw: str | None = "of rows that requested none"
        if scored is not None:
            num_sampled = np.zeros(self.running.max_num_seqs, np.int64)
            num_sampled[planned.rows] = output.num_sampled if len(output.num_sampled) else 1
            current = scored.current(self.running, self.in_flight.occupant, planned.step)
            flaw = scored.flaw(entries, num_sampled, *current)
        return None if flaw is None else f"it has log probabilities {flaw}"
