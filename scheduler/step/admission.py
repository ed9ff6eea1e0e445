"""Admission: moves requests from the waiting queue to rows.

A request that cannot be admitted for a reason of its own (its grammar, its adapter, a load) is
parked until an event, and the next one is tried, up to a limit per step. A shortage of tokens, rows
or blocks ends the step's admissions, because a smaller request that went first would starve a
bigger one.
"""

from dataclasses import dataclass, field
from typing import Final

from longshore.protocol.arrays import Int32Array, Int64Array
from longshore.protocol.outputs import RequestEvent
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.hooks import Attempt, Hooks, StepLoad, Yielded
from longshore.scheduler.kv_cache.blocks import ComputedBlocks
from longshore.scheduler.kv_cache.holds import Holds
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.queue.queues import WaitingRequests, try_cost
from longshore.scheduler.queue.shares import RESERVED
from longshore.scheduler.request import NOT_SCHEDULED, Hold, HoldKind, Outcome, Request
from longshore.scheduler.step.in_flight import StepsInFlight
from longshore.scheduler.step.plan_builder import PlanBuilder
from longshore.scheduler.step.running import RunningTable


class AdmissionGates:
    """Limits admissions when memory is short: running requests may use every block, but a request
    that is admitted into a full pool is soon preempted and computed twice.

    The gates close when the share of held blocks rises above `preempt_threshold`, and open when it
    falls below `admit_threshold`. While no request runs they are off; otherwise the head of the
    queue would wait forever.
    """

    def __init__(
        self,
        cache: CacheConfig,
        num_blocks: int,
        num_usable: int,
        *,
        swaps: bool = False,
        has_shares: bool = False,
    ) -> None:
        """swaps: requests are swapped out above `preempt_threshold`, so none is admitted that would
        exceed it. has_shares: blocks are reserved for tenants that hold less than their share."""
        share = max(cache.watermark, 1 - cache.preempt_threshold) if swaps else cache.watermark
        self.watermark_blocks = int(num_blocks * share)
        self.reserved_blocks = num_blocks // RESERVED if has_shares else 0
        self._num_usable = num_usable
        self._preempt_threshold = cache.preempt_threshold
        self._admit_threshold = cache.admit_threshold
        self.is_closed = False

    def has_room(
        self,
        num_needed: int,
        *,
        num_free: int,
        nothing_runs: bool,
        is_owed: bool = False,
        num_yieldable: int = 0,
    ) -> bool:
        """Whether a request that needs `num_needed` of `num_free` blocks may be admitted.
        is_owed: see `Shares`; only the watermark counts for it. num_yieldable: blocks that running
        requests can get."""
        if self.is_short(num_free + num_yieldable):
            self.is_closed = True
        elif self._usage(num_free + num_yieldable) < self._admit_threshold:
            self.is_closed = False
        if nothing_runs:
            return num_needed <= num_free
        if self.is_closed and not is_owed:
            return False
        return num_free - num_needed >= self.num_kept(is_owed=is_owed)

    def num_kept(self, *, is_owed: bool) -> int:
        """Blocks that stay free when a request is admitted while others run."""
        return max(self.watermark_blocks, 0 if is_owed else self.reserved_blocks)

    def is_short(self, num_free: int) -> bool:
        """Whether more than `preempt_threshold` of the blocks are held."""
        return self._usage(num_free) > self._preempt_threshold

    def _usage(self, num_free: int) -> float:
        return (self._num_usable - num_free) / self._num_usable


MAX_TRIED_BLOCKS: Final = 8192
"""Work of trying requests in vain, per step, in blocks as `try_cost` counts them."""


