"""From the waiting queue onto rows: who is next, what may keep it out, and what it starts with.

A request that cannot be admitted for a reason of its own (its grammar, its adapter, a load) is set
aside and the next is tried; want of tokens, rows or blocks ends the step's admissions, because a
smaller request that slips past would starve a bigger one.
"""

import enum
import logging
from typing import Final

from longshore.connectors.base import AskLater, Match, Matched, SchedulerConnector
from longshore.protocol.arrays import Int64Array
from longshore.protocol.client import FinishReason, RequestEvent
from longshore.scheduler.budget import StepBudget
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.encoder_cache import EncoderCache
from longshore.scheduler.gates import AdmissionGates
from longshore.scheduler.in_flight import StepsInFlight
from longshore.scheduler.kv_cache_manager import ComputedBlocks, KVCacheManager
from longshore.scheduler.lifecycle import Lifecycle, view_of
from longshore.scheduler.lora import LoRAPlaces
from longshore.scheduler.plan_builder import PlanBuilder
from longshore.scheduler.request import NOT_SCHEDULED, Request, RequestStatus
from longshore.scheduler.running import RunningTable
from longshore.scheduler.structured_output import GrammarError, StructuredOutputs
from longshore.scheduler.transfers import Transfers, num_blocks_of
from longshore.scheduler.waiting import WaitingRequests

logger = logging.getLogger(__name__)


class Outcome(enum.Enum):
    """What trying the head of the queue came to."""

    ADMITTED = enum.auto()
    SET_ASIDE = enum.auto()
    PARKED = enum.auto()
    ENDED = enum.auto()
    NO_ROOM = enum.auto()


_NOTHING: Final = Matched(0)


