"""Who runs in the next step, on which blocks: policy without I/O, clock or tensors.

Each request has a number of computed tokens, and every step gives it tokens until it has caught up
with those it has; there is no prefill phase and no decode phase. Running requests are columns
(`RunningTable`), so the common step is a handful of vector operations; what happens to one request
(admission, preemption, the end) is ordinary code. The design is that of vLLM V1's scheduler.
"""

import numpy as np

from longshore.protocol.arrays import Int32Array, Int64Array, int32_array
from longshore.protocol.client import (
    AddRequest,
    EngineOutputs,
    FinishReason,
    SchedulerStats,
    StopFound,
)
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.protocol.plan import AppendedBlocks, SchedulerOutput
from longshore.protocol.results import ModelRunnerOutput
from longshore.scheduler.answers import Answers
from longshore.scheduler.budget import StepBudget
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.in_flight import PlannedStep, StepsInFlight
from longshore.scheduler.kv_cache_manager import KVCacheManager
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.outputs import OutputBuckets
from longshore.scheduler.plan_builder import PlanBuilder
from longshore.scheduler.policy import POLICIES
from longshore.scheduler.request import NOT_SCHEDULED, Request
from longshore.scheduler.running import RunningTable
from longshore.scheduler.waiting import WaitingRequests


class Scheduler:
    """Requests in, plans out, answers in, tokens out.

    `schedule` and `update_from_output` take the time as an argument and are deterministic: the same
    calls in the same order give the same plans.

    kv_cache: the groups and the number of blocks that the workers agreed on.
    Raises ConfigError if one request of `max_model_len` does not fit the empty pool.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        kv_cache: KVCacheConfig,
        hash_seed: bytes,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        epoch: int = 1,
        verify_plan: bool = False,
    ) -> None:
        check_pool_size(config, kv_cache)
        self.config = config
        self._policy = POLICIES[config.policy]()
        self.running = RunningTable(config.max_num_seqs, config.max_model_len)
        self.waiting = WaitingRequests(self._policy)
        self.kv_cache = KVCacheManager(
            cache,
            kv_cache,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            hash_seed=hash_seed,
        )
        self._plan = PlanBuilder(
            self.running,
            self.kv_cache,
            epoch=epoch,
            verify_plan=verify_plan,
            feed_back_tokens=config.feed_back_tokens,
        )
        self._in_flight = StepsInFlight()
        self._outputs = OutputBuckets()
        self._lifecycle = Lifecycle(
            config,
            running=self.running,
            waiting=self.waiting,
            kv_cache=self.kv_cache,
            in_flight=self._in_flight,
            plan=self._plan,
            outputs=self._outputs,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
        )
        self._answers = Answers(
            running=self.running,
            kv_cache=self.kv_cache,
            in_flight=self._in_flight,
            lifecycle=self._lifecycle,
            outputs=self._outputs,
            epoch=epoch,
            vocab_size=vocab_size,
        )
        self._sum_in_flight = 0
        self._num_steps_reported = 0

    # Requests in

    def add_request(self, message: AddRequest, *, client: int, now: float) -> None:
        """Queue a request; one that cannot be served is answered with the reason at once."""
        self._lifecycle.queue(message, client=client, now=now)

    def abort_requests(self, client: int, handles: Int32Array, now: float) -> None:
        """The client lost interest. Handles that have ended already are ignored."""
        for handle in handles.tolist():
            request = self._lifecycle.get(client, handle)
            if request is not None:
                self._lifecycle.end(request, FinishReason.ABORTED)

    def abort_client(self, client: int, now: float) -> None:
        """A whole client is gone."""
        self.abort_requests(client, int32_array(self._lifecycle.handles_of(client)), now)

    def stop_found(self, client: int, message: StopFound, now: float) -> None:
        """The gateway found a stop string: the request ends, cut to `num_tokens` output tokens."""
        request = self._lifecycle.get(client, message.handle)
        if request is not None:
            self._lifecycle.end_cut(request, message.num_tokens)

    # A step

    def schedule(self, now: float) -> SchedulerOutput | None:
        """The next plan; None while enough plans are unanswered or there is nothing to plan."""
        if len(self._in_flight) >= self.config.max_steps_in_flight:
            return None
        budget = StepBudget(self.config.token_budget, self.config.long_prefill_token_threshold)
        num_scheduled, nobody_preempted = self._schedule_running(budget)
        self._name_running_blocks(num_scheduled)
        if nobody_preempted:
            self._admit_waiting(budget, num_scheduled)
        if budget.num_left == budget.num_total and not self._plan.has_drops:
            return None
        return self._build_plan(num_scheduled)

    def _schedule_running(self, budget: StepBudget) -> tuple[Int64Array, bool]:
        """Tokens per row for the requests that run, and whether all of them still do."""
        running = self.running
        available = np.minimum(running.num_tokens + running.num_placeholders, running.last_computed)
        wanted = budget.cap(available - running.num_computed)
        num_scheduled = budget.cut(wanted, running)
        appended = self.kv_cache.grow(running.num_computed + num_scheduled, running.generation)
        if appended is None:
            return self._schedule_under_pressure(wanted, budget)
        self._plan.appended += appended
        budget.spend(int(num_scheduled.sum()))
        return num_scheduled, True

    def _schedule_under_pressure(
        self, wanted: Int64Array, budget: StepBudget
    ) -> tuple[Int64Array, bool]:
        """The same, one request after the other, when the blocks do not suffice for all: the
        policy's victim gives up its blocks, and what it took in this step, until they do."""
        running = self.running
        num_scheduled = np.zeros_like(wanted)
        requests = running.requests_in_order()
        grown: list[tuple[int, list[list[int]]]] = []
        nobody_preempted = True
        index = 0
        while index < len(requests) and budget.num_left > 0:
            request = requests[index]
            row = request.row
            count = min(int(wanted[row]), budget.num_left)
            block_ids = self.kv_cache.grow_row(row, int(running.num_computed[row]) + count)
            while block_ids is None:
                victim_index = self._policy.pick_victim(requests)
                victim = requests.pop(victim_index)
                victim_row = victim.row
                budget.give_back(int(num_scheduled[victim_row]))
                num_scheduled[victim_row] = 0
                grown = [item for item in grown if item[0] != victim_row]
                self._lifecycle.preempt(victim)
                nobody_preempted = False
                index -= victim_index < index
                if victim is request:
                    break
                block_ids = self.kv_cache.grow_row(row, int(running.num_computed[row]) + count)
            if block_ids is None:
                continue
            grown.append((row, block_ids))
            num_scheduled[row] = count
            budget.spend(count)
            index += 1
        self._plan.appended += _appended_blocks(grown)
        return num_scheduled, nobody_preempted

    def _admit_waiting(self, budget: StepBudget, num_scheduled: Int64Array) -> None:
        """Admit from the head of the queue while rows, tokens and blocks last."""
        while budget.num_left > 0 and not self.running.is_full:
            request = self.waiting.peek()
            if request is None or not self._plan.can_add(request.num_tokens):
                break
            if request.resume_after_step > self._in_flight.last_answered_step:
                self.waiting.set_aside()
                continue
            count = self._admit(request, budget)
            if count == 0:
                break
            num_scheduled[request.row] = count
            budget.spend(count)
        self.waiting.end_step()

    def _admit(self, request: Request, budget: StepBudget) -> int:
        """Put the head of the queue on a row; returns its tokens of this step, 0 if it waits."""
        computed = self.kv_cache.get_computed_blocks(request)
        need = budget.cap_one(request.num_tokens - computed.num_tokens)
        if need > budget.num_left:
            if not self.config.enable_chunked_prefill:
                return 0
            need = budget.num_left
        num_tokens = computed.num_tokens + need
        row = self.running.next_row
        if not self.kv_cache.start(row, request, computed, num_tokens):
            return 0
        self.waiting.pop()
        if request.num_cached_tokens == NOT_SCHEDULED:
            request.num_cached_tokens = min(computed.num_tokens, request.num_prompt_tokens)
        start = self.running.admit(request, computed.num_tokens, self.kv_cache.block_ids(row))
        self._plan.add(start)
        self.kv_cache.cache_blocks(row, request, request.token_ids[:num_tokens])
        return need

    def _name_running_blocks(self, num_scheduled: Int64Array) -> None:
        """Make findable what this plan completes. Not earlier: a request preempted in this step
        computes nothing of what it had been given. Tokens not verified yet name nothing."""
        running = self.running
        num_named = np.minimum(running.num_computed + num_scheduled, running.num_tokens)
        rows = self.kv_cache.rows_to_name(num_named)
        for row in rows[np.argsort(running.generation[rows])].tolist():
            token_ids = running.tokens_of(row, int(num_named[row]))
            self.kv_cache.cache_blocks(row, running.request_on(row), token_ids)

    def _build_plan(self, num_scheduled: Int64Array) -> SchedulerOutput:
        running = self.running
        plan = self._plan.build(num_scheduled)
        running.advance(num_scheduled)
        rows = np.flatnonzero(running.samples(num_scheduled))
        running.num_placeholders[rows] += 1
        self._in_flight.add(PlannedStep(plan.step, rows, running.generation[rows]))
        self._sum_in_flight += len(self._in_flight)
        return plan

    # An answer

    def update_from_output(self, output: ModelRunnerOutput, now: float) -> None:
        """Apply the answer to the oldest unanswered plan.

        An answer of another epoch is counted and dropped. Raises BadAnswer for one that fits no
        plan, and changes nothing then.
        """
        self._answers.apply(output)

    # What others look at

    def take_outputs(self) -> list[tuple[int, EngineOutputs]]:
        """(client, message) for each client with news since the last call."""
        return self._outputs.take()

    def has_unfinished_requests(self) -> bool:
        """Somebody still waits for tokens."""
        return len(self._lifecycle) > 0

    @property
    def num_steps_in_flight(self) -> int:
        """Plans not answered yet."""
        return len(self._in_flight)

    @property
    def num_steps(self) -> int:
        """Plans built since the start."""
        return self._plan.step

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return self.running.num_rows, len(self.waiting)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while any block is held."""
        return self.kv_cache.reset_prefix_cache()

    def make_stats(self, num_bad_messages: int = 0) -> SchedulerStats:
        """The state now; the mean of steps in flight starts anew with each call."""
        num_steps = self._plan.step - self._num_steps_reported
        steps_in_flight = self._sum_in_flight / num_steps if num_steps else 0.0
        self._num_steps_reported, self._sum_in_flight = self._plan.step, 0
        num_running, num_waiting = self.get_request_counts()
        prefixes = self.kv_cache.stats
        return SchedulerStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_blocks=self.kv_cache.num_blocks,
            num_free_blocks=self.kv_cache.num_free_blocks,
            kv_usage=self.kv_cache.usage,
            steps_in_flight=steps_in_flight,
            num_steps=self._plan.step,
            num_preemptions=self._lifecycle.num_preemptions,
            num_prefix_queried_tokens=prefixes.num_queried_tokens,
            num_prefix_hit_tokens=prefixes.num_hit_tokens,
            num_preempted_queried_tokens=prefixes.num_preempted_queried_tokens,
            num_preempted_hit_tokens=prefixes.num_preempted_hit_tokens,
            num_stale_tokens=self._answers.num_stale_tokens,
            num_bad_messages=num_bad_messages,
        )


def check_pool_size(config: SchedulerConfig, kv_cache: KVCacheConfig) -> None:
    """Raise ConfigError if one request of the longest length does not fit the empty pool: it could
    never finish, and everything behind it would wait for ever."""
    needed = sum(group.spec.max_blocks(config.max_model_len) for group in kv_cache.groups)
    usable = kv_cache.num_blocks - 1
    if needed > usable:
        raise ConfigError(
            f"a request of max_model_len={config.max_model_len} tokens needs {needed} blocks, but "
            f"the pool has {usable} usable ones. Lower max_model_len or raise num_blocks."
        )


def _appended_blocks(grown: list[tuple[int, list[list[int]]]]) -> list[AppendedBlocks]:
    """Blocks per row and group as columns per group."""
    if not grown:
        return []
    appended = []
    for group in range(len(grown[0][1])):
        rows = [row for row, block_ids in grown for _ in block_ids[group]]
        ids = [block_id for _, block_ids in grown for block_id in block_ids[group]]
        if ids:
            appended.append(
                AppendedBlocks(group, np.array(rows, np.int32), np.array(ids, np.int32))
            )
    return appended
