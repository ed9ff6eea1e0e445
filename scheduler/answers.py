"""What a worker's answer means: tokens to those that still hold the row they were sampled for,
and care with all others."""

import logging

import numpy as np

from longshore.protocol.arrays import BoolArray, Int32Array, Int64Array
from longshore.protocol.client import FinishReason
from longshore.protocol.errors import LongshoreError
from longshore.protocol.results import ModelRunnerOutput
from longshore.scheduler.in_flight import PlannedStep, StepsInFlight
from longshore.scheduler.kv_cache_manager import KVCacheManager
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.outputs import OutputBuckets
from longshore.scheduler.request import Request
from longshore.scheduler.running import RunningTable

logger = logging.getLogger(__name__)


class BadAnswer(LongshoreError):
    """A worker's answer fits no plan that it was sent; the epoch cannot go on."""


class Answers:
    """Applies answers in the order of the plans.

    num_stale_tokens: sampled for a request that had ended, or by a worker of another epoch.
    """

    def __init__(
        self,
        *,
        running: RunningTable,
        kv_cache: KVCacheManager,
        in_flight: StepsInFlight,
        lifecycle: Lifecycle,
        outputs: OutputBuckets,
        epoch: int,
        vocab_size: int,
    ) -> None:
        self._running = running
        self._kv_cache = kv_cache
        self._in_flight = in_flight
        self._lifecycle = lifecycle
        self._outputs = outputs
        self._epoch = epoch
        self._vocab_size = vocab_size
        self.num_stale_tokens = 0

    def apply(self, output: ModelRunnerOutput) -> None:
        """Apply the answer to the oldest unanswered plan; see `Scheduler.update_from_output`."""
        if output.epoch != self._epoch:
            self.num_stale_tokens += len(output.sampled_tokens)
            return
        planned = self._plan_of(output)
        rows, tokens = planned.rows, output.sampled_tokens
        is_current = self._running.generation[rows] == planned.generations
        if len(output.nan_rows):
            is_current &= ~np.isin(rows, output.nan_rows)
        if not is_current.all():
            self._apply_one_by_one(planned, tokens, ~is_current, output.nan_rows)
            rows, tokens = rows[is_current], tokens[is_current]
        self._apply_tokens(rows, tokens)
        self._in_flight.answered()

    def _plan_of(self, output: ModelRunnerOutput) -> PlannedStep:
        planned = self._in_flight.oldest()
        if planned is None or planned.step != output.step:
            expected = "none" if planned is None else f"step {planned.step}"
            raise BadAnswer(f"a worker answered step {output.step}; {expected} was due")
        tokens = output.sampled_tokens
        if len(tokens) != len(planned.rows):
            raise BadAnswer(
                f"step {output.step}: {len(planned.rows)} rows sample, {len(tokens)} tokens came"
            )
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self._vocab_size):
            raise BadAnswer(
                f"step {output.step}: a token id outside 0..{self._vocab_size - 1} was sampled"
            )
        return planned

    def _apply_tokens(self, rows: Int64Array, tokens: Int32Array) -> None:
        """One token for each of `rows`, which are held by whom they were planned for."""
        running = self._running
        running.append_tokens(rows, tokens)
        self._outputs.add_tokens(running.client[rows], running.handle[rows], tokens)
        for row in running.stopped(rows, tokens).tolist():
            last_token = int(running.tokens_of(row)[-1])
            self._lifecycle.end_after_token(running.request_on(row), last_token)

    def _apply_one_by_one(
        self, planned: PlannedStep, tokens: Int32Array, chosen: BoolArray, nan_rows: Int32Array
    ) -> None:
        """Tokens whose row has another occupant or none, and those that mean nothing."""
        running = self._running
        nans = set(nan_rows.tolist())
        for index in np.flatnonzero(chosen).tolist():
            row, generation = int(planned.rows[index]), int(planned.generations[index])
            if running.generation[row] == generation:
                request = running.request_on(row)
            else:
                request = self._in_flight.departed_request(generation)
            if row in nans:
                self._fail_not_finite(request, planned.step)
            elif request.is_finished:
                self.num_stale_tokens += 1
            else:
                self._deliver_to_preempted(request, int(tokens[index]))

    def _deliver_to_preempted(self, request: Request, token_id: int) -> None:
        """A valid token sampled before the preemption; it may even end the request."""
        request.append_token(token_id)
        self._outputs.add_tokens(
            np.array([request.client_index]),
            np.array([request.handle]),
            np.array([token_id], np.int32),
        )
        is_full = request.num_tokens >= request.max_total_tokens
        if is_full or request.is_stopped_by(token_id):
            self._lifecycle.end_after_token(request, token_id)

    def _fail_not_finite(self, request: Request, step: int) -> None:
        """The model's output was not a number: nothing this request computed may be reused."""
        self._kv_cache.forget_names(request)
        if not request.is_finished:
            logger.warning("request %s: logits of step %d are not finite", request.request_id, step)
            self._lifecycle.end(
                request,
                FinishReason.ERROR,
                message="the model produced logits that are not finite numbers for this request",
            )
