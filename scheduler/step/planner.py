"""Who runs in the next step: policy over columns.

Each request has a number of computed tokens, and every step gives it tokens until it has caught up
with those it has; there is no prefill phase and no decode phase. `StepPlanner.plan_step` is the
policy; the common step is a handful of vector operations, and one that is like the step before not
even that. The design is that of vLLM V1's scheduler.
"""

import numpy as np

from longshore.protocol.arrays import Int64Array
from longshore.protocol.plan import AppendedBlocks, SchedulerOutput
from longshore.scheduler.features.logprobs import ScoredRows
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.parts import Parts
from longshore.scheduler.step.admission import Admission
from longshore.scheduler.step.budget import StepBudget
from longshore.scheduler.step.in_flight import PlannedStep
from longshore.scheduler.step.pause import PauseState
from longshore.scheduler.step.pipeline_batches import share_of_step
from longshore.scheduler.step.plan_builder import PlanBuilder
from longshore.scheduler.step.sampling_rows import SamplingRows
from longshore.scheduler.step.steady_decode import SteadyDecode


class StepPlanner:
    """Makes one plan after the other.

    allow_steady_steps: off if somebody is to hear of every row or of every step.
    """

    def __init__(
        self,
        parts: Parts,
        plan: PlanBuilder,
        lifecycle: Lifecycle,
        admission: Admission,
        *,
        allow_steady_steps: bool,
    ) -> None:
        self._config = parts.config
        self._policy = parts.policy
        self._running = parts.running
        self._waiting = parts.waiting
        self._forks = parts.forks
        self._kv_cache = parts.kv_cache
        self._in_flight = parts.in_flight
        self._encoder = parts.encoder
        self._plan = plan
        self._lifecycle = lifecycle
        self._admission = admission
        self._steps_can_stand = allow_steady_steps
        self._standing: SteadyDecode | None = None
        self._sampling = SamplingRows(parts.running, np.empty(0, np.int64))
        self.pause = PauseState.UNPAUSED

    def plan_step(self, now: float) -> SchedulerOutput | None:
        """The next plan; None if there is nothing to plan."""
        if (plan := self._plan_steady_step()) is not None:
            return plan
        budget = StepBudget(self._token_budget, self._config.long_prefill_token_threshold)
        self._encoder.begin_step()
        num_scheduled, nobody_preempted = self._schedule_running(budget, now)
        self._cache_running_blocks(num_scheduled)
        if nobody_preempted and self.pause is PauseState.UNPAUSED:
            self._admission.admit_waiting(budget, num_scheduled, now)
        if not budget.num_spent and not self._plan.must_be_sent:
            return None
        return self._build_plan(num_scheduled, budget.num_spent)

    @property
    def _token_budget(self) -> int:
        return 0 if self.pause is PauseState.PAUSED_ALL else self._config.token_budget

    def _plan_steady_step(self) -> SchedulerOutput | None:
        """The next plan if it is like the one before: the same requests run, each computes one
        token, and nobody can join them. None if that is not sure, or blocks are short."""
        standing, running, step = self._standing, self._running, self._plan.step + 1
        if standing is None or not standing.holds(running, step):
            return None
        if self.pause is not PauseState.UNPAUSED or (
            not running.is_full and self._waiting.peek() is not None
        ):
            return None
        needs_no_block = standing.needs_no_block(step)
        if not needs_no_block:
            self._free_skipped_blocks()
            appended = self._kv_cache.grow(
                self._num_slots(standing.num_scheduled), running.generation
            )
            if appended is None:
                return None
            self._plan.appended += appended
            has_cached = self._cache_running_blocks(standing.num_scheduled)
        plan = self._plan.build_steady(
            standing.num_tokens, answered_step=self._in_flight.last_answered_step
        )
        running.advance(standing.num_scheduled)
        running.num_placeholders += standing.num_scheduled
        if not (needs_no_block or appended or has_cached):
            standing.look_ahead(
                running,
                self._kv_cache.block_sizes,
                num_lookahead=self._config.num_lookahead_tokens,
                step=step,
            )
        self._in_flight.add(PlannedStep(step, standing.sampling, scored=standing.scored))
        return plan

    def _schedule_running(self, budget: StepBudget, now: float) -> tuple[Int64Array, bool]:
        """Tokens per row for the requests that run, and whether all of them still do."""
        running = self._running
        self._free_skipped_blocks()
        wanted = budget.cap(running.wanted())
        if self._config.feed_back_tokens:
            wanted = share_of_step(wanted, running, self._config.max_steps_in_flight)
        before = self._encoder.checkpoint() if self._encoder.pending else None
        num_scheduled = self._cut(wanted, budget)
        appended = self._kv_cache.grow(self._num_slots(num_scheduled), running.generation)
        if appended is None:
            if before is not None:
                self._encoder.restore(before)
            return self._schedule_under_pressure(wanted, budget, now)
        self._plan.appended += appended
        budget.spend(int(num_scheduled.sum()))
        return num_scheduled, True

    def _cut(self, wanted: Int64Array, budget: StepBudget) -> Int64Array:
        """What of `wanted` the budgets of tokens and of encoder inputs allow, in admission order.

        An item that cannot be encoded yet cuts its request, and leaves more for those behind it.
        """
        running = self._running
        num_scheduled = budget.cut(wanted, running)
        pending = self._encoder.pending.values()
        if not pending:
            return self._kv_cache.aligned_chunks(running.num_computed, num_scheduled)
        for request in sorted(pending, key=lambda request: int(running.generation[request.row])):
            row = request.row
            allowed = self._encoder.limit(
                request, int(running.num_computed[row]), int(num_scheduled[row])
            )
            if allowed < num_scheduled[row]:
                wanted = wanted.copy()
                wanted[row] = allowed
                num_scheduled = budget.cut(wanted, running)
        return self._kv_cache.aligned_chunks(running.num_computed, num_scheduled)

    def _free_skipped_blocks(self) -> None:
        """Blocks that no row needs any more come before those that rows lack."""
        running = self._running
        if self._kv_cache.frees_skipped:
            self._kv_cache.free_skipped(
                running.num_computed,
                running.num_tokens,
                running.generation,
                step=self._plan.step + 1,
                answered_step=self._in_flight.last_answered_step,
            )

    def _num_slots(self, num_scheduled: Int64Array) -> Int64Array:
        """(max_num_seqs,) tokens that rows need slots for; a drafter writes behind those that
        compute."""
        num_tokens = self._running.num_computed + num_scheduled
        lookahead = self._config.num_lookahead_tokens
        if lookahead:
            num_tokens[num_scheduled > 0] += lookahead
        return num_tokens

    def _schedule_under_pressure(
        self, wanted: Int64Array, budget: StepBudget, now: float
    ) -> tuple[Int64Array, bool]:
        """The same, one request after the other, when the blocks do not suffice for all: the
        policy's victim gives up its blocks, and what it took in this step, until they do."""
        running = self._running
        num_scheduled = np.zeros_like(wanted)
        requests = running.requests_in_order()
        grown: dict[int, list[list[int]]] = {}
        nobody_preempted = True
        index = 0
        while index < len(requests) and budget.num_left > 0:
            request = requests[index]
            row = request.row
            count = min(int(wanted[row]), budget.num_left)
            has_items = request.request_id in self._encoder.pending
            if has_items:
                num_computed = int(running.num_computed[row])
                count = self._encoder.would_limit(request, num_computed, count)
            if count == 0:
                index += 1
                continue
            count = self._kv_cache.aligned_chunk(int(running.num_computed[row]), count)
            num_tokens = int(running.num_computed[row]) + count + self._config.num_lookahead_tokens
            block_ids = self._kv_cache.grow_row(row, num_tokens)
            while block_ids is None:
                if self._forks.release_youngest():
                    block_ids = self._kv_cache.grow_row(row, num_tokens)
                    continue
                if len(requests) == 1 and self._lifecycle.release_youngest_load():
                    block_ids = self._kv_cache.grow_row(row, num_tokens)
                    continue
                victim_index = self._policy.pick_victim(requests)
                victim = requests.pop(victim_index)
                budget.refund(int(num_scheduled[victim.row]))
                num_scheduled[victim.row] = 0
                grown.pop(victim.row, None)
                self._lifecycle.preempt(victim, now)
                nobody_preempted = False
                index -= victim_index < index
                if victim is request:
                    break
                block_ids = self._kv_cache.grow_row(row, num_tokens)
            if block_ids is None:
                continue
            if has_items:
                self._encoder.limit(request, int(running.num_computed[row]), count)
            grown[row] = block_ids
            num_scheduled[row] = count
            budget.spend(count)
            index += 1
        self._plan.appended += _appended_blocks(grown)
        return num_scheduled, nobody_preempted

    def _cache_running_blocks(self, num_scheduled: Int64Array) -> bool:
        """Make findable what this plan completes, if anything. Not earlier: a request preempted in
        this step computes nothing of what it had been given. Tokens not verified yet name nothing.
        """
        running = self._running
        num_cached_blocks = np.minimum(running.num_computed + num_scheduled, running.num_tokens)
        rows = self._kv_cache.full_blocks.rows_to_cache(num_cached_blocks)
        if len(rows):
            rows = rows[running.generation[rows].argsort()]
            self._kv_cache.full_blocks.cache_rows(
                rows, num_cached_blocks, running.token_ids, running.requests, self._plan.step + 1
            )
        return len(rows) > 0

    def _build_plan(self, num_scheduled: Int64Array, num_tokens: int) -> SchedulerOutput:
        running = self._running
        num_drafts = running.num_drafts_in(num_scheduled) if running.drafts.shape[1] else None
        plan, loads = self._plan.build(
            num_scheduled, num_tokens, answered_step=self._in_flight.last_answered_step
        )
        running.advance(num_scheduled)
        rows = running.samples(num_scheduled).nonzero()[0]
        running.num_placeholders[rows] += 1
        planned = self._planned_step(plan, loads, rows, num_drafts)
        if running.scored:
            planned.scored = ScoredRows(running, num_scheduled)
        if num_drafts is not None:
            self._consume_drafts(num_scheduled, rows, num_drafts)
        for request in list(self._encoder.pending.values()):
            self._encoder.advanced(request, int(running.num_computed[request.row]))
        self._standing = self._steady_after(plan, planned, num_scheduled)
        self._in_flight.add(planned)
        return plan

    def _steady_after(
        self, plan: SchedulerOutput, planned: PlannedStep, num_scheduled: Int64Array
    ) -> SteadyDecode | None:
        """What stands if this plan, just built, is one that the next can be like."""
        running, last = self._running, self._standing
        if (
            not self._steps_can_stand
            or len(plan.scheduled_rows)
            or plan.num_scheduled_tokens != running.num_rows
            or not running.num_rows
            or not planned.sampling.is_plain
        ):
            return None
        if last is not None and last.holds(running, plan.step):
            return last
        return SteadyDecode(running, planned, num_scheduled)

    def _planned_step(
        self,
        plan: SchedulerOutput,
        loads: tuple[int, ...],
        rows: Int64Array,
        num_drafts: Int64Array | None,
    ) -> PlannedStep:
        running = self._running
        if not self._sampling.serves(running, rows):
            self._sampling = SamplingRows(running, rows)
        has_drafts = len(plan.draft_rows) > 0 and num_drafts is not None
        return PlannedStep(
            plan.step,
            self._sampling,
            num_drafts=num_drafts[rows] if has_drafts and num_drafts is not None else None,
            drafts=plan.draft_tokens if has_drafts else None,
            is_masked=running.has_grammar[rows] if plan.has_structured_output else None,
            loads=loads,
        )

    def _consume_drafts(
        self, num_scheduled: Int64Array, rows: Int64Array, num_drafts: Int64Array
    ) -> None:
        """Drafts are consumed by the plan that verifies them. With two steps in flight only the
        workers know the next ones; their number is what is planned with."""
        running = self._running
        running.num_placeholders += num_drafts
        running.num_drafts[num_scheduled > 0] = 0
        if self._config.max_steps_in_flight > 1:
            rows = rows[~running.has_grammar[rows]]
            running.num_drafts[rows] = running.drafts.shape[1]
            running.drafts[rows] = -1


def _appended_blocks(grown: dict[int, list[list[int]]]) -> list[AppendedBlocks]:
    """Blocks per row and group as columns per group."""
    appended = []
    for group in range(max(map(len, grown.values()), default=0)):
        rows = [row for row, block_ids in grown.items() for _ in block_ids[group]]
        ids = [block_id for block_ids in grown.values() for block_id in block_ids[group]]
        if ids:
            appended.append(
                AppendedBlocks(group, np.array(rows, np.int32), np.array(ids, np.int32))
            )
    return appended
