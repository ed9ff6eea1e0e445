"""What a worker's answer means: tokens to those that still hold the row they were sampled for,
and care with all others."""

from operator import itemgetter

import numpy as np

from longshore.protocol.arrays import Float32Array, Int32Array
from longshore.protocol.outputs import FinishReason, ModelRunnerOutput
from longshore.scheduler.features.recovery import Recovery
from longshore.scheduler.features.repetition import is_repeating
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.parts import Parts
from longshore.scheduler.request import Request
from longshore.scheduler.step.in_flight import PlannedStep
from longshore.scheduler.step.output_validator import OutputValidator
from longshore.scheduler.step.plan_builder import PlanBuilder
from longshore.scheduler.step.sampling_rows import SamplingRows


class OutputProcessor:
    """Applies answers in the order of the plans.

    num_stale_tokens: sampled for a request that had ended or was rewound, or by a worker of another
                      epoch.
    """

    def __init__(
        self, parts: Parts, plan: PlanBuilder, lifecycle: Lifecycle, recovery: Recovery
    ) -> None:
        self._running = parts.running
        self._in_flight = parts.in_flight
        self._outputs = parts.outputs
        self._has_drafts_in_answers = parts.config.max_steps_in_flight == 1
        self._plan = plan
        self._lifecycle = lifecycle
        self._recovery = recovery
        self._checks = OutputValidator(parts)
        # Requests that end with the answer being applied, behind the generation that it is for:
        # a pooling request with its vector, one that failed with the reason.
        self._ending: list[tuple[int, Request, Float32Array | str | None]] = []
        self.num_stale_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_invalid_draft_tokens = 0

    def apply(self, output: ModelRunnerOutput, now: float) -> bool:
        """Apply the answer to the oldest unanswered plan; see `Scheduler.update_from_output`. False
        if it was of another epoch."""
        if output.epoch != self._plan.epoch:
            self.num_stale_tokens += len(output.sampled_tokens)
            return False
        planned = self._checks.plan_of(output)
        if len(output.failed_block_ids):
            self._recovery.fail_loads(output.failed_block_ids, planned)
        if len(output.nan_rows):
            self._recovery.fail_not_finite(output, planned)
        if output.logprobs is None:
            self._apply_sampled(planned, output)
        else:
            self._apply_scored(planned, output)
        self._in_flight.answered()  # first: what ends now left no trace in this plan
        if self._ending:
            self._end_requests(now)
        self.take_drafts(output.draft_rows, output.draft_tokens, planned)
        return True

    def _apply_scored(self, planned: PlannedStep, output: ModelRunnerOutput) -> None:
        """Tokens with log probabilities. Whose still mean something is decided before the tokens,
        how many are output shows behind them; nobody leaves a row in between."""
        scored, entries = planned.scored, output.logprobs
        if scored is None or entries is None:
            self._apply_sampled(planned, output)
            return
        is_live, _ = scored.standing(self._running, self._in_flight, planned.step)
        self._apply_sampled(planned, output)
        _, num_tokens = scored.standing(self._running, self._in_flight, planned.step)
        scored.deliver(entries, is_live, num_tokens, self._outputs)

    # Tokens

    def _apply_sampled(self, planned: PlannedStep, output: ModelRunnerOutput) -> None:
        sampling, tokens, num_sampled = planned.sampling, output.sampled_tokens, output.num_sampled
        has_one_each = planned.num_drafts is None and not len(num_sampled)
        if sampling.version == self._running.version and sampling.is_plain and has_one_each:
            self._apply_tokens(sampling, tokens)
            return
        # Some may not simply be the next token of whoever holds the row.
        rows, generations = sampling.rows, sampling.generations
        is_current = self._running.generation[rows] == generations
        is_current &= self._running.void_through[rows] < planned.step
        is_plain = is_current & ~self._running.is_special[rows] & has_one_each
        if is_plain.all():
            self._apply_tokens(sampling, tokens)
            return
        counts = num_sampled if len(num_sampled) else np.ones(len(rows), np.int32)
        last = np.cumsum(counts)
        if np.count_nonzero(is_plain):
            self._apply_tokens(sampling.part(is_plain), tokens[last[is_plain] - 1])
        pooled = dict(zip(output.pooled_rows.tolist(), output.pooled, strict=True))
        for index in np.flatnonzero(~is_plain).tolist():
            ids = tokens[last[index] - counts[index] : last[index]].tolist()
            self._apply_one(planned, index, ids, pooled.get(int(rows[index])))

    def _apply_tokens(self, sampling: SamplingRows, tokens: Int32Array) -> None:
        """One token for each of the rows, which are held by whom they were planned for."""
        running = self._running
        running.append_tokens(sampling.index, tokens)
        if sampling.client is None:
            self._outputs.add_tokens(sampling.clients, sampling.handles, tokens)
        else:
            self._outputs.add_client_tokens(sampling.client, sampling.handles, tokens)
        may_stop = sampling.has_stop_id(tokens)
        if may_stop or running.may_be_full:
            rows = running.stopped(sampling.rows, tokens if may_stop else None)
            generations = running.generation[rows].tolist()
            for row, generation in zip(rows.tolist(), generations, strict=True):
                self._ending.append((generation, running.request_on(row), None))

    def _apply_one(
        self, planned: PlannedStep, index: int, token_ids: list[int], pooled: Float32Array | None
    ) -> None:
        """The tokens of one row of the plan, whoever it belongs to now."""
        generation = int(planned.generations[index])
        request, void_through = self._occupant(int(planned.rows[index]), generation)
        if planned.step <= void_through or request.is_finished:
            self.num_stale_tokens += len(token_ids)
        elif request.pooling is not None:
            assert pooled is not None, "OutputValidator has seen to it"
            self._ending.append((generation, request, pooled))
        else:
            if request.row >= 0 and planned.num_drafts is not None:
                num_drafts = int(planned.num_drafts[index])
                self._settle_drafts(request, num_drafts, len(token_ids) - 1)
            self._append(request, generation, token_ids)

    def _occupant(self, row: int, generation: int) -> tuple[Request, int]:
        """Who held the row under this generation, and the last plan whose tokens are void."""
        running = self._running
        if running.generation[row] == generation:
            return running.request_on(row), int(running.void_through[row])
        left = self._in_flight.past_occupant(generation)
        return left.request, left.void_through

    def _settle_drafts(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """The drafts that were not accepted count neither as computed nor as on their way."""
        row, rejected = np.array([request.row]), num_drafts - num_accepted
        self._running.reject(row, np.array([rejected]))
        self._running.num_placeholders[row] -= rejected
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted

    def _append(self, request: Request, generation: int, token_ids: list[int]) -> None:
        """Verified tokens, one after the other until one ends the request. It runs, or has been
        preempted since they were sampled; they are its output all the same."""
        client, handle = request.client_index, np.array([request.handle], np.int32)
        for position, token_id in enumerate(token_ids):
            token = np.array([token_id], np.int32)
            if request.row >= 0:
                self._running.append_tokens(np.array([request.row]), token)
                tokens = self._running.tokens_of(request.row)
            else:
                request.append_token(token_id)
                tokens = request.token_ids
            self._outputs.add_client_tokens(client, handle, token)
            repetition = request.sampling.repetition
            if request.grammar is not None and not request.grammar.accept_tokens([token_id]):
                text = f"token {token_id} was sampled against the grammar"
                self._ending.append((generation, request, text))
            elif (
                len(tokens) >= request.max_total_tokens
                or request.is_stopped_by(token_id, len(tokens))
                or (
                    repetition is not None
                    and is_repeating(tokens[request.num_prompt_tokens :], repetition)
                )
            ):
                self._ending.append((generation, request, None))
            else:
                continue
            self.num_stale_tokens += len(token_ids) - position - 1
            return

    def _end_requests(self, now: float) -> None:
        """Requests that end with this answer give back their blocks in admission order."""
        ending, self._ending = self._ending, []
        ending.sort(key=itemgetter(0))
        stopped = [request for _, request, why in ending if why is None and request.row >= 0]
        if len(stopped) == len(ending):
            self._lifecycle.end_stopped(stopped, now)
            return
        for _, request, why in ending:
            if why is None:
                self._lifecycle.end_after_token(request, now)
            elif isinstance(why, str):
                self._lifecycle.end(request, FinishReason.ERROR, message=why)
            else:
                self._lifecycle.end(request, FinishReason.STOPPED, pooled=why)

    # Drafts

    def take_drafts(
        self, rows: Int32Array, token_ids: Int32Array, planned: PlannedStep | None = None
    ) -> None:
        """Drafts for the next step of rows that decode; the grammar's refusals are dropped.

        planned: the plan they came in answer to; rows with another occupant since are left out.
        """
        if len(rows) == 0 or not self._has_drafts_in_answers:
            return
        running = self._running
        for row in np.unique(rows).tolist():
            ids = token_ids[rows == row].tolist()
            if not 0 <= row < running.max_num_seqs or running.requests[row] is None:
                continue
            request = running.request_on(row)
            if planned is not None and not self._sampled_in(planned, row):
                continue
            if request.pooling is not None or running.num_computed[row] < running.num_known[row]:
                continue
            if request.grammar is not None:
                num_valid = request.grammar.num_valid(ids)
                num_invalid = len(ids) - num_valid
                request.num_invalid_draft_tokens += num_invalid
                self.num_invalid_draft_tokens += num_invalid
                self._plan.num_invalid_draft_tokens += num_invalid
                ids = ids[:num_valid]
            running.set_drafts(row, ids)

    def _sampled_in(self, planned: PlannedStep, row: int) -> bool:
        index = int(np.searchsorted(planned.rows, row))
        is_there = index < len(planned.rows) and planned.rows[index] == row
        return bool(is_there and planned.generations[index] == self._running.generation[row])
