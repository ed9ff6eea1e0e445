"""Which waiting requests enter a step, in which order, with what."""

import enum
from typing import TYPE_CHECKING

from longshore.connectors.base import AskLater, Matched
from longshore.protocol.arrays import Int32Array, int32_array
from tests.oracle.block_pool import Block
from tests.oracle.encoder import plan_items
from tests.oracle.plan import Admission
from tests.oracle.request import Status, TextbookRequest
from tests.oracle.step import Step

if TYPE_CHECKING:
    from tests.oracle.textbook import TextbookScheduler


class Verdict(enum.Enum):
    """What trying one request came to: the next is tried, with or without it in the step, or the
    step admits nobody else."""

    ADMITTED = enum.auto()
    SET_ASIDE = enum.auto()
    STOP = enum.auto()


class Admissions:
    """The second half of a step, for one scheduler."""

    def __init__(self, scheduler: "TextbookScheduler", step: Step, now: float) -> None:
        self._scheduler = scheduler
        self._step = step
        self._now = now
        self._loads_are_full = False
        self._has_tried_delayed = False
        self._is_refused = False

    def run(self) -> None:
        """Admit until the budget, the rows or the blocks are gone, or everybody has been tried."""
        scheduler = self._scheduler
        queues = scheduler.queues
        set_aside: list[TextbookRequest] = []
        while (
            len(queues) > 0
            and self._step.budget > 0
            and len(scheduler.running) < scheduler.config.max_num_seqs
        ):
            request = queues.head()
            if request is None:
                break
            verdict = self._try(request)
            if verdict is Verdict.STOP:
                break
            if verdict is Verdict.SET_ASIDE:
                queues.remove(request)
                set_aside.append(request)
        queues.put_back(set_aside)

    def _try(self, request: TextbookRequest) -> Verdict:
        if request.is_delayed:
            if self._has_tried_delayed and self._loads_are_full:
                return Verdict.SET_ASIDE
            self._has_tried_delayed = True
        self._is_refused = False
        verdict = self._try_now(request)
        if verdict is not Verdict.STOP:
            request.is_delayed = self._is_refused
        return verdict

    def _try_now(self, request: TextbookRequest) -> Verdict:
        if self._is_blocked(request):
            return Verdict.SET_ASIDE
        if self._has_token_in_flight(request):
            return Verdict.SET_ASIDE
        if not self._has_lora_place(request):
            return Verdict.SET_ASIDE
        if request.status is Status.LOADED:
            return self._admit(request, [], request.num_computed, num_external=0)
        hits = self._scheduler.tables.find_prefix(request)
        num_local = len(hits) * self._scheduler.tables.block_size
        connector = self._scheduler.connector
        # A load that nobody waits for could not be told from the next one of the same id.
        is_busy = self._scheduler.transfers.is_under_way(request.request_id)
        if connector is None or not request.asks_connector or is_busy:
            return self._admit(request, hits, num_local, num_external=0)
        match = connector.get_num_new_matched_tokens(self._scheduler.view(request), num_local)
        if isinstance(match, AskLater):
            if request.asked_at is None:
                request.asked_at = self._now
            if self._now < request.asked_at + self._scheduler.config.load_timeout_s:
                return Verdict.SET_ASIDE
            match = Matched(0)
        request.asked_at = None
        num_external = min(match.num_tokens, request.num_tokens - num_local)
        if match.is_async and num_external > 0:
            return self._begin_load(request, hits, num_local, num_external)
        # SCH-13: something must be computed to sample from.
        num_computed = min(num_local + num_external, request.num_tokens - 1)
        return self._admit(request, hits, num_computed, num_external)

    def _is_blocked(self, request: TextbookRequest) -> bool:
        """QUE-05: still so, after a look at what it waits for."""
        if request.status is Status.WAITING_FOR_GRAMMAR:
            grammars, spec = self._scheduler.grammars, request.message.options.structured_output
            assert grammars is not None
            assert spec is not None
            if grammars.is_ready(spec):
                request.status = Status.WAITING
        if request.status is Status.LOADING and request.load_is_over:
            request.status = Status.LOADED
            self._scheduler.count_loaded(request)
        return request.status not in (Status.WAITING, Status.PREEMPTED, Status.LOADED)

    def _has_token_in_flight(self, request: TextbookRequest) -> bool:
        """It was preempted while its next token was being sampled: wait for that token, or it
        would be sampled again."""
        return any(
            entry.request is request and entry.counts
            for plan in self._scheduler.unanswered
            for entry in plan.entries
        )

    def _has_lora_place(self, request: TextbookRequest) -> bool:
        """FEA-02."""
        if request.lora_name is None:
            return True
        names = {other.lora_name for other in self._scheduler.running} - {None}
        return request.lora_name in names or len(names) < self._scheduler.config.max_loras

    def _admit(
        self, request: TextbookRequest, hits: list[Block], num_computed: int, num_external: int
    ) -> Verdict:
        """Give the request a row, blocks and its first tokens.

        hits:         to be the first blocks of its table; a loaded request has its table already.
        num_computed: tokens it need not compute; the last `num_external` computed ones are loaded
                      before the step computes.
        """
        scheduler, step = self._scheduler, self._step
        need = self._need(request, num_computed)
        num_tokens, items = plan_items(
            scheduler.encoder, request, num_computed, need, step.encoder_budget
        )
        if num_tokens == 0:
            return Verdict.STOP
        end = num_computed + num_tokens
        slots_end = scheduler.with_lookahead(end)
        full_end = max(slots_end, request.num_tokens)
        answered_step = scheduler.answered_step if num_external > 0 else None
        if not self._fits(request, hits, slots_end, full_end, answered_step):
            return Verdict.STOP
        new_blocks = scheduler.tables.allocate(request, hits, slots_end, answered_step)
        assert new_blocks is not None
        if scheduler.connector is not None and num_external > 0:
            scheduler.connector.update_state_after_alloc(
                scheduler.view(request), (_ids(request.blocks),), num_external
            )
        scheduler.queues.remove(request)
        step.admitted.append(Admission(request.request_id, request.was_preempted, num_computed))
        if request.load is None:
            request.num_cached_blocks = len(hits)
        request.status = Status.RUNNING
        request.was_preempted = False
        request.load = None
        request.num_computed = num_computed
        if scheduler.fairness is not None:
            scheduler.fairness.admitted(request, num_computed)
        if request.num_cached is None:
            request.num_cached = num_computed
        scheduler.running.append(request)
        uncomputed = request.blocks[num_computed // scheduler.tables.block_size :]
        step.schedule(request, num_tokens, uncomputed, items)
        scheduler.tables.name(request, end)
        return Verdict.ADMITTED

    def _need(self, request: TextbookRequest, num_computed: int) -> int:
        """SCH-06 and SCH-14; 0 ends admission."""
        config = self._scheduler.config
        need = request.num_tokens - num_computed
        if config.long_prefill_token_threshold > 0:
            need = min(need, config.long_prefill_token_threshold)
        if need > self._step.budget and not config.enable_chunked_prefill:
            return 0
        return min(need, self._step.budget)

    def _begin_load(
        self, request: TextbookRequest, hits: list[Block], num_local: int, num_external: int
    ) -> Verdict:
        """CON-05: blocks that will be filled while the request waits; no row, no tokens."""
        scheduler = self._scheduler
        assert scheduler.connector is not None
        num_tokens = num_local + num_external
        end = min(num_tokens + 1, request.num_tokens)
        num_loading = sum(
            len(other.blocks)
            for other in scheduler.live
            if other.status in (Status.LOADING, Status.LOADED)
        )
        num_reserved = scheduler.tables.num_blocks_for(end)
        is_over = num_loading + num_reserved > scheduler.max_loading_blocks
        if self._loads_are_full or (num_loading and is_over):  # one alone may be as large as it is
            self._loads_are_full = True  # nobody slips past in this step
            self._is_refused = True
            return Verdict.SET_ASIDE
        if not self._fits(request, hits, end, request.num_tokens, scheduler.answered_step):
            if scheduler.running or scheduler.unanswered:
                return Verdict.STOP
            # DESIGN 9.15: what holds the blocks may never end, so it computes.
            return self._admit(request, hits, num_local, num_external=0)
        new_blocks = scheduler.tables.allocate(request, hits, end, scheduler.answered_step)
        assert new_blocks is not None
        request.num_cached_blocks = len(hits)
        request.load = scheduler.transfers.begin_load(
            request.request_id,
            request.blocks,
            num_tokens,
            self._now + scheduler.config.load_timeout_s,
        )
        request.status = Status.LOADING
        request.asks_connector = False
        scheduler.connector.update_state_after_alloc(
            scheduler.view(request), (_ids(request.blocks),), num_external
        )
        return Verdict.SET_ASIDE

    def _fits(
        self,
        request: TextbookRequest,
        hits: list[Block],
        end: int,
        full_end: int,
        answered_step: int | None,
    ) -> bool:
        """Whether blocks for `end` tokens can be had and the gates are open; they compare the
        blocks of the whole input (`full_end`) if those are to be reserved.

        With nobody running there are no gates, and who has loaded gives up blocks.
        answered_step: as in `BlockTables.fits`.
        """
        scheduler = self._scheduler
        if request.status is not Status.LOADED:
            scheduler.gates.feel_pressure(scheduler.tables.pool.num_free)
        while True:
            is_idle = not scheduler.running
            num_free = scheduler.tables.pool.num_free
            num_needed = scheduler.tables.num_needed(request, hits, end)
            fits = scheduler.tables.fits(request, hits, end, answered_step)
            if not is_idle and request.status is Status.LOADED:
                return fits  # it has its blocks; keeping it out would free nothing
            if not is_idle:
                reserves_all = scheduler.config.scheduler_reserve_full_isl
                num_compared = (
                    scheduler.tables.num_needed(request, hits, full_end)
                    if reserves_all
                    else num_needed
                )
                name, fairness = request.message.options.tenant.name, scheduler.fairness
                is_owed = fairness is not None and fairness.is_owed(name)
                return scheduler.gates.admit(num_free, num_compared, is_owed=is_owed) and fits
            if fits or scheduler.unanswered:
                return fits
            if not scheduler.release_youngest_load(keep=request):
                return False


def _ids(blocks: list[Block]) -> Int32Array:
    return int32_array([block.block_id for block in blocks])
