"""What a worker's answer means: tokens to those that still hold the row they were sampled for,
and care with all others."""

import logging

import numpy as np

from longshore.protocol.arrays import Float32Array, Int32Array
from longshore.protocol.client import FinishReason
from longshore.protocol.errors import LongshoreError
from longshore.protocol.results import ModelRunnerOutput
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.in_flight import PlannedStep, StepsInFlight
from longshore.scheduler.kv_cache_manager import KVCacheManager
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.outputs import OutputBuckets
from longshore.scheduler.plan_builder import PlanBuilder
from longshore.scheduler.recovery import Recovery
from longshore.scheduler.repetition import is_repeating
from longshore.scheduler.request import Request
from longshore.scheduler.running import RunningTable
from longshore.scheduler.sampling_rows import SamplingRows
from longshore.scheduler.transfers import Transfers

logger = logging.getLogger(__name__)


class BadAnswer(LongshoreError):
    """A worker's answer fits no plan that it was sent; the epoch cannot go on."""


class Answers:
    """Applies answers in the order of the plans.

    num_stale_tokens: sampled for a request that had ended or was rewound, or by a worker of another
                      epoch.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        running: RunningTable,
        kv_cache: KVCacheManager,
        in_flight: StepsInFlight,
        lifecycle: Lifecycle,
        plan: PlanBuilder,
        outputs: OutputBuckets,
        recovery: Recovery,
        transfers: Transfers,
        epoch: int,
        vocab_size: int,
    ) -> None:
        self._config = config
        self._running = running
        self._kv_cache = kv_cache
        self._in_flight = in_flight
        self._lifecycle = lifecycle
        self._plan = plan
        self._outputs = outputs
        self._recovery = recovery
        self._transfers = transfers
        self._vocab_size = vocab_size
        self.epoch = epoch
        # Rows that end with the answer being applied, those of pooling requests with their vector.
        self._ending: dict[int, Float32Array | None] = {}
        self.num_stale_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_invalid_draft_tokens = 0

    def apply(self, output: ModelRunnerOutput, now: float) -> bool:
        """Apply the answer to the oldest unanswered plan; see `Scheduler.update_from_output`. False
        if it was of another epoch."""
        if output.epoch != self.epoch:
            self.num_stale_tokens += len(output.sampled_tokens)
            return False
        planned = self._plan_of(output)
        if len(output.failed_block_ids):
            self._fail_loads(output.failed_block_ids, planned, now)
        if len(output.nan_rows):
            self._fail_not_finite(output.nan_rows, planned, now)
        sampling = planned.sampling
        if (
            sampling.version == self._running.version
            and sampling.is_plain
            and planned.num_drafts is None
            and not len(output.num_sampled)
        ):
            self._apply_tokens(sampling, output.sampled_tokens)
        else:
            self._apply_where_current(planned, output, now)
        self._end_requests(now)
        self._in_flight.answered()
        self.take_drafts(output.draft_rows, output.draft_tokens, planned)
        return True

    def _apply_where_current(
        self, planned: PlannedStep, output: ModelRunnerOutput, now: float
    ) -> None:
        """Tokens of which some may not simply be the next one of whoever holds the row."""
        rows, tokens, num_sampled = planned.rows, output.sampled_tokens, output.num_sampled
        is_current = self._running.generation[rows] == planned.generations
        is_current &= self._running.void_through[rows] < planned.step
        is_plain = is_current & ~self._running.is_special[rows]
        if len(num_sampled) or planned.num_drafts is not None:
            is_plain[:] = False
        if is_plain.all():
            self._apply_tokens(planned.sampling, tokens)
            return
        counts = num_sampled if len(num_sampled) else np.ones(len(rows), np.int32)
        last = np.cumsum(counts)
        if np.count_nonzero(is_plain):
            self._apply_tokens(planned.sampling.part(is_plain), tokens[last[is_plain] - 1])
        pooled = dict(zip(output.pooled_rows.tolist(), output.pooled, strict=True))
        for index in np.flatnonzero(~is_plain).tolist():
            ids = tokens[last[index] - counts[index] : last[index]].tolist()
            row = int(rows[index])
            self._apply_one(planned, index, ids, pooled.get(row), bool(is_current[index]), now)

    def _end_requests(self, now: float) -> None:
        """Requests that end with this answer give back their blocks in admission order."""
        if not self._ending:
            return
        ending, self._ending = self._ending, {}
        for row in sorted(ending, key=self._running.generation.item):
            request, pooled = self._running.request_on(row), ending[row]
            if pooled is None:
                last_token = int(self._running.tokens_of(row)[-1])
                self._lifecycle.end_after_token(request, last_token, now)
            else:
                self._lifecycle.end_pooled(request, pooled, now)

    def _plan_of(self, output: ModelRunnerOutput) -> PlannedStep:
        planned = self._in_flight.oldest()
        if planned is None or planned.step != output.step:
            expected = "none" if planned is None else f"step {planned.step}"
            raise BadAnswer(f"a worker answered step {output.step}; {expected} was due")
        tokens, num_rows = output.sampled_tokens, len(planned.rows)
        counts = output.num_sampled
        if len(counts):
            limits = 1 if planned.num_drafts is None else planned.num_drafts + 1
            if len(counts) != num_rows or ((counts < 1) | (counts > limits)).any():
                raise BadAnswer(
                    f"step {output.step}: {num_rows} rows sample one token each and one more per "
                    "accepted draft; num_sampled says otherwise"
                )
        num_tokens = int(counts.sum()) if len(counts) else num_rows
        if len(tokens) != num_tokens:
            raise BadAnswer(
                f"step {output.step}: {num_rows} rows sample {num_tokens} tokens, "
                f"{len(tokens)} tokens came"
            )
        if num_tokens and tokens.view(np.uint32).max() >= self._vocab_size:  # or below 0
            raise BadAnswer(
                f"step {output.step}: a token id outside 0..{self._vocab_size - 1} was sampled"
            )
        drafts = output.draft_tokens
        if len(drafts) != len(output.draft_rows) or (
            len(drafts) and not (drafts.min() >= 0 and drafts.max() < self._vocab_size)
        ):
            raise BadAnswer(
                f"step {output.step}: drafts are token ids of 0..{self._vocab_size - 1}, one per "
                "draft row"
            )
        if not np.isin(output.nan_rows, planned.rows).all():
            raise BadAnswer(f"step {output.step}: a row that sampled nothing is not finite")
        if not planned.sampling.is_plain:
            self._check_pooled(planned, output)
        if len(output.pooled) != len(output.pooled_rows):
            raise BadAnswer(f"step {output.step}: vectors and rows of them differ in number")
        return planned

    def _check_pooled(self, planned: PlannedStep, output: ModelRunnerOutput) -> None:
        """Every pooling request of the plan that still wants its vector has one."""
        answered = {*output.pooled_rows.tolist(), *output.nan_rows.tolist()}
        for row, generation in zip(
            planned.rows.tolist(), planned.generations.tolist(), strict=True
        ):
            if row in answered:
                continue
            if self._running.generation[row] == generation:
                request = self._running.request_on(row)
            else:
                request = self._in_flight.departed(generation).request
            if request.pooling is not None and not request.is_finished:
                raise BadAnswer(f"step {planned.step}: no vector came for row {row}")

    # Tokens

    def _apply_tokens(self, sampling: SamplingRows, tokens: Int32Array) -> None:
        """One token for each of the rows, which are held by whom they were planned for."""
        running = self._running
        running.append_tokens(sampling.index, tokens)
        if sampling.client is None:
            self._outputs.add_tokens(sampling.clients, sampling.handles, tokens)
        else:
            self._outputs.add_client_tokens(sampling.client, sampling.handles, tokens)
        if running.may_be_full or sampling.has_stop_id(tokens):
            for row in running.stopped(sampling.rows, tokens).tolist():
                self._ending[row] = None

    def _apply_one(
        self,
        planned: PlannedStep,
        index: int,
        token_ids: list[int],
        pooled: Float32Array | None,
        is_current: bool,
        now: float,
    ) -> None:
        """The tokens of one row of the plan, whoever it belongs to now."""
        row, generation = int(planned.rows[index]), int(planned.generations[index])
        if is_current:
            request, is_void = self._running.request_on(row), False
        elif self._running.generation[row] == generation:
            request, is_void = self._running.request_on(row), True
        else:
            left = self._in_flight.departed(generation)
            request, is_void = left.request, planned.step <= left.void_through
        if is_void or request.is_finished:
            self.num_stale_tokens += len(token_ids)
        elif request.pooling is not None:
            assert pooled is not None, "checked by _check_pooled"
            if is_current:
                self._ending[row] = pooled
            else:
                self._lifecycle.end_pooled(request, pooled, now)
        elif is_current:
            num_drafts = 0 if planned.num_drafts is None else int(planned.num_drafts[index])
            self._settle_drafts(request, num_drafts, len(token_ids) - 1)
            self._append_to_running(request, token_ids, now)
        else:
            self._append_to_preempted(request, token_ids, now)

    def _settle_drafts(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """The drafts that were not accepted count neither as computed nor as on their way."""
        if not num_drafts:
            return
        row, rejected = np.array([request.row]), num_drafts - num_accepted
        self._running.reject(row, np.array([rejected]))
        self._running.num_placeholders[row] -= rejected
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted

    def _append_to_running(self, request: Request, token_ids: list[int], now: float) -> None:
        running, row = self._running, np.array([request.row])
        for position, token_id in enumerate(token_ids):
            token = np.array([token_id], np.int32)
            running.append_tokens(row, token)
            self._outputs.add_tokens(running.client[row], running.handle[row], token)
            tokens = running.tokens_of(request.row)
            outputs = tokens[request.num_prompt_tokens :]
            repetition = request.sampling.repetition
            if request.grammar is not None and not request.grammar.accept_tokens([token_id]):
                text = f"token {token_id} was sampled against the grammar"
                self._lifecycle.end(request, FinishReason.ERROR, now, message=text)
            elif len(running.stopped(row, token)) or (
                repetition is not None and is_repeating(outputs, repetition)
            ):
                self._ending[request.row] = None
            else:
                continue
            self.num_stale_tokens += len(token_ids) - position - 1
            return

    def _append_to_preempted(self, request: Request, token_ids: list[int], now: float) -> None:
        """Valid tokens sampled before the preemption; they may even end the request."""
        for token_id in token_ids:
            request.append_token(token_id)
            self._outputs.add_tokens(
                np.array([request.client_index]),
                np.array([request.handle]),
                np.array([token_id], np.int32),
            )
            repetition = request.sampling.repetition
            outputs = request.token_ids[request.num_prompt_tokens :]
            is_full = request.num_tokens >= request.max_total_tokens
            if request.grammar is not None:
                request.grammar.accept_tokens([token_id])
            if (
                is_full
                or request.is_stopped_by(token_id)
                or (repetition is not None and is_repeating(outputs, repetition))
            ):
                self._lifecycle.end_after_token(request, token_id, now)
                return

    # Drafts

    def take_drafts(
        self, rows: Int32Array, token_ids: Int32Array, planned: PlannedStep | None = None
    ) -> None:
        """Drafts for the next step of rows that decode; the grammar's refusals are dropped.

        planned: the plan they came in answer to; rows with another occupant since are left out.
        """
        if len(rows) == 0 or self._config.max_steps_in_flight > 1:
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
                self.num_invalid_draft_tokens += len(ids) - num_valid
                self._plan.num_invalid_draft_tokens += len(ids) - num_valid
                ids = ids[:num_valid]
            running.set_drafts(row, ids)

    def _sampled_in(self, planned: PlannedStep, row: int) -> bool:
        index = int(np.searchsorted(planned.rows, row))
        is_there = index < len(planned.rows) and planned.rows[index] == row
        return bool(is_there and planned.generations[index] == self._running.generation[row])

    # Failures

    def _fail_loads(self, failed_block_ids: Int32Array, planned: PlannedStep, now: float) -> None:
        """Loads of the answered step did not fill these blocks."""
        failed = failed_block_ids
        sources = {}
        for generation in planned.loads:
            tables = self._tables_under(generation)
            firsts = [
                int(np.argmax(np.isin(table, failed))) * block_size
                for table, block_size in zip(tables, self._kv_cache.block_sizes, strict=True)
                if np.isin(table, failed).any()
            ]
            if firsts:
                sources[generation] = min(firsts)
        if not sources:
            logger.warning("step %d: blocks failed to load that no load had", planned.step)
            return
        fails = self._config.load_failure_policy == "fail"
        self._spoil(sources, now, reason="its KV could not be loaded" if fails else None)

    def _tables_under(self, generation: int) -> tuple[Int32Array, ...]:
        rows = np.flatnonzero(self._running.generation == generation)
        if len(rows):
            return self._kv_cache.block_ids(int(rows[0]))
        return self._in_flight.departed(generation).tables

    def _fail_not_finite(self, nan_rows: Int32Array, planned: PlannedStep, now: float) -> None:
        """The model's output was not a number for these rows. The eldest first: a younger one that
        had found its blocks is sent back with it, and its own output means nothing then."""
        indices = np.flatnonzero(np.isin(planned.rows, nan_rows))
        for index in indices[np.argsort(planned.generations[indices])].tolist():
            self._fail_row(int(planned.rows[index]), int(planned.generations[index]), planned, now)

    def _fail_row(self, row: int, generation: int, planned: PlannedStep, now: float) -> None:
        """Nothing that the row's request computed may be reused. What it had found, others have
        computed and got numbers from."""
        if self._running.generation[row] == generation:
            if planned.step <= self._running.void_through[row]:
                return
            request = self._running.request_on(row)
            num_hit_tokens = request.num_hit_tokens
        else:
            left = self._in_flight.departed(generation)
            request, num_hit_tokens = left.request, left.num_hit_tokens
            if planned.step <= left.void_through and not request.is_finished:
                return
        if not request.is_finished:
            logger.warning(
                "request %s: logits of step %d are not finite", request.request_id, planned.step
            )
            text = "the model produced logits that are not finite numbers for this request"
            self._lifecycle.end(request, FinishReason.ERROR, now, message=text)
        self._spoil({generation: num_hit_tokens}, now)

    def _spoil(self, sources: dict[int, int], now: float, *, reason: str | None = None) -> None:
        """Everything that rests on bad KV is computed again; with `reason`, requests that hold some
        of it fail for it. See `Recovery.forget_from` for `sources`."""
        spoilt = self._recovery.forget_from(sources)
        self._plan.unnamed += spoilt.block_ids.tolist()
        self._transfers.note_spoilt(spoilt.block_ids)
        for request in spoilt.waiting:
            self._lifecycle.give_up_load(request)
        for request, num_good in spoilt.running:
            if reason is not None:
                self._lifecycle.end(request, FinishReason.ERROR, now, message=reason)
            else:
                self._plan.add_rewind(self._recovery.rewind(request, num_good))