class Admission:
    """One step's admissions after the other. Its collaborators are the scheduler's."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        running: RunningTable,
        waiting: WaitingRequests,
        kv_cache: KVCacheManager,
        in_flight: StepsInFlight,
        lifecycle: Lifecycle,
        plan: PlanBuilder,
        gates: AdmissionGates,
        loras: LoRAPlaces,
        encoder: EncoderCache,
        structured: StructuredOutputs,
        transfers: Transfers,
        connector: SchedulerConnector | None,
    ) -> None:
        self._config = config
        self._running = running
        self._waiting = waiting
        self._kv_cache = kv_cache
        self._in_flight = in_flight
        self._lifecycle = lifecycle
        self._plan = plan
        self._gates = gates
        self._loras = loras
        self._encoder = encoder
        self._structured = structured
        self._transfers = transfers
        self._connector = connector
        self._max_loading_blocks = config.max_loading_blocks or kv_cache.num_blocks // 2
        self._loads_are_full = False
        self._asked: tuple[Request, int, Match] | None = None
        self._num_loads = 0
        self.num_external_queried_tokens = 0
        self.num_external_hit_tokens = 0

    def admit_waiting(self, budget: StepBudget, num_scheduled: Int64Array, now: float) -> None:
        """Admit from the head of the queue while rows, tokens and blocks last."""
        self._loads_are_full = False
        self._asked = None
        while budget.num_left > 0 and not self._running.is_full:
            request = self._waiting.peek()
            if request is None or not self._plan.can_add(request):
                break
            outcome = self._try(request, budget, num_scheduled, now)
            if outcome is Outcome.SET_ASIDE:
                self._waiting.set_aside()
            elif outcome is Outcome.PARKED:
                self._waiting.park_head()
            elif outcome is Outcome.NO_ROOM and not self._others_give_up(request):
                break
        self._waiting.end_step()

    def _try(
        self, request: Request, budget: StepBudget, num_scheduled: Int64Array, now: float
    ) -> Outcome:
        request.waits_for = None
        if request.resume_after_step > self._in_flight.last_answered_step:
            return Outcome.SET_ASIDE
        try:
            if self._is_blocked(request):
                return Outcome.SET_ASIDE
        except GrammarError as error:
            self._lifecycle.end(request, FinishReason.ERROR, now, message=str(error))
            return Outcome.ENDED
        if request.lora is not None and not self._loras.has_place(request.lora.name):
            return Outcome.SET_ASIDE
        if request.held is not None:
            return self._start_loaded(request, budget, num_scheduled, now)
        local = self._kv_cache.get_computed_blocks(request)
        if self._connector is None:
            return self._start(request, local, 0, budget, num_scheduled, now)
        match = self._ask_connector(request, local.num_tokens)
        if isinstance(match, AskLater):
            request.waits_for = "its connector, which does not know yet what it can bring"
            return Outcome.SET_ASIDE
        num_external = min(match.num_tokens, request.num_tokens - local.num_tokens)
        if match.is_async and num_external > 0:
            num_slots = min(local.num_tokens + num_external + 1, request.num_tokens)
            if self._kv_cache.num_blocks_for(num_slots) <= self._max_loading_blocks:
                outcome = self._begin_load(request, local, num_external, now)
                while outcome is Outcome.NO_ROOM and self._others_give_up(request):
                    outcome = self._begin_load(request, local, num_external, now)
                if outcome is not Outcome.NO_ROOM or not self._is_idle:
                    return outcome
            num_external = 0  # this load can never begin, or not before another that may not end
        return self._start(request, local, num_external, budget, num_scheduled, now)

    def _is_blocked(self, request: Request) -> bool:
        """Whether what the request waits for has not come. Raises GrammarError."""
        waits_for_grammar = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        return request.status is waits_for_grammar and not self._structured.try_promote(request)

    def _ask_connector(self, request: Request, num_local: int) -> Matched | AskLater:
        is_busy = self._transfers.has(request.request_id)  # a load that nobody waits for any more
        if self._connector is None or not request.asks_connector or is_busy:
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

    def _need(
        self, request: Request, num_wanted: int, num_computed: int, budget: StepBudget
    ) -> int:
        """Tokens of this step for a request that wants so many behind those computed; 0 if it does
        not fit the step."""
        need = budget.cap_one(num_wanted)
        if need > budget.num_left:
            if not self._config.enable_chunked_prefill:
                return 0
            need = budget.num_left
        if request.multimodal:
            need = self._encoder.would_limit(request, num_computed, need)
        return need

    @property
    def _is_idle(self) -> bool:
        """Nothing runs, and no answer is due that could change anything."""
        return self._running.num_rows == 0 and len(self._in_flight) == 0

    def _others_give_up(self, request: Request) -> bool:
        """Whether somebody whose load is over made room, because nothing else can run."""
        return self._is_idle and self._lifecycle.give_up_youngest_load(besides=request)

    def _has_room(self, num_needed: int) -> bool:
        return self._gates.has_room(
            num_needed,
            num_free=self._kv_cache.num_free_blocks,
            usage=self._kv_cache.usage,
            nothing_runs=self._running.num_rows == 0,
        )

    def _has_room_for(self, local: ComputedBlocks, num_tokens: int) -> bool:
        """Whether there is room for blocks for so many tokens, those in `local` among them."""
        at_most = self._kv_cache.num_blocks_for(num_tokens)  # as if nobody held the hits
        return self._has_room(at_most) or (
            local.num_tokens > 0
            and self._has_room(self._kv_cache.num_blocks_needed(local, num_tokens))
        )

    def _num_slots(self, num_tokens: int) -> int:
        """Tokens to have slots for, so that a drafter can write behind `num_tokens`."""
        return min(num_tokens + self._config.num_lookahead_tokens, self._config.max_model_len)

    def _num_reserved(self, request: Request, num_slots: int) -> int:
        """Tokens for which there must be room, to get slots for `num_slots`."""
        if self._config.scheduler_reserve_full_isl and self._running.num_rows:
            return max(num_slots, request.num_tokens)
        return num_slots

    def _start(
        self,
        request: Request,
        local: ComputedBlocks,
        num_external: int,
        budget: StepBudget,
        num_scheduled: Int64Array,
        now: float,
    ) -> Outcome:
        """A request with no KV of its own takes a row: cached prefix, external tokens that are
        loaded within the step, and its first chunk."""
        num_tokens = request.num_tokens
        num_computed = min(local.num_tokens + num_external, num_tokens - 1)
        need = self._need(request, num_tokens - num_computed, num_computed, budget)
        if need == 0:
            return Outcome.NO_ROOM
        num_slots = self._num_slots(num_computed + need)
        row = self._running.next_row
        is_room = self._has_room_for(local, self._num_reserved(request, num_slots))
        if is_room and num_external:
            held = self._kv_cache.reserve(
                local, num_slots, answered_step=self._in_flight.last_answered_step
            )
            is_room = held is not None
            if held is not None:
                self._kv_cache.attach(row, held, local.num_tokens)
        elif is_room:
            is_room = self._kv_cache.start(row, local, num_slots)
        if not is_room:
            return Outcome.NO_ROOM
        if num_external:
            assert self._connector is not None
            block_ids = self._kv_cache.block_ids(row)
            self._connector.update_state_after_alloc(view_of(request), block_ids, num_external)
        self._count_hits(request, local.num_tokens, num_external)
        self._enter(request, num_computed, need, budget, num_scheduled, now)
        if num_external:
            self._plan.loads.append(int(self._running.generation[row]))
        return Outcome.ADMITTED

    def _start_loaded(
        self, request: Request, budget: StepBudget, num_scheduled: Int64Array, now: float
    ) -> Outcome:
        """A request whose load has ended takes a row with the blocks it holds."""
        held, num_computed = request.held, request.num_computed_tokens
        assert held is not None
        need = self._need(request, request.num_tokens - num_computed, num_computed, budget)
        if need == 0:
            return Outcome.NO_ROOM
        row = self._running.next_row
        self._kv_cache.attach(row, held, 0)
        if self._kv_cache.grow_row(row, self._num_slots(num_computed + need)) is None:
            request.held = self._kv_cache.detach(row)
            return Outcome.NO_ROOM
        request.held = None
        self._transfers.num_loading_blocks -= num_blocks_of(held)
        self._plan.zero_block_ids += request.unwritten_block_ids
        self._enter(request, num_computed, need, budget, num_scheduled, now)
        return Outcome.ADMITTED

    def _enter(
        self,
        request: Request,
        num_computed: int,
        need: int,
        budget: StepBudget,
        num_scheduled: Int64Array,
        now: float,
    ) -> None:
        """The head of the queue takes the next row, with its blocks in place."""
        self._waiting.pop()
        row = self._running.next_row
        if request.num_cached_tokens == NOT_SCHEDULED:
            request.num_cached_tokens = min(num_computed, request.num_prompt_tokens)
        token_ids = request.token_ids
        start = self._running.admit(request, num_computed, self._kv_cache.block_ids(row))
        request.num_computed_tokens = 0
        request.events.append((RequestEvent.SCHEDULED, now))
        self._plan.add(start)
        if request.lora is not None:
            self._loras.enter(request.lora.name)
        if request.multimodal:
            self._encoder.limit(request, num_computed, need)
            self._encoder.pending[request.request_id] = request
        self._kv_cache.name_blocks(
            row, request, token_ids, num_computed + need, step=self._plan.step + 1
        )
        num_scheduled[row] = need
        budget.spend(need)

    def _begin_load(
        self, request: Request, local: ComputedBlocks, num_external: int, now: float
    ) -> Outcome:
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
        if not self._has_room_for(local, self._num_reserved(request, num_slots)):
            return Outcome.NO_ROOM
        held = self._kv_cache.reserve(
            local, num_slots, answered_step=self._in_flight.last_answered_step
        )
        if held is None:
            return Outcome.NO_ROOM
        self._connector.update_state_after_alloc(view_of(request), held.block_ids, num_external)
        self._count_hits(request, local.num_tokens, num_external)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.asks_connector = False
        self._num_loads += 1
        request.load_number = self._num_loads
        self._transfers.begin_load(
            request, held, num_tokens=num_loaded, deadline=now + self._config.load_timeout_s
        )
        self._plan.has_new_loads = True
        return Outcome.PARKED
