"""From the waiting queue onto rows: who is next, what may keep it out, and what it starts with.

A request that cannot be admitted for a reason of its own (its grammar, its adapter, a load) is set
aside and the next is tried; want of tokens, rows or blocks ends the step's admissions, because a
smaller request that slips past would starve a bigger one.
"""

import enum
from typing import Final

from longshore.connectors.base import AskLater, Match, Matched
from longshore.protocol.arrays import Int64Array
from longshore.protocol.outputs import FinishReason, RequestEvent
from longshore.scheduler.features.grammar import GrammarError, StructuredOutputs
from longshore.scheduler.features.transfers import num_blocks_of
from longshore.scheduler.kv_cache.manager import (
    BlockDemand,
    ComputedBlocks,
    HeldBlocks,
)
from longshore.scheduler.lifecycle import Lifecycle, view_of
from longshore.scheduler.parts import Parts
from longshore.scheduler.request import NOT_SCHEDULED, Request, RequestStatus
from longshore.scheduler.step.budget import StepBudget
from longshore.scheduler.step.plan_builder import PlanBuilder


class Outcome(enum.Enum):
    """What trying the head of the queue came to."""

    ADMITTED = enum.auto()
    SET_ASIDE = enum.auto()
    PARKED = enum.auto()
    ENDED = enum.auto()
    NO_TOKENS = enum.auto()
    NO_ROOM = enum.auto()


_NOTHING: Final = Matched(0)


