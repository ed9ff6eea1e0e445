"""Checks that a worker's output fits the plan that it answers. Changes nothing."""

from dataclasses import dataclass

import numpy as np

from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.scheduler.features.logprobs import lengths_agree
from longshore.scheduler.step.in_flight import PlannedStep, StepsInFlight
from longshore.scheduler.step.running import RunningTable


class InvalidOutput(LongshoreError):
    """A worker's output does not fit its plan; the epoch cannot continue."""


@dataclass(frozen=True, slots=True)
class OutputValidator:
    """Checks outputs against the plan that is due."""

    running: RunningTable
    in_flight: StepsInFlight
    vocab_size: int

    def plan_of(self, output: ModelRunnerOutput) -> PlannedStep:
        """The plan that `output` answers. Raises InvalidOutput if it does not fit the plan."""
        planned = self.in_flight.steps[0] if self.in_flight.steps else None
        if planned is None or planned.step != output.step:
            expected = "none" if planned is None else f"step {planned.step}"
            raise InvalidOutput(f"a worker answered step {output.step}, but {expected} was due")
        text = self._flaw(planned, output)
        if text is not None:
            raise InvalidOutput(f"step {output.step}: {text}")
        return planned

    def check_drafts(self, rows: Int32Array, token_ids: Int32Array) -> None:
        """Raise InvalidOutput if these are not drafts: a token id of the vocabulary per row."""
        text = self._bad_drafts(rows, token_ids)
        if text is not None:
            raise InvalidOutput(text)

    def _bad_drafts(self, rows: Int32Array, token_ids: Int32Array) -> str | None:
        if len(token_ids) == len(rows) and not self._is_outside(token_ids):
            return None
        return f"drafts must be token ids in 0..{self.vocab_size - 1}, one per draft row"

    def _flaw(self, planned: PlannedStep, output: ModelRunnerOutput) -> str | None:
        if output.is_out_of_memory:
            return None  # it has no results
        tokens, counts = output.sampled_tokens, output.num_sampled
        num_rows = len(planned.sampling.rows)
        num_tokens = num_rows
        if len(counts):
            limits = 1 if planned.num_drafts is None else planned.num_drafts + 1
            if len(counts) != num_rows or ((counts < 1) | (counts > limits)).any():
                return (
                    f"num_sampled does not fit: each of {num_rows} rows samples one token and one "
                    "more per accepted draft"
                )
            num_tokens = int(counts.sum())
        if len(tokens) != num_tokens:
            return f"{num_rows} rows sample {num_tokens} tokens, but the output has {len(tokens)}"
        if self._is_outside(tokens):
            return f"a sampled token id is outside 0..{self.vocab_size - 1}"
        text = self._bad_drafts(output.draft_rows, output.draft_tokens)
        if text is not None:
            return text
        if len(output.nan_rows) or len(output.num_nans):
            if not np.isin(output.nan_rows, planned.sampling.rows).all():
                return "a row that does not sample has logits that are not finite"
            if len(output.num_nans) != len(output.nan_rows) or (output.num_nans < 1).any():
                return "num_nans must be at least 1 for each row whose logits are not finite"
        if len(output.pooled) != len(output.pooled_rows):
            return "the numbers of vectors and of their rows differ"
        if not planned.sampling.is_plain:
            row = self._unpooled_row(planned, output)
            if row is not None:
                return f"the vector of row {row} is missing"
        return None if output.logprobs is None else self._bad_logprobs(planned, output)

    def _is_outside(self, token_ids: Int32Array) -> bool:
        """Whether an id is outside the vocabulary. Read as unsigned, negative ids are largest."""
        if not len(token_ids):
            return False
        unsigned = token_ids.view(np.uint32)
        return bool(unsigned[unsigned.argmax()] >= self.vocab_size)  # cheaper than max()

    def _unpooled_row(self, planned: PlannedStep, output: ModelRunnerOutput) -> int | None:
        """A row of a pooling request that expects a vector and has none, if there is one."""
        answered = {*output.pooled_rows.tolist(), *output.nan_rows.tolist()}
        for row, generation in zip(
            planned.sampling.rows.tolist(), planned.sampling.generations.tolist(), strict=True
        ):
            if row in answered:
                continue
            request = self.in_flight.occupant(row, generation).request
            if request.options.pooling is not None and not request.is_finished:
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
            return f"a log probability has a token id outside 0..{self.vocab_size - 1}"
        flaw: str | None = "of rows that requested none"
        if scored is not None:
            num_sampled = np.zeros(self.running.max_num_seqs, np.int64)
            num_sampled[planned.sampling.rows] = (
                output.num_sampled if len(output.num_sampled) else 1
            )
            current = scored.current(self.running, self.in_flight.occupant, planned.step)
            flaw = scored.flaw(entries, num_sampled, *current)
        return None if flaw is None else f"it has log probabilities {flaw}"