@dataclass(slots=True, kw_only=True)
class Admission:
    """Admits waiting requests.

    has_untried: this step has not tried all that could be, because it had tried enough; the planner
                 resets it.
    """

    config: SchedulerConfig
    running: RunningTable
    waiting: WaitingRequests
    holds: Holds
    kv_cache: KVCacheManager
    in_flight: StepsInFlight
    plan: PlanBuilder
    hooks: Hooks
    gates: AdmissionGates
    lifecycle: Lifecycle
    _now: float = 0.0
    has_untried: bool = False
    _num_left: int = 0
    _num_scheduled: Int64Array = field(init=False)

    def admit_waiting(self, budget: int, num_scheduled: Int64Array, now: float) -> int:
        """Admit from the head of the queue while rows, tokens and blocks last. Writes the tokens of
        admitted rows to `num_scheduled` (max_num_seqs,) and returns their sum, at most `budget`."""
        self._num_left, self._num_scheduled, self._now = budget, num_scheduled, now
        running = self.running
        self.waiting.begin_step()
        num_tries_left = MAX_TRIED_BLOCKS
        while self._num_left > 0 and running.num_rows < running.max_num_seqs:
            request = self.waiting.peek()
            if request is None or not self.plan.can_add(request):
                break
            if num_tries_left <= 0:
                self.has_untried = True
                break
            attempt = self._try(request)
            if attempt is Attempt.NO_TOKENS or (
                attempt is Attempt.NO_BLOCKS and not self.release_holds(request)
            ):
                break
            if attempt is Attempt.SET_ASIDE:
                self.waiting.set_aside()
            if attempt is not Attempt.ADMITTED:
                num_tries_left -= try_cost(request)
        self.waiting.end_step()
        return budget - self._num_left

    def _try(self, request: Request) -> Attempt:
        """Try to admit the head of the queue."""
        if (attempt := self._gate(request)) is not None:
            return attempt
        if request.hold is not None:
            return self.start(request, request.hold)
        prefix = self.kv_cache.get_computed_blocks(request)
        for feature in self.hooks.begin:
            if attempt is None:
                attempt = feature.begin(self, request, prefix, self._now)
        if attempt is None:
            attempt = self.start(request, prefix)
        for feature in self.hooks.tried:
            feature.tried(request, prefix.num_tokens, attempt)
        return attempt

    def _gate(self, request: Request) -> Attempt | None:
        """Whether a reason of its own prevents the request from starting; None if not."""
        request.waits_for = None
        if request.resume_after_step > self.in_flight.last_answered_step:
            return Attempt.SET_ASIDE
        for feature in self.hooks.gate:
            verdict = feature.gate(request)
            if isinstance(verdict, Outcome):
                self.lifecycle.end(request, verdict, self._now)
                return Attempt.ENDED
            if verdict is not None:
                return verdict
        return None

    # Blocks and a row

    def start(
        self, request: Request, source: ComputedBlocks | Hold, load: StepLoad | None = None
    ) -> Attempt:
        """Give the head of the queue the next row, with the tokens that `source` has computed and
        those that `load` loads within the step, and schedule its first chunk."""
        num_external = 0 if load is None else load.num_tokens
        if isinstance(source, Hold):
            num_computed = source.num_computed_tokens
        else:
            num_computed = min(source.num_tokens + num_external, len(request.token_ids) - 1)
        need = self._num_tokens_now(request, num_computed)
        if need == 0:
            return Attempt.NO_TOKENS
        num_slots = num_computed + need + self.config.num_lookahead_tokens
        num_slots = min(num_slots, self.config.max_model_len)
        if isinstance(source, Hold):
            tables = self._resume(request, source, num_slots)
        else:
            tables = self._allocate(request, source, num_slots, num_computed, load)
        if tables is None:
            return Attempt.NO_BLOCKS
        self._enter(request, tables, num_computed, need)
        if load is not None:
            row = request.row
            self.plan.loads.append((row, int(self.running.generation[row])))
        return Attempt.ADMITTED

    def _num_tokens_now(self, request: Request, num_computed: int) -> int:
        """Tokens that the request computes in this step after `num_computed`; 0 if it does not fit
        into the step."""
        num_tokens = len(request.token_ids) - num_computed
        if self.config.long_prefill_token_threshold:
            num_tokens = min(num_tokens, self.config.long_prefill_token_threshold)
        if num_tokens > self._num_left:
            num_tokens = self._num_left if self.config.enable_chunked_prefill else 0
        for feature in self.hooks.allowed:
            if num_tokens:
                num_tokens = feature.allowed(request, num_computed, num_tokens)
        return num_tokens

    def _allocate(
        self,
        request: Request,
        prefix: ComputedBlocks,
        num_slots: int,
        num_computed: int,
        load: StepLoad | None,
    ) -> tuple[Int32Array, ...] | None:
        """Give the next row the cached prefix and new blocks, some of which `load` fills. Returns
        the row's block tables. None, and nothing has changed, if blocks are short."""
        kv_cache, row = self.kv_cache, self.running.next_row
        num_encoder_tokens = request.num_encoder_tokens
        num_loaded = 0 if load is None else num_computed
        demand = kv_cache.demand(
            prefix, num_slots, num_loaded=num_loaded, num_encoder_tokens=num_encoder_tokens
        )
        if not self.has_room(request, demand.num_needed, num_slots):
            return None
        if load is not None:
            blocks = load.reserve(demand)
            if blocks is None:
                return None
            kv_cache.attach(row, blocks, prefix.num_tokens)
            return blocks.block_ids
        tables = kv_cache.start(row, demand)
        if tables is not None:
            kv_cache.count_lookup(request, prefix.num_tokens)
            if kv_cache.kept_states is not None:
                request.state_source = kv_cache.kept_states.source_of(prefix.state)
            self.plan.copies += kv_cache.state_copies(prefix, tables, step=self.plan.step + 1)
        return tables

    def _resume(
        self, request: Request, hold: Hold, num_slots: int
    ) -> tuple[Int32Array, ...] | None:
        """Give the next row the blocks that the request holds, and new ones; returns its block
        tables. None, and nothing has changed, if blocks are short. The gates do not apply to a
        loaded request, which has its blocks."""
        kv_cache, answered_step = self.kv_cache, self.in_flight.last_answered_step
        blocks, num_computed = hold.blocks, hold.num_computed_tokens
        is_loaded = hold.kind is HoldKind.LOADED
        if not is_loaded:
            num_new = kv_cache.num_blocks_to_resume(blocks, num_computed, num_slots, answered_step)
            if not self.has_room(request, num_new, num_slots):
                return None
        row, step = self.running.next_row, self.plan.step + 1
        copies = kv_cache.resume(
            row, blocks, num_computed, num_slots, step=step, answered_step=answered_step
        )
        if copies is None:
            return None
        self.holds.take(request)
        self.plan.copies += copies
        self.plan.zero_block_ids += hold.unwritten_block_ids
        if not is_loaded:  # hits of a load were counted when it began
            request.num_external_tokens = 0
            kv_cache.count_lookup(request, num_computed)
        return kv_cache.block_ids(row)

    def has_room(self, request: Request, num_needed: int, num_slots: int) -> bool:
        """Whether the gates admit a request that needs `num_needed` free blocks for `num_slots`
        slots."""
        kv_cache = self.kv_cache
        if self.config.scheduler_reserve_full_isl and self.running.num_rows:
            num_tokens = max(num_slots, len(request.token_ids))
            num_needed += kv_cache.num_blocks_for(num_tokens) - kv_cache.num_blocks_for(num_slots)
        return self.gates.has_room(
            num_needed,
            num_free=kv_cache.num_free_blocks,
            nothing_runs=self.running.num_rows == 0,
            is_owed=request.is_owed,
            num_yieldable=kv_cache.num_yieldable,
        )

    def _enter(
        self, request: Request, tables: tuple[Int32Array, ...], num_computed: int, need: int
    ) -> None:
        """Move the head of the queue to the next row, which has these block tables."""
        self.waiting.pop()
        row, step = self.running.next_row, self.plan.step + 1
        if request.num_cached_tokens == NOT_SCHEDULED:
            request.num_cached_tokens = min(num_computed, request.num_prompt_tokens)
        start = self.running.admit(request, num_computed, tables)
        request.events.append((RequestEvent.SCHEDULED, self._now))
        self.plan.add(request, start)
        for feature in self.hooks.admitted:
            feature.admitted(request, num_computed, need)
        self.kv_cache.full_blocks.cache_row(
            row, request, request.token_ids, num_computed + need, step=step
        )
        self._num_scheduled[row] = need
        self._num_left -= need
        self.lifecycle.log.admitted(request, step=step, num_computed=num_computed, now=self._now)

    # What waiting requests hold

    @property
    def is_idle(self) -> bool:
        """No request runs, and no output is expected that could change anything."""
        return self.running.num_rows == 0 and not self.in_flight.steps

    def release_holds(self, request: Request) -> bool:
        """Release something that is held for `request`; False if there is nothing. What features
        yield to it comes first, then holds of forks and sessions. If nothing else can run, all
        else that features yield and the holds of loaded requests follow, and finally what
        `request` itself has, which may need fewer blocks without it."""
        if not self.gates.is_closed:
            for feature in self.hooks.yield_blocks:
                if feature.yield_blocks(request, None) is Yielded.BLOCKS:
                    return True
        if self.holds.release_youngest(loaded=False, besides=request):
            return True
        if not self.is_idle:
            return False
        for feature in self.hooks.yield_blocks:
            if feature.yield_blocks(None, request) is Yielded.BLOCKS:
                return True
        return self.holds.release_youngest(
            loaded=True, besides=request
        ) or self.holds.release_youngest(loaded=False)