class Admission:
    """One step's admissions after the other."""

    def __init__(
        self,
        parts: Parts,
        plan: PlanBuilder,
        lifecycle: Lifecycle,
        structured: StructuredOutputs,
    ) -> None:
        self._config = config = parts.config
        self._running = parts.running
        self._waiting = parts.waiting
        self._forks = parts.forks
        self._kv_cache = kv_cache = parts.kv_cache
        self._in_flight = parts.in_flight
        self._gates = parts.gates
        self._loras = parts.loras
        self._encoder = parts.encoder
        self._transfers = parts.transfers
        self._connector = parts.connector
        self._plan = plan
        self._lifecycle = lifecycle
        self._structured = structured
        self._max_loading_blocks = config.max_loading_blocks or kv_cache.num_blocks // 2
        self._loads_are_full = False
        self._asked: tuple[Request, int, Match] | None = None
        self._num_loads = 0
        self.num_external_queried_tokens = 0
        self.num_external_hit_tokens = 0

    def admit_waiting(self, budget: StepBudget, num_scheduled: Int64Array, now: float) -> None:
        """Admit from the head of the queue while rows, tokens and blocks last."""
        self._budget, self._num_scheduled, self._now = budget, num_scheduled, now
        self._loads_are_full = False
        self._asked = None
        while budget.num_left > 0 and not self._running.is_full:
            request = self._waiting.peek()
            if request is None or not self._plan.can_add(request):
                break
            outcome = self._try(request)
            if outcome is Outcome.SET_ASIDE:
                self._waiting.set_aside()
            elif outcome is Outcome.PARKED:
                self._waiting.park_head()
            is_over = outcome is Outcome.NO_TOKENS
            if outcome is Outcome.NO_ROOM:
                is_over = not self._reclaim_blocks(request)
            if is_over:
                break
        self._waiting.end_step()

    def _try(self, request: Request) -> Outcome:
        request.waits_for = None
        if request.resume_after_step > self._in_flight.last_answered_step:
            return Outcome.SET_ASIDE
        try:
            if self._is_blocked(request):
                return Outcome.SET_ASIDE
        except GrammarError as error:
            self._lifecycle.end(request, FinishReason.ERROR, message=str(error))
            return Outcome.ENDED
        if request.lora is not None and not self._loras.has_slot(request.lora.name):
            return Outcome.SET_ASIDE
        if request.held is not None:
            if self._forks.holds(request):
                return self._start_holder(request, request.held)
            return self._start_loaded(request, request.held)
        if request in self._forks and self._forks.must_wait(request):
            return Outcome.PARKED
        local = self._kv_cache.get_computed_blocks(request)
        if request in self._forks:
            outcome = self._start_fork(request, local.num_tokens)
            if outcome is not None:
                return outcome
        if self._connector is None:
            return self._start(request, local, 0)
        match = self._ask_connector(request, local.num_tokens)
        if isinstance(match, AskLater):
            request.waits_for = "its connector, which does not know yet what it can bring"
            return Outcome.SET_ASIDE
        num_external = min(match.num_tokens, request.num_tokens - local.num_tokens)
        if match.is_async and num_external > 0:
            num_slots = min(local.num_tokens + num_external + 1, request.num_tokens)
            if self._kv_cache.num_blocks_for(num_slots) <= self._max_loading_blocks:
                outcome = self._begin_load(request, local, num_external)
                while outcome is Outcome.NO_ROOM and self._reclaim_blocks(request):
                    outcome = self._begin_load(request, local, num_external)
                if outcome is not Outcome.NO_ROOM or not self._is_idle:
                    return outcome
            num_external = 0  # this load can never begin, or not before another that may not end
        return self._start(request, local, num_external)

    def _is_blocked(self, request: Request) -> bool:
        """Whether what the request waits for has not come. Raises GrammarError."""
        waits_for_grammar = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        return request.status is waits_for_grammar and not self._structured.try_promote(request)

    def _ask_connector(self, request: Request, num_local: int) -> Matched | AskLater:
        is_busy = self._transfers.has(request.request_id)  # a load that nobody waits for any more
        may_ask = request.asks_connector and not request.must_compute_prompt and not is_busy
        if self._connector is None or not may_ask:
            return _NOTHING
        if self._asked is not None and self._asked[:2] == (request, num_local):
            return self._asked[2]  # tried again, because others gave up blocks
        match = self._connector.get_num_new_matched_tokens(view_of(request), num_local)
        self._asked = (request, num_local, match)
        if isinstance(match, Matched) and match.num_tokens < 0:
            raise ValueError(f"the connector matched {match.num_tokens} tokens")
        return match

    def _count_hits(self, request: Request, num_local: int, num_external: int) -> None:
        request.num_hit_tokens = num_local
        self._kv_cache.count_lookup(request, num_local)
        if self._connector is not None:
            self.num_external_queried_tokens += request.num_tokens - num_local
            self.num_external_hit_tokens += num_external
            request.num_external_tokens = num_external

    def _need(self, request: Request, num_wanted: int, num_computed: int) -> int:
        """Tokens of this step for a request that wants so many behind those computed; 0 if it does
        not fit the step."""
        budget = self._budget
        need = budget.cap_one(num_wanted)
        if need > budget.num_left:
            if not self._config.enable_chunked_prefill:
                return 0
            need = budget.num_left
        if request.multimodal:
            need = self._encoder.would_limit(request, num_computed, need)
        return self._kv_cache.aligned_chunk(num_computed, need)

    @property
    def _is_idle(self) -> bool:
        """Nothing runs, and no answer is due that could change anything."""
        return self._running.num_rows == 0 and len(self._in_flight) == 0

    def _reclaim_blocks(self, request: Request) -> bool:
        """Whether somebody made room: who only holds blocks; if nothing else can run, whose load is
        over, or in the end the request itself, which may need more with a hold than without."""
        if self._forks.release_youngest(besides=request):
            return True
        if not self._is_idle:
            return False
        if self._lifecycle.release_youngest_load(besides=request):
            return True
        return self._forks.release_youngest()

    def _has_room(self, num_needed: int) -> bool:
        return self._gates.has_room(
            num_needed,
            num_free=self._kv_cache.num_free_blocks,
            usage=self._kv_cache.usage,
            nothing_runs=self._running.num_rows == 0,
        )

    def _demand(
        self, request: Request, local: ComputedBlocks, num_slots: int, num_loaded: int
    ) -> BlockDemand:
        """What the request needs for so many tokens, `num_loaded` of them loaded or found."""
        return self._kv_cache.demand(
            local,
            num_slots,
            num_loaded=num_loaded,
            num_encoder_tokens=request.num_encoder_tokens,
        )

    def _has_room_for(self, request: Request, demand: BlockDemand, num_slots: int) -> bool:
        """Whether there is room for what the request, which needs so many slots now, demands."""
        num_later = 0
        if self._config.scheduler_reserve_full_isl and self._running.num_rows:
            kv_cache, num_tokens = self._kv_cache, max(num_slots, request.num_tokens)
            num_later = kv_cache.num_blocks_for(num_tokens) - kv_cache.num_blocks_for(num_slots)
        return self._has_room(demand.num_blocks + num_later) or (
            demand.computed.num_tokens > 0
            and self._has_room(self._kv_cache.num_blocks_needed(demand) + num_later)
        )

    def _num_slots(self, num_tokens: int) -> int:
        """Tokens to have slots for, so that a drafter can write behind `num_tokens`."""
        return min(num_tokens + self._config.num_lookahead_tokens, self._config.max_model_len)

    def _start(self, request: Request, local: ComputedBlocks, num_external: int) -> Outcome:
        """A request with no KV of its own takes a row: cached prefix, external tokens that are
        loaded within the step, and its first chunk."""
        num_tokens = request.num_tokens
        num_computed = min(local.num_tokens + num_external, num_tokens - 1)
        need = self._need(request, num_tokens - num_computed, num_computed)
        if need == 0:
            return Outcome.NO_TOKENS
        num_slots = self._num_slots(num_computed + need)
        row = self._running.next_row
        demand = self._demand(request, local, num_slots, num_computed if num_external else 0)
        is_room = self._has_room_for(request, demand, num_slots)
        if is_room and num_external:
            held = self._kv_cache.reserve(demand, answered_step=self._in_flight.last_answered_step)
            is_room = held is not None
            if held is not None:
                self._kv_cache.attach(row, held, local.num_tokens)
        elif is_room:
            is_room = self._kv_cache.start(row, demand)
        if not is_room:
            return Outcome.NO_ROOM
        if num_external:
            assert self._connector is not None
            block_ids = self._kv_cache.block_ids(row)
            self._connector.update_state_after_alloc(view_of(request), block_ids, num_external)
        self._count_hits(request, local.num_tokens, num_external)
        self._enter(request, num_computed, need)
        if num_external:
            self._plan.loads.append(int(self._running.generation[row]))
        return Outcome.ADMITTED

    def _start_loaded(self, request: Request, held: HeldBlocks) -> Outcome:
        """A request whose load has ended takes a row with the blocks that it holds."""
        num_computed = request.num_computed_tokens
        need = self._need(request, request.num_tokens - num_computed, num_computed)
        if need == 0:
            return Outcome.NO_TOKENS
        row = self._running.next_row
        self._kv_cache.attach(row, held, 0)
        if self._kv_cache.grow_row(row, self._num_slots(num_computed + need)) is None:
            request.held = self._kv_cache.detach(row)
            return Outcome.NO_ROOM
        request.held = None
        self._transfers.num_loading_blocks -= num_blocks_of(held)
        self._plan.zero_block_ids += request.unwritten_block_ids
        self._enter(request, num_computed, need)
        return Outcome.ADMITTED

    def _start_fork(self, request: Request, num_local: int) -> Outcome | None:
        """A fork takes a row with its parent's KV, or lets go of it again. None if the prefix cache
        has as many tokens for it, or the parent has nothing."""
        held = self._forks.take(request)
        if held is None:
            return None
        outcome = None
        if request.num_computed_tokens > num_local:
            outcome = self._start_holder(request, held)
        if outcome is not Outcome.ADMITTED:
            self._forks.give_up(request)
        return outcome

    def _start_holder(self, request: Request, held: HeldBlocks) -> Outcome:
        """A fork, or a session that kept its blocks, takes a row with what it holds."""
        num_computed = request.num_computed_tokens
        need = self._need(request, request.num_tokens - num_computed, num_computed)
        if need == 0:
            return Outcome.NO_TOKENS
        row, num_slots = self._running.next_row, self._num_slots(num_computed + need)
        kv_cache, answered_step = self._kv_cache, self._in_flight.last_answered_step
        num_new = kv_cache.num_blocks_to_resume(held, num_computed, num_slots, answered_step)
        if self._config.scheduler_reserve_full_isl and self._running.num_rows:
            num_tokens = max(num_slots, request.num_tokens)
            num_new += kv_cache.num_blocks_for(num_tokens) - kv_cache.num_blocks_for(num_slots)
        if not self._has_room(num_new):
            return Outcome.NO_ROOM
        step = self._plan.step + 1
        copies = kv_cache.resume(
            row, held, num_computed, num_slots, step=step, answered_step=answered_step
        )
        assert copies is not None, "there is room"
        self._plan.copies += copies
        self._forks.take_over(request)
        request.num_hit_tokens, request.num_external_tokens = num_computed, 0
        self._kv_cache.count_lookup(request, num_computed)
        self._enter(request, num_computed, need)
        return Outcome.ADMITTED

    def _enter(self, request: Request, num_computed: int, need: int) -> None:
        """The head of the queue takes the next row, with its blocks in place."""
        self._waiting.pop()
        self._forks.drop(request)
        row = self._running.next_row
        if request.num_cached_tokens == NOT_SCHEDULED:
            request.num_cached_tokens = min(num_computed, request.num_prompt_tokens)
        start = self._running.admit(request, num_computed, self._kv_cache.block_ids(row))
        request.num_computed_tokens = 0
        self._forks.parent_begins(request)
        request.events.append((RequestEvent.SCHEDULED, self._now))
        self._plan.add(request, start)
        if request.lora is not None:
            self._loras.enter(request.lora.name)
        if request.multimodal:
            self._encoder.admit(request, num_computed, need)
        self._kv_cache.full_blocks.cache_row(
            row, request, request.token_ids, num_computed + need, step=self._plan.step + 1
        )
        self._num_scheduled[row] = need
        self._budget.spend(need)
        self._lifecycle.log.admitted(
            request, step=self._plan.step + 1, num_computed=num_computed, now=self._now
        )

    def _begin_load(self, request: Request, local: ComputedBlocks, num_external: int) -> Outcome:
        """Reserve blocks and let the connector fill them while the request waits. One token more
        than is loaded has a slot, so that a loaded request can run without another block."""
        assert self._connector is not None
        num_loaded = local.num_tokens + num_external
        num_slots = min(num_loaded + 1, request.num_tokens)
        num_loading = self._transfers.num_loading_blocks + self._kv_cache.num_blocks_for(num_slots)
        if self._loads_are_full or num_loading > self._max_loading_blocks:
            self._loads_are_full = True  # a smaller one must not slip past
            request.waits_for = (
                f"other loads to end: together they may hold max_loading_blocks="
                f"{self._max_loading_blocks} blocks"
            )
            return Outcome.SET_ASIDE
        demand = self._demand(request, local, num_slots, min(num_loaded, request.num_tokens - 1))
        if not self._has_room_for(request, demand, num_slots):
            return Outcome.NO_ROOM
        held = self._kv_cache.reserve(demand, answered_step=self._in_flight.last_answered_step)
        if held is None:
            return Outcome.NO_ROOM
        self._connector.update_state_after_alloc(view_of(request), held.block_ids, num_external)
        self._count_hits(request, local.num_tokens, num_external)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.asks_connector = False
        self._num_loads += 1
        request.load_number = self._num_loads
        self._transfers.begin_load(
            request, held, num_tokens=num_loaded, deadline=self._now + self._config.load_timeout_s
        )
        self._plan.has_new_loads = True
        return Outcome.PARKED
