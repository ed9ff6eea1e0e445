"""Recovery from wrong KV: uncache it, and rewind the requests that used it.

A cached block is provisional until the output of its step is applied. After a failed load or logits
that are not finite, every block computed from the bad position on is invalid, and so is every
request that holds one of them. This includes requests that found it in the prefix cache while the
step was in flight, and past occupants of rows, whose blocks can still be found.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from longshore.protocol.arrays import BoolArray, Int32Array, int32_array
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.protocol.logs.records import fields
from longshore.protocol.outputs import FinishReason, ModelRunnerOutput
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.hooks import Hooks, SchedulerFeature
from longshore.scheduler.kv_cache.holds import Holds
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.request import Outcome, Request
from longshore.scheduler.step.in_flight import PastOccupant, PlannedStep, StepsInFlight
from longshore.scheduler.step.plan_builder import PlanBuilder
from longshore.scheduler.step.running import RunningTable
from longshore.scheduler.step.token_budget import TokenBudget

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Holder:
    """A request with the blocks of its row, or of the row that it lost. num_hit_tokens: leading
    tokens that other requests computed; num_good: leading tokens whose KV is valid; state_source:
    see `Request`."""

    request: Request
    generation: int
    is_running: bool
    tables: tuple[Int32Array, ...]
    num_hit_tokens: int
    num_good: int
    state_source: tuple[int, int] | None


@dataclass(slots=True, kw_only=True, eq=False)
class Recovery(SchedulerFeature):
    """Finds the requests that bad blocks have made invalid, and rewinds their rows."""

    config: SchedulerConfig
    running: RunningTable
    holds: Holds
    kv_cache: KVCacheManager
    in_flight: StepsInFlight
    plan: PlanBuilder
    hooks: Hooks
    lifecycle: Lifecycle
    budget: TokenBudget
    num_rewinds: int = 0
    # Nothing of the plans up to this one is valid; the later ones have been planned with this.
    _failed_through: int = 0

    def fail_loads(self, failed: Int32Array, planned: PlannedStep, now: float) -> None:
        """Loads failed to fill these blocks: loads within the answered step, or background loads
        whose failures were reported with it."""
        sources = {}
        is_other = np.ones(len(failed), np.bool_)
        for row, generation in planned.loads:
            tables = self._tables(row, generation)
            is_other &= ~np.isin(failed, np.concatenate(tables))
            num_good = self.kv_cache.num_before(tables, failed)
            if num_good is not None:  # 0 if a state was not loaded, but prefix hits are valid
                sources[generation] = max(num_good, self._num_hit_tokens(row, generation))
        for feature in self.hooks.bad_blocks:
            feature.bad_blocks(failed[is_other], are_written=False)
        if not sources:
            about = fields(step_id=planned.step, blocks=len(failed))
            logger.warning("a worker reported failed blocks that no load was filling", extra=about)
            return
        fails = self.config.load_failure_policy == "fail"
        reason = "its KV could not be loaded" if fails else None
        self._invalidate(sources, planned.step, now, reason=reason)

    def _tables(self, row: int, generation: int) -> tuple[Int32Array, ...]:
        occupant = self.in_flight.occupant(row, generation)
        if isinstance(occupant, PastOccupant):
            return occupant.tables
        return self.kv_cache.block_ids(row)

    def _num_hit_tokens(self, row: int, generation: int) -> int:
        occupant = self.in_flight.occupant(row, generation)
        if isinstance(occupant, PastOccupant):
            return occupant.num_hit_tokens
        return occupant.request.num_hit_tokens

    def fail_not_finite(self, output: ModelRunnerOutput, planned: PlannedStep, now: float) -> None:
        """The logits of `output.nan_rows` are not finite. Rows are handled in admission order: a
        later one that found blocks of an earlier one is rewound, and its own output is void."""
        num_nans = dict(zip(output.nan_rows.tolist(), output.num_nans.tolist(), strict=True))
        rows, generations = planned.sampling.rows, planned.sampling.generations
        indices = np.flatnonzero(np.isin(rows, output.nan_rows))
        for index in indices[np.argsort(generations[indices])].tolist():
            row, generation = int(rows[index]), int(generations[index])
            self._fail_row(row, generation, num_nans[row], planned.step, now)

    def _fail_row(self, row: int, generation: int, num_nans: int, step: int, now: float) -> None:
        """Invalidate everything that the row's request computed. Its prefix hits stay valid: other
        requests computed finite logits from them."""
        occupant = self.in_flight.occupant(row, generation)
        request, num_hit_tokens = occupant.request, self._num_hit_tokens(row, generation)
        is_void = step <= occupant.void_through and not request.is_finished
        if is_void and not isinstance(occupant, PastOccupant):  # it was rewound
            return
        if not (is_void or request.is_finished):
            self.lifecycle.log.not_finite(request, step=step, num_nans=num_nans)
            request.num_nans_in_logits = num_nans
            text = (
                "the model produced logits that are not finite numbers for this request, or its "
                "settings, or its grammar, forbid every token"
            )
            self.lifecycle.end(request, Outcome(FinishReason.ERROR, text, step=step), now)
        self._invalidate({generation: num_hit_tokens}, step, now)

    def begin_epoch(self, epoch: int) -> None:
        """The steps of new workers are counted from 1 again."""
        self._failed_through = 0

    def fail_step(self, step: int, now: float) -> None:
        """The device had no memory for a step. Later plans are smaller, and everything of the plans
        in flight is recomputed."""
        if step <= self._failed_through:
            return
        self._failed_through = self.in_flight.newest_step
        requests = self.running.requests_in_order()
        sources = {
            int(self.running.generation[request.row]): self._num_certain_tokens(request)
            for request in requests
        }
        for generation, past in self.in_flight.past_occupants():
            sources[generation] = past.num_hit_tokens
        self.lower_demand(step, now)
        self._invalidate(sources, step, now)

    def lower_demand(self, step: int, now: float) -> None:
        """The device had no memory for a step. Later plans get half as many tokens; if they cannot
        have fewer, the newest request ends."""
        requests = self.running.requests_in_order()
        if self.budget.halve():
            logger.warning(
                "the device had no memory for a step; from now on a step has at most %d tokens. "
                "Lower --max-num-scheduled-tokens, or the memory of the KV cache",
                self.budget.num_tokens,
                extra=fields(step_id=step),
            )
        elif requests:
            text = "the device has no memory to compute this request, even in the smallest step"
            outcome = Outcome(FinishReason.ERROR, text, step=step)
            self.lifecycle.end(requests[-1], outcome, now)

    def _num_certain_tokens(self, request: Request) -> int:
        """Leading tokens of a running request that no plan in flight computes: each plan has at
        most the budget. Pooled vectors are sums that are only begun anew."""
        if request.options.pooling is not None:
            return request.num_hit_tokens
        num_in_flight = len(self.in_flight.steps) * self.budget.num_tokens
        num_computed = int(self.running.num_computed[request.row])
        return max(request.num_hit_tokens, num_computed - num_in_flight)

    def _invalidate(
        self, sources: dict[int, int], step: int, now: float, *, reason: str | None = None
    ) -> None:
        """Recompute everything that depends on bad KV; if there is a `reason`, the requests that
        hold some of it fail with it. step: the one whose output reported the bad KV. sources: see
        `_find_invalid`."""
        bad, running = self._find_invalid(sources)
        block_ids = int32_array(np.flatnonzero(bad))
        self.kv_cache.uncache_blocks(block_ids)
        self.plan.uncached += block_ids.tolist()
        # The tokens that past occupants still expect may depend on bad blocks.
        self.in_flight.void_past_occupants()
        for feature in self.hooks.bad_blocks:
            feature.bad_blocks(block_ids, are_written=True)
        for request in list(self.holds):
            hold = request.hold
            if hold is not None and any(bad[ids].any() for ids in hold.blocks.block_ids):
                self.holds.release(request)
                request.asks_connector = True
        for request, num_good in running.items():
            if reason is not None:
                self.lifecycle.end(request, Outcome(FinishReason.ERROR, reason, step=step), now)
            else:
                self._rewind(request, num_good)

    def _find_invalid(self, sources: dict[int, int]) -> tuple[BoolArray, dict[Request, int]]:
        """All blocks computed from a bad position on, (num_blocks,) bool, and the running requests
        that hold one of them, with the number of leading tokens whose KV is valid.

        sources: generation of a request that ran while the plan was unanswered -> its leading
        tokens whose KV is valid.

        Other holders are invalid from the first invalid block that they found in the prefix cache.
        Blocks that they computed after it may have been found in turn, so this repeats until
        nothing is added. A block that has been allocated again is no hit of its new owner, which is
        not affected.
        """
        bad = np.zeros(self.kv_cache.num_blocks, np.bool_)
        holders = list(self._holders(sources))
        invalid = [holder for holder in holders if holder.generation in sources]
        for holder in invalid:
            self._mark(holder, bad)
        has_grown = True
        while has_grown:
            has_grown = False
            for holder in holders:
                num_good = self._num_good_hits(holder, bad)
                if _began_with_bad_state(holder, invalid):
                    num_good = min(num_good, holder.num_hit_tokens)
                if num_good < holder.num_good:
                    holder.num_good = num_good
                    self._mark(holder, bad)
                    invalid.append(holder)
                    has_grown = True
        return bad, {holder.request: holder.num_good for holder in invalid if holder.is_running}

    def _rewind(self, request: Request, num_good: int) -> None:
        """Rewind a running request to the last common block boundary of all groups within its first
        `num_good` tokens."""
        row, kv_cache = request.row, self.kv_cache
        newest_step = self.in_flight.newest_step
        num_tokens = min(num_good, int(self.running.num_tokens[row]) - 1)
        num_tokens -= num_tokens % math.lcm(*kv_cache.block_sizes)
        num_tokens = kv_cache.resume_point(kv_cache.block_ids(row), num_tokens)
        kv_cache.truncate(row, num_tokens, newest_step)
        request.num_hit_tokens = min(request.num_hit_tokens, num_tokens)
        self.num_rewinds += 1
        self.plan.rewound[row] = self.running.rewind_row(row, num_tokens, newest_step)
        self.lifecycle.log.rewound(request, step=newest_step, num_tokens=num_tokens)

    def _holders(self, sources: dict[int, int]) -> Iterator[_Holder]:
        """Running requests and past occupants, the latter without the blocks that were allocated
        again since, because those have other content now."""
        running, longest_block = self.running, max(self.kv_cache.block_sizes)
        is_reallocated = np.zeros(self.kv_cache.num_blocks, np.bool_)
        for request in running.requests_in_order():
            generation = int(running.generation[request.row])
            num_good = sources.get(generation, int(running.num_computed[request.row]))
            tables = self.kv_cache.block_ids(request.row)
            began = request.num_hit_tokens, num_good, request.state_source
            holder = _Holder(request, generation, True, tables, *began)
            for block_ids in self._allocated_for(holder):
                is_reallocated[block_ids] = True
            yield holder
        for generation, past in reversed(self.in_flight.past_occupants()):  # the last one first
            num_good = sources.get(generation, max(map(len, past.tables)) * longest_block)
            tables = tuple([table.copy() for table in past.tables])
            began = past.num_hit_tokens, num_good, past.state_source
            holder = _Holder(past.request, generation, False, tables, *began)
            for block_ids in self._allocated_for(holder):
                block_ids[is_reallocated[block_ids]] = NULL_BLOCK
                is_reallocated[block_ids] = True
            yield holder

    def _allocated_for(self, holder: _Holder) -> Iterator[Int32Array]:
        """Views of the holder's tables without its prefix hits: blocks allocated for it."""
        for table, size in zip(holder.tables, self.kv_cache.block_sizes, strict=True):
            yield table[holder.num_hit_tokens // size :]

    def _mark(self, holder: _Holder, bad: BoolArray) -> None:
        for table, size in zip(holder.tables, self.kv_cache.block_sizes, strict=True):
            bad[table[holder.num_good // size :]] = True
        if self.kv_cache.kept_states is not None:
            bad[self.kv_cache.kept_states.kept_by(holder.generation, holder.num_good)] = True
        bad[NULL_BLOCK] = False

    def _num_good_hits(self, holder: _Holder, bad: BoolArray) -> int:
        """Leading tokens of the holder before the first bad block that it found."""
        num_good = holder.num_good
        for table, size in zip(holder.tables, self.kv_cache.block_sizes, strict=True):
            is_bad = bad[table[: holder.num_hit_tokens // size]]
            if is_bad.any():
                num_good = min(num_good, int(is_bad.argmax()) * size)
        return num_good


def _began_with_bad_state(holder: _Holder, invalid: Iterable[_Holder]) -> bool:
    """Whether the row began with a copy of a state that an invalid one has computed, although its
    prefix hits may be blocks of others."""
    if holder.state_source is None:
        return False
    generation, num_tokens = holder.state_source
    return any(each.generation == generation and each.num_good < num_tokens for each in invalid)
