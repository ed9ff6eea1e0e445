"""Chooses the requests that run in the next step, and how many tokens each computes.

Each request has a number of computed tokens, and each step computes more of its tokens until none
is left; there is no prefill phase and no decode phase. `StepPlanner.plan_step` is the policy. The
common step takes a few vector operations, a steady decode step not even that. The design is that of
vLLM V1's scheduler.
"""

import enum
from dataclasses import dataclass, field

import numpy as np

from longshore.protocol.arrays import Int64Array, int32_array
from longshore.protocol.plan import AppendedBlocks, SchedulerOutput
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.hooks import Hooks, Yielded
from longshore.scheduler.kv_cache.holds import Holds
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.queue.policies import SchedulingPolicy
from longshore.scheduler.queue.queues import WaitingRequests
from longshore.scheduler.step.admission import Admission
from longshore.scheduler.step.in_flight import PlannedStep, SamplingRows, StepsInFlight
from longshore.scheduler.step.plan_builder import PlanBuilder
from longshore.scheduler.step.running import RunningTable
from longshore.scheduler.step.steady_decode import SteadyDecode
from longshore.scheduler.step.token_budget import TokenBudget


class PauseState(enum.Enum):
    """UNPAUSED: no restriction. PAUSED_NEW: running requests continue, no request is admitted
    (before weights are replaced, or to drain the engine). PAUSED_ALL: nothing is scheduled."""

    UNPAUSED = "unpaused"
    PAUSED_NEW = "paused_new"
    PAUSED_ALL = "paused_all"


