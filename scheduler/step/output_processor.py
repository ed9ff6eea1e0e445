"""Applies a worker's output: each token goes to the request that it was sampled for, if it is still
valid for that request."""

from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

import numpy as np

from longshore.protocol.arrays import Float32Array, Int32Array, Int64Array
from longshore.protocol.outputs import FinishReason, ModelRunnerOutput
from longshore.scheduler.features.recovery import Recovery
from longshore.scheduler.features.repetition import is_repeating
from longshore.scheduler.hooks import Hooks
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.request import Outcome, Request
from longshore.scheduler.step.client_outputs import ClientOutputs
from longshore.scheduler.step.in_flight import PlannedStep, SamplingRows, StepsInFlight
from longshore.scheduler.step.output_validator import OutputValidator
from longshore.scheduler.step.running import RunningTable

_STOPPED: Final = Outcome(FinishReason.STOPPED, ends_output=True)
_LENGTH_CAPPED: Final = Outcome(FinishReason.LENGTH_CAPPED, ends_output=True)
_REPETITION: Final = Outcome(FinishReason.REPETITION, ends_output=True)


@dataclass(slots=True, kw_only=True)
class OutputProcessor:
    """Applies outputs in the order of the plans.

    num_stale_tokens: tokens dropped, because their request had ended or was rewound, or because
                      they are of another epoch.
    """

    running: RunningTable
    in_flight: StepsInFlight
    hooks: Hooks
    outputs: ClientOutputs
    lifecycle: Lifecycle
    recovery: Recovery
    validator: OutputValidator
    num_stale_tokens: int = 0
    # Requests that end with the output being applied, with the generation of its row.
    _ending: list[tuple[int, Request, Outcome]] = field(default_factory=list)

    def apply(self, output: ModelRunnerOutput, now: float) -> None:
        """Apply the output of the oldest unanswered plan; see `Scheduler.update_from_output`."""
        planned = self.validator.plan_of(output)
        for feature in self.hooks.received:
            feature.received(output, planned, now)
        self._apply(planned, output, now)
        for feature in self.hooks.answered:
            feature.answered(output, planned, now)

    def _apply(self, planned: PlannedStep, output: ModelRunnerOutput, now: float) -> None:
        if len(output.failed_block_ids):
            self.recovery.fail_loads(output.failed_block_ids, planned, now)
        if output.is_out_of_memory:
            self.recovery.fail_step(planned.step, now)
            self.in_flight.answered()
            return
        if len(output.nan_rows):
            self.recovery.fail_not_finite(output, planned, now)
        if output.logprobs is None:
            self._apply_sampled(planned, output)
        else:
            self._apply_scored(planned, output)
        self.in_flight.answered()  # first: what ends now is no past occupant
        if self._ending:
            ending, self._ending = self._ending, []
            ending.sort(key=itemgetter(0))  # blocks are freed in admission order
            self.lifecycle.end_all(list(map(itemgetter(1, 2), ending)), now)

    def _apply_scored(self, planned: PlannedStep, output: ModelRunnerOutput) -> None:
        """Tokens with log probabilities. The valid rows are determined before the tokens are
        applied, the number of output tokens afterwards; no row is emptied in between."""
        scored, entries = planned.scored, output.logprobs
        if scored is None or entries is None:
            self._apply_sampled(planned, output)
            return
        occupant = self.in_flight.occupant
        is_live, _ = scored.current(self.running, occupant, planned.step)
        self._apply_sampled(planned, output)
        _, num_tokens = scored.current(self.running, occupant, planned.step)
        scored.deliver(entries, is_live, num_tokens, self.outputs)

    def _apply_sampled(self, planned: PlannedStep, output: ModelRunnerOutput) -> None:
        sampling, tokens, num_sampled = planned.sampling, output.sampled_tokens, output.num_sampled
        has_one_each = planned.num_drafts is None and not len(num_sampled)
        if sampling.version == self.running.version and sampling.is_plain:
            if has_one_each:
                self._apply_tokens(sampling, tokens)
            else:
                self._apply_several(sampling, num_sampled, tokens, planned.num_drafts)
            return
        # Some tokens may not simply be the next one of the row's occupant.
        rows, generations = sampling.rows, sampling.generations
        is_current = self.running.generation[rows] == generations
        is_current &= self.running.void_through[rows] < planned.step
        is_plain = is_current & ~self.running.is_special[rows]
        if has_one_each and is_plain.all():
            self._apply_tokens(sampling, tokens)
            return
        counts = num_sampled if len(num_sampled) else np.ones(len(rows), np.int32)
        last = np.cumsum(counts)
        if np.count_nonzero(is_plain):
            plain = sampling.part(is_plain)
            if has_one_each:
                self._apply_tokens(plain, tokens[last[is_plain] - 1])
            else:
                drafts = planned.num_drafts
                self._apply_several(
                    plain,
                    counts[is_plain],
                    tokens[is_plain.repeat(counts)],
                    None if drafts is None else drafts[is_plain],
                )
        pooled = dict(zip(output.pooled_rows.tolist(), output.pooled, strict=True))
        for index in np.flatnonzero(~is_plain).tolist():
            ids = tokens[last[index] - counts[index] : last[index]].tolist()
            self._apply_one(planned, index, ids, pooled.get(int(rows[index])))

    def _apply_tokens(self, sampling: SamplingRows, tokens: Int32Array) -> None:
        """Apply one token per row; the rows still have the occupants of the plan."""
        running = self.running
        running.append_tokens(sampling.index, tokens)
        if sampling.client is None:
            self.outputs.add_tokens(sampling.clients, sampling.handles, tokens)
        else:
            self.outputs.add_client_tokens(sampling.client, sampling.handles, tokens)
        may_stop = sampling.has_stop_id(tokens)
        if may_stop or running.fewest_left <= 0:
            self._end(running.stopped(sampling.rows, tokens if may_stop else None))

    def _apply_several(
        self,
        sampling: SamplingRows,
        num_sampled: Int32Array,
        tokens: Int32Array,
        num_drafts: Int64Array | None,
    ) -> None:
        """Apply the tokens of rows that verified drafts; they still have the occupants of the
        plan. num_sampled, num_drafts: tokens and drafts of each."""
        running = self.running
        counts = np.ones(len(sampling.rows), np.int64)
        if len(num_sampled):
            counts = num_sampled.astype(np.int64)
        if num_drafts is not None:
            running.settle_drafts(sampling.rows, num_drafts, counts - 1)
        kept, ending = running.append_several(sampling.rows, counts, tokens)
        if len(ending):
            self.num_stale_tokens += int((counts - kept).sum())
            offsets = np.arange(len(tokens)) - (counts.cumsum() - counts).repeat(counts)
            tokens = tokens[offsets < kept.repeat(counts)]
        handles = sampling.handles.repeat(kept)
        if sampling.client is None:
            self.outputs.add_tokens(sampling.clients.repeat(kept), handles, tokens)
        else:
            self.outputs.add_client_tokens(sampling.client, handles, tokens)
        self._end(ending)

    def _end(self, rows: Int64Array) -> None:
        """The requests on these rows end with their last tokens."""
        running = self.running
        counts = running.num_tokens[rows]
        last_ids = running.token_ids[rows, counts - 1].tolist()
        generations = running.generation[rows].tolist()
        columns = zip(rows.tolist(), generations, counts.tolist(), last_ids, strict=True)
        for row, generation, num_tokens, token_id in columns:
            request = running.request_on(row)
            outcome = self._outcome(request, token_id, num_tokens)
            self._ending.append((generation, request, outcome))

    def _apply_one(
        self, planned: PlannedStep, index: int, token_ids: list[int], pooled: Float32Array | None
    ) -> None:
        """Apply the tokens of one row of the plan, whose occupant may have changed."""
        generation = int(planned.sampling.generations[index])
        occupant = self.in_flight.occupant(int(planned.sampling.rows[index]), generation)
        request = occupant.request
        if not occupant.expects_output_of(planned.step):
            self.num_stale_tokens += len(token_ids)
        elif request.options.pooling is not None:
            assert pooled is not None, "OutputValidator has checked it"
            outcome = Outcome(FinishReason.STOPPED, pooled=pooled)
            self._ending.append((generation, request, outcome))
        else:
            if request.row >= 0 and planned.num_drafts is not None:
                num_accepted = np.array([len(token_ids) - 1])
                self.running.settle_drafts(
                    np.array([request.row]), planned.num_drafts[[index]], num_accepted
                )
            self._append(request, generation, token_ids)

    def _append(self, request: Request, generation: int, token_ids: list[int]) -> None:
        """Append verified tokens, one after the other, until one ends the request. The request may
        have been preempted since they were sampled; they are its output anyway."""
        client, handle = request.client_index, np.array([request.handle], np.int32)
        for position, token_id in enumerate(token_ids):
            token = np.array([token_id], np.int32)
            if request.row >= 0:
                self.running.append_tokens(np.array([request.row]), token)
                tokens = self.running.tokens_of(request.row)
            else:
                request.append_token(token_id)
                tokens = request.token_ids
            self.outputs.add_client_tokens(client, handle, token)
            outcome = None
            for feature in self.hooks.appended:
                outcome = feature.appended(request, token_id) or outcome
            if outcome is None and self._is_over(request, token_id, tokens):
                outcome = self._outcome(request, token_id, len(tokens))
            if outcome is None:
                continue
            self._ending.append((generation, request, outcome))
            self.num_stale_tokens += len(token_ids) - position - 1
            return

    @staticmethod
    def _is_over(request: Request, token_id: int, tokens: Int32Array) -> bool:
        """Whether the last of `tokens` ends the output."""
        num_tokens, repetition = len(tokens), request.sampling.repetition
        if num_tokens >= request.max_total_tokens or request.is_stopped_by(token_id, num_tokens):
            return True
        if repetition is None:
            return False
        return is_repeating(tokens[request.num_prompt_tokens :], repetition)

    @staticmethod
    def _outcome(request: Request, token_id: int, num_tokens: int) -> Outcome:
        """The outcome of a request whose last token, of `num_tokens`, is a stop id, reaches its
        length or repeats its output."""
        if request.is_stopped_by(token_id, num_tokens):
            if token_id in request.sampling.stop_token_ids:
                request.stop_reason = token_id
            return _STOPPED
        return _LENGTH_CAPPED if num_tokens >= request.max_total_tokens else _REPETITION