@dataclass(slots=True, kw_only=True)
class StepPlanner:
    """Plans the steps.

    waits_for_transfers: in the last step, the only running request lacked blocks that they own.
    """

    config: SchedulerConfig
    running: RunningTable
    waiting: WaitingRequests
    holds: Holds
    kv_cache: KVCacheManager
    in_flight: StepsInFlight
    plan: PlanBuilder
    hooks: Hooks
    policy: SchedulingPolicy
    lifecycle: Lifecycle
    admission: Admission
    budget: TokenBudget
    pause: PauseState = PauseState.UNPAUSED
    waits_for_transfers: bool = False
    _steady: SteadyDecode | None = None
    _sampling: SamplingRows = field(init=False)

    def __post_init__(self) -> None:
        self._sampling = SamplingRows(self.running, np.empty(0, np.int64))

    def plan_step(self, now: float) -> SchedulerOutput | None:
        """The next plan; None if there is nothing to plan."""
        self.waits_for_transfers = self.admission.has_untried = False
        if (plan := self._plan_steady_step()) is not None:
            return plan
        budget = 0 if self.pause is PauseState.PAUSED_ALL else self.budget.num_tokens
        if self.kv_cache.frees_skipped:
            self._free_skipped_blocks()
        for feature in self.hooks.begin_step:
            feature.begin_step(self.plan.step + 1, budget, now)
        is_short, num_scheduled = False, np.zeros(self.running.max_num_seqs, np.int64)
        if self.running.num_rows:
            num_scheduled, is_short = self._schedule_running(budget, now)
            self._cache_full_blocks(num_scheduled)
        num_tokens = int(num_scheduled.sum())
        if not is_short and self.pause is PauseState.UNPAUSED:
            num_tokens += self.admission.admit_waiting(budget - num_tokens, num_scheduled, now)
        assert num_tokens <= budget
        if not num_tokens and not self.plan.must_be_sent:
            return None
        return self._build_plan(num_scheduled, num_tokens, now)

    # A steady decode step

    def _plan_steady_step(self) -> SchedulerOutput | None:
        """The next plan if it is a steady decode: the same requests run as in the last plan, each
        computes one token, and none can be admitted. None if this is uncertain or blocks are
        short."""
        steady, running, step = self._steady, self.running, self.plan.step + 1
        if steady is None or not steady.holds(running, step):
            return None
        if self.pause is not PauseState.UNPAUSED:
            return None
        for feature in self.hooks.is_eventful:
            if feature.is_eventful():
                return None
        if running.num_rows < running.max_num_seqs and (
            self.waiting.peek() is not None or self.waiting.has_retries
        ):
            return None
        needs_no_block = steady.needs_no_block(step)
        if not needs_no_block:
            if self.kv_cache.frees_skipped:
                self._free_skipped_blocks()
            num_slots = self._num_slots(steady.num_scheduled)
            appended = self.kv_cache.grow(num_slots, running.generation)
            if appended is None:
                return None
            self.plan.appended += appended
            has_cached = self._cache_full_blocks(steady.num_scheduled)
        answered_step = self.in_flight.last_answered_step
        plan = self.plan.build_steady(steady.num_tokens, answered_step=answered_step)
        running.advance(steady.num_scheduled)
        running.num_placeholders += steady.num_scheduled
        if not (needs_no_block or appended or has_cached):
            steady.look_ahead(
                running,
                self.kv_cache.block_sizes,
                num_lookahead=self.config.num_lookahead_tokens,
                step=step,
            )
        planned = PlannedStep(step, steady.sampling, steady.num_scheduled, scored=steady.scored)
        self.in_flight.steps.append(planned)
        return plan

    # Running requests

    def _schedule_running(self, budget: int, now: float) -> tuple[Int64Array, bool]:
        """Tokens per row for the running requests, and whether blocks are so short that one was
        preempted or waits."""
        running = self.running
        wanted = running.wanted()
        for limit in (self.config.long_prefill_token_threshold, self.budget.max_chunk):
            if limit:
                wanted = np.minimum(wanted, limit)
        if self.config.feed_back_tokens:
            wanted = share_of_step(wanted, running, self.config.max_steps_in_flight)
        num_scheduled = running.grant(wanted, budget)
        for feature in self.hooks.grant:
            num_scheduled = feature.grant(wanted, num_scheduled, budget)
        appended = self.kv_cache.grow(self._num_slots(num_scheduled), running.generation)
        if appended is None:
            return self._schedule_under_pressure(wanted, budget, now)
        self.plan.appended += appended
        return num_scheduled, False

    def _free_skipped_blocks(self) -> None:
        """Free the blocks that windowed groups no longer need, before rows get blocks."""
        running = self.running
        self.kv_cache.free_skipped(
            running.num_computed,
            running.num_tokens,
            running.generation,
            step=self.plan.step + 1,
            answered_step=self.in_flight.last_answered_step,
        )

    def _num_slots(self, num_scheduled: Int64Array) -> Int64Array:
        """(max_num_seqs,) tokens that rows need slots for, with those that a drafter writes after
        the computed ones."""
        num_tokens = self.running.num_computed + num_scheduled
        if self.config.num_lookahead_tokens:
            num_tokens[num_scheduled > 0] += self.config.num_lookahead_tokens
        return num_tokens

    def _schedule_under_pressure(
        self, wanted: Int64Array, num_left: int, now: float
    ) -> tuple[Int64Array, bool]:
        """`_schedule_running` when blocks are short, one request after the other: what features
        yield and holds are released, then the policy's victims are preempted, until the blocks
        suffice.

        The last one is not preempted while transfers own blocks, but waits for their end: without
        its own blocks it would be admitted and preempted again and again.
        """
        running = self.running
        num_scheduled = np.zeros_like(wanted)
        requests = running.requests_in_order()
        grown: dict[int, list[list[int]]] = {}
        was_preempted = False
        index = 0
        while index < len(requests) and num_left > 0:
            request = requests[index]
            row, num_computed = request.row, int(running.num_computed[request.row])
            count = min(int(wanted[row]), num_left)
            for feature in self.hooks.allowed:
                count = feature.allowed(request, num_computed, count)
            if count == 0:
                index += 1
                continue
            num_tokens = num_computed + count + self.config.num_lookahead_tokens
            while (block_ids := self.kv_cache.grow_row(row, num_tokens)) is None:
                if self._release_unneeded(is_last=len(requests) == 1):
                    continue
                if self.waits_for_transfers:
                    return num_scheduled, True
                victim_index = self.policy.pick_victim(requests)
                victim = requests.pop(victim_index)
                # Roll back what the victim got in this step.
                num_left += int(num_scheduled[victim.row])
                num_scheduled[victim.row] = 0
                grown.pop(victim.row, None)
                self.lifecycle.preempt(victim, now)
                was_preempted = True
                index -= victim_index < index
                if victim is request:
                    break
            if block_ids is None:
                continue
            for feature in self.hooks.scheduled:
                feature.scheduled(request, num_computed, count)
            grown[row] = block_ids
            num_scheduled[row] = count
            num_left -= count
            index += 1
        self.plan.appended += _appended_blocks(grown)
        return num_scheduled, was_preempted

    def _release_unneeded(self, *, is_last: bool) -> bool:
        """Release blocks of which no request needs the content; False if there are none. is_last:
        only one request is left that runs; then it waits if transfers own blocks."""
        are_owned = False
        for feature in self.hooks.yield_blocks:
            yielded = feature.yield_blocks(None, None)
            if yielded is Yielded.BLOCKS:
                return True
            are_owned |= yielded is Yielded.LATER
        if self.holds.holders and (
            self.holds.release_youngest(loaded=False)
            or (is_last and self.holds.release_youngest(loaded=True))
        ):
            return True
        self.waits_for_transfers = is_last and are_owned
        return False

    def _cache_full_blocks(self, num_scheduled: Int64Array) -> bool:
        """Cache the blocks that this plan completes; False if there are none. Not before all rows
        are scheduled: a request preempted in this step computes nothing of it. Unverified tokens
        complete no block."""
        running, full_blocks = self.running, self.kv_cache.full_blocks
        num_full = np.minimum(running.num_computed + num_scheduled, running.num_tokens)
        rows = full_blocks.rows_to_cache(num_full)
        if not len(rows):
            return False
        rows = rows[running.generation[rows].argsort()]
        step = self.plan.step + 1
        full_blocks.cache_rows(rows, num_full, running.token_ids, running.requests, step)
        return True

    # The plan

    def _build_plan(
        self, num_scheduled: Int64Array, num_tokens: int, now: float
    ) -> SchedulerOutput:
        running = self.running
        answered_step = self.in_flight.last_answered_step
        plan, loads = self.plan.build(num_scheduled, num_tokens, answered_step=answered_step)
        running.advance(num_scheduled)
        rows = running.samples(num_scheduled).nonzero()[0]
        running.num_placeholders[rows] += 1
        if not self._sampling.serves(running, rows):
            self._sampling = SamplingRows(running, rows)
        planned = PlannedStep.of(running, plan.step, self._sampling, num_scheduled, loads)
        for feature in self.hooks.built:
            feature.built(plan, planned, now)
        self._steady = self._steady_after(plan, planned, num_scheduled)
        self.in_flight.steps.append(planned)
        return plan

    def _steady_after(
        self, plan: SchedulerOutput, planned: PlannedStep, num_scheduled: Int64Array
    ) -> SteadyDecode | None:
        """The description of this plan, just built, if it is steady; the next may be, too."""
        running, last = self.running, self._steady
        if (
            not self.plan.allows_steady
            or len(plan.scheduled_rows)
            or plan.num_scheduled_tokens != running.num_rows
            or not running.num_rows
            or not planned.sampling.is_plain
        ):
            return None
        if last is not None and last.holds(running, plan.step):
            return last
        return SteadyDecode(running, planned, num_scheduled)


def share_of_step(wanted: Int64Array, running: RunningTable, num_steps: int) -> Int64Array:
    """The part of `wanted`, (max_num_seqs,) tokens, for the next of the `num_steps` steps that a
    pipeline of stages has in flight.

    A request's next token depends on the previous one, which the last stage samples and the next
    plan sends to the first stage. So a request that expects a token waits, and others fill the
    pipeline. If all decoding requests ran in one step, all would wait for it, so each step runs one
    in `num_steps` of the running requests, the first in admission order; the next steps run the
    others. Chunks of prompts need no token and are not delayed.
    """
    wanted = np.where(running.num_placeholders > 0, 0, wanted)
    order = running.order
    decoding = order[(wanted[order] > 0) & (running.num_computed >= running.num_known)[order]]
    wanted[decoding[-(-len(order) // num_steps) :]] = 0
    return wanted


def _appended_blocks(grown: dict[int, list[list[int]]]) -> list[AppendedBlocks]:
    """Blocks per row and group as columns per group."""
    appended = []
    for group in range(max(map(len, grown.values()), default=0)):
        rows: list[int] = []
        ids: list[int] = []
        for row, block_ids in grown.items():
            rows += [row] * len(block_ids[group])
            ids += block_ids[group]
        if ids:
            appended.append(AppendedBlocks(group, int32_array(rows), int32_array(ids)))
    return appended
