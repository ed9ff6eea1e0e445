"""Admission: moves requests from the waiting queue to rows.

A request that cannot be admitted for a reason of its own (its grammar, its adapter, a load) is
parked until an event, and the next one is tried, up to a limit per step. A shortage of tokens, rows
or blocks ends the step's admissions, because a smaller request that went first would starve a
bigger one.
"""

import enum
from dataclasses import dataclass, field
from typing import Final

from longshore.connectors.base import AskLater, Match, Matched
from longshore.protocol.arrays import Int32Array, Int64Array
from longshore.protocol.outputs import RequestEvent
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.features.grammar import GrammarError, outcome_of
from longshore.scheduler.features.transfers import Transfers
from longshore.scheduler.kv_cache.blocks import BlockDemand, ComputedBlocks, HeldBlocks
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.part import SchedulerPart
from longshore.scheduler.queue.queues import SharedEvent, try_cost
from longshore.scheduler.queue.shares import RESERVED
from longshore.scheduler.request import (
    NOT_SCHEDULED,
    Hold,
    HoldKind,
    Request,
    RequestChange,
)


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
        num_pinned: int = 0,
    ) -> bool:
        """Whether a request that needs `num_needed` of `num_free` blocks may be admitted.
        is_owed: see `Shares`; only the watermark counts for it. num_pinned: blocks of pins, which
        running requests can get."""
        if self.is_short(num_free + num_pinned):
            self.is_closed = True
        elif self._usage(num_free + num_pinned) < self._admit_threshold:
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


class Attempt(enum.Enum):
    """The result of trying the head of the queue."""

    ADMITTED = enum.auto()
    SET_ASIDE = enum.auto()
    PARKED = enum.auto()
    ENDED = enum.auto()
    NO_TOKENS = enum.auto()
    NO_BLOCKS = enum.auto()


_NOTHING: Final = Matched(0)

MAX_TRIED_BLOCKS: Final = 8192
"""Work of trying requests in vain, per step, in blocks as `try_cost` counts them."""


@dataclass(slots=True, kw_only=True)
class Admission(SchedulerPart):
    """Admits waiting requests.

    has_untried: this step has not tried all that could be, because it had tried enough; the planner
                 resets it.
    """

    gates: AdmissionGates
    lifecycle: Lifecycle
    _now: float = 0.0
    has_untried: bool = False
    _num_left: int = 0
    _num_scheduled: Int64Array = field(init=False)
    _loads_are_full: bool = False
    _asked: tuple[Request, int, Match] | None = None

    def admit_waiting(self, budget: int, num_scheduled: Int64Array, now: float) -> int:
        """Admit from the head of the queue while rows, tokens and blocks last. Writes the tokens of
        admitted rows to `num_scheduled` (max_num_seqs,) and returns their sum, at most `budget`."""
        self._num_left, self._num_scheduled, self._now = budget, num_scheduled, now
        running = self.running
        self._loads_are_full = False
        self._asked = None
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
            if self.trace is not None:
                self.trace.tried(request, attempt.name.lower())
            if attempt is Attempt.NO_TOKENS or (
                attempt is Attempt.NO_BLOCKS and not self._release_holds(request)
            ):
                break
            if attempt is Attempt.SET_ASIDE:
                self.waiting.set_aside()
            if attempt is not Attempt.ADMITTED:
                num_tries_left -= try_cost(request)
            if not self._loads_are_full:
                self.waiting.unpark_load()
        self.waiting.end_step()
        return budget - self._num_left

    def _park(self, event: SharedEvent | None = None) -> Attempt:
        """The head waits for an event."""
        self.waiting.park_head(event)
        return Attempt.PARKED

    def _try(self, request: Request) -> Attempt:
        """Try to admit the head of the queue."""
        if (attempt := self._gate(request)) is not None:
            return attempt
        if request.hold is not None:
            return self._start(request, request.hold)
        prefix = self.kv_cache.get_computed_blocks(request)
        if self.trace is not None:
            self.trace.looked_up(request, prefix.num_tokens)
        if request in self.forks.waiting and (hold := self.forks.take(request)) is not None:
            if hold.num_computed_tokens > prefix.num_tokens:
                attempt = self._start(request, hold)
            if attempt is not Attempt.ADMITTED:
                self.holds.release(request)
            if attempt is not None:
                return attempt
        if self.transfers is None:
            return self._start(request, prefix)
        return self._try_external(self.transfers, request, prefix)

    def _gate(self, request: Request) -> Attempt | None:
        """Whether a reason of its own prevents the request from starting; None if not."""
        request.waits_for = None
        if request.resume_after_step > self.in_flight.last_answered_step:
            return Attempt.SET_ASIDE
        if self.grammars is not None and request.structured_output is not None:
            try:
                if self.grammars.must_wait(request):
                    return self._park()
            except GrammarError as error:
                self.lifecycle.end(request, outcome_of(error), self._now)
                return Attempt.ENDED
        if self.loras is not None and not self.loras.has_slot(request.lora_name):
            return self._park(SharedEvent.ADAPTERS)
        if self.encoder is not None and request.multimodal and self.encoder.is_loading(request):
            request.waits_for = "the output of its encoder, for which other engines are asked"
            return self._park(SharedEvent.ENCODER)
        if request.hold is None and request in self.forks.waiting and self.forks.must_wait(request):
            return self._park()
        return None

    # Blocks and a row

    def _start(
        self, request: Request, source: ComputedBlocks | Hold, num_external: int = 0
    ) -> Attempt:
        """Give the head of the queue the next row, with the tokens that `source` has computed and
        `num_external` tokens loaded within the step, and schedule its first chunk."""
        if isinstance(source, Hold):
            num_computed = source.num_computed_tokens
        else:
            num_computed = min(source.num_tokens + num_external, len(request.token_ids) - 1)
        junction = self.kv_cache.find_junction(request) if self.kv_cache.has_states else 0
        need = self._num_tokens_now(request, num_computed, junction)
        if isinstance(source, Hold) and source.kind is HoldKind.LOADED:
            need = self.kv_cache.states.chunk_after_load(num_computed, need)
        if need == 0:
            return Attempt.NO_TOKENS
        num_slots = num_computed + need + self.config.num_lookahead_tokens
        num_slots = min(num_slots, self.config.max_model_len)
        if isinstance(source, Hold):
            tables = self._resume(request, source, num_slots)
        else:
            tables = self._allocate(request, source, num_slots, num_computed, num_external)
        if tables is None:
            return Attempt.NO_BLOCKS
        self.kv_cache.states.junctions[self.running.next_row] = junction
        self._enter(request, tables, num_computed, need)
        if num_external:
            row = request.row
            self.plan.loads.append((row, int(self.running.generation[row])))
        return Attempt.ADMITTED

    def _num_tokens_now(self, request: Request, num_computed: int, junction: int) -> int:
        """Tokens that the request computes in this step after `num_computed`; 0 if it does not fit
        into the step. junction: see `StateGroups.junctions`."""
        num_tokens = len(request.token_ids) - num_computed
        if self.config.long_prefill_token_threshold:
            num_tokens = min(num_tokens, self.config.long_prefill_token_threshold)
        if num_tokens > self._num_left:
            num_tokens = self._num_left if self.config.enable_chunked_prefill else 0
        if num_tokens and self.encoder is not None and request.multimodal:
            num_tokens = self.encoder.would_limit(request, num_computed, num_tokens)
        if num_tokens and self.kv_cache.has_states:
            num_tokens = self.kv_cache.states.aligned_chunk(num_computed, num_tokens, junction)
        return num_tokens

    def _allocate(
        self,
        request: Request,
        prefix: ComputedBlocks,
        num_slots: int,
        num_computed: int,
        num_external: int,
    ) -> tuple[Int32Array, ...] | None:
        """Give the next row the cached prefix and new blocks; a connector fills those of external
        tokens. Returns the row's block tables. None, and nothing has changed, if blocks are short.
        """
        kv_cache, row = self.kv_cache, self.running.next_row
        num_encoder_tokens = request.num_encoder_tokens
        num_loaded = num_computed if num_external else 0
        demand = kv_cache.demand(
            prefix, num_slots, num_loaded=num_loaded, num_encoder_tokens=num_encoder_tokens
        )
        if not self._has_room(request, demand.num_needed, num_slots):
            return None
        if num_external:
            assert self.transfers is not None
            blocks = self._reserve_for_load(self.transfers, request, demand, num_external)
            if blocks is None:
                return None
            kv_cache.attach(row, blocks, prefix.num_tokens)
            return blocks.block_ids
        tables = kv_cache.start(row, demand)
        if tables is not None:
            kv_cache.count_lookup(request, prefix.num_tokens)
            if self.transfers is not None:
                self.transfers.count_lookup(request, prefix.num_tokens, num_external)
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
            if not self._has_room(request, num_new, num_slots):
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

    def _has_room(self, request: Request, num_needed: int, num_slots: int) -> bool:
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
            is_owed=self.is_owed(request),
            num_pinned=0 if self.pins is None else self.pins.num_blocks,
        )

    def is_owed(self, request: Request) -> bool:
        """Whether it may use what is reserved; see `Shares`."""
        return self.shares is not None and self.shares.is_owed(request.tenant.name)

    def _enter(
        self, request: Request, tables: tuple[Int32Array, ...], num_computed: int, need: int
    ) -> None:
        """Move the head of the queue to the next row, which has these block tables."""
        self.waiting.pop()
        if request in self.forks.waiting:
            self.forks.drop(request)
        row, step = self.running.next_row, self.plan.step + 1
        if request.num_cached_tokens == NOT_SCHEDULED:
            request.num_cached_tokens = min(num_computed, request.num_prompt_tokens)
        start = self.running.admit(request, num_computed, tables)
        if self.shares is not None:
            self.shares.admitted(request, num_computed)
        if request in self.forks.parents:
            self.forks.parent_begins(request)
        if self.transfers is not None:
            self.transfers.admitted(request)
        if self.pins is not None:
            self.pins.admitted(request)
        request.events.append((RequestEvent.SCHEDULED, self._now))
        self.plan.add(request, start)
        if self.loras is not None and self.loras.acquire(request.lora_name):
            self.waiting.happened(SharedEvent.ADAPTERS)
            self.waiting.unpark_due()
        if self.grammars is not None and request.structured_output is not None:
            self.grammars.admitted(request)
        if self.encoder is not None and request.multimodal:
            self.encoder.admit(request, num_computed, need)
        self.kv_cache.full_blocks.cache_row(
            row, request, request.token_ids, num_computed + need, step=step
        )
        self._num_scheduled[row] = need
        self._num_left -= need
        self.lifecycle.log.admitted(request, step=step, num_computed=num_computed, now=self._now)

    # KV from a connector

    def _try_external(
        self, transfers: Transfers, request: Request, prefix: ComputedBlocks
    ) -> Attempt:
        """Start the request with the tokens that a connector can load after the cached prefix,
        within the step or in the background."""
        match = self._ask_connector(transfers, request, prefix.num_tokens)
        if self.trace is not None:
            self.trace.asked_connector(request, match)
        if isinstance(match, AskLater):
            request.waits_for = (
                f"its connector {transfers.name}, which does not know yet what it can load"
            )
            if request.is_swapped:
                request.waits_for = "the copy of its KV, which is being swapped out"
            return self._park(SharedEvent.CONNECTOR)
        num_external = min(match.num_tokens, len(request.token_ids) - prefix.num_tokens)
        if match.is_async and num_external > 0:
            attempt = self._begin_load(transfers, request, prefix, num_external)
            while attempt is Attempt.NO_BLOCKS and self._release_holds(request):
                attempt = self._begin_load(transfers, request, prefix, num_external)
            if attempt is not Attempt.NO_BLOCKS or not self._is_idle:
                return attempt
            num_external = 0  # transfers that may never end own the blocks
        return self._start(request, prefix, num_external)

    def _ask_connector(
        self, transfers: Transfers, request: Request, num_local: int
    ) -> Matched | AskLater:
        is_loading = transfers.has(request.request_id)  # an abandoned load
        if not request.asks_connector or request.must_compute_prompt or is_loading:
            return _NOTHING
        if self._asked is not None and self._asked[:2] == (request, num_local):
            return self._asked[2]  # tried again, because holds were released
        match = transfers.match(request, num_local, self._now)
        self._asked = (request, num_local, match)
        return match

    def _begin_load(
        self, transfers: Transfers, request: Request, prefix: ComputedBlocks, num_external: int
    ) -> Attempt:
        """Reserve blocks for the connector to fill while the request waits. One token more than is
        loaded gets a slot, so that the loaded request can run without another block. A load larger
        than the limit for all loads begins when there is no other one."""
        num_loaded = prefix.num_tokens + num_external
        num_slots = min(num_loaded + 1, len(request.token_ids))
        num_others = transfers.num_loading_blocks + self.holds.num_loaded_blocks
        num_loading = num_others + self.kv_cache.num_blocks_for(num_slots)
        limit = self.config.max_loading_blocks or self.kv_cache.num_blocks // 2
        if self._loads_are_full or (num_others and num_loading > limit):
            self._loads_are_full = True  # a smaller load must not go first
            request.waits_for = (
                f"other loads to end: all loads together may hold max_loading_blocks={limit} blocks"
            )
            self.waiting.delay_load()
            return Attempt.PARKED
        num_computed = min(num_loaded, len(request.token_ids) - 1)
        demand = self.kv_cache.demand(
            prefix,
            num_slots,
            num_loaded=num_computed,
            num_encoder_tokens=request.num_encoder_tokens,
        )
        if not self._has_room(request, demand.num_needed, num_slots):
            return Attempt.NO_BLOCKS
        blocks = self._reserve_for_load(transfers, request, demand, num_external)
        if blocks is None:
            return Attempt.NO_BLOCKS
        if request.is_swapped:
            transfers.num_swapped_in_blocks += demand.num_new
        if request in self.forks.waiting:  # its parent must not give it a hold while it loads
            self.forks.drop(request)
        request.change(RequestChange.LOAD_BEGUN)
        request.asks_connector = False
        transfers.begin_load(
            request,
            blocks,
            num_tokens=num_loaded,
            num_external=num_external,
            now=self._now,
            order=self.holds.next_order(),
        )
        self.plan.has_new_loads = True
        return self._park()

    def _reserve_for_load(
        self, transfers: Transfers, request: Request, demand: BlockDemand, num_external: int
    ) -> HeldBlocks | None:
        """Take the blocks of `demand`, which the connector fills with `num_external` tokens. None,
        and nothing has changed, if blocks are short."""
        blocks = self.kv_cache.reserve(demand, answered_step=self.in_flight.last_answered_step)
        if blocks is not None:
            num_local = demand.computed.num_tokens
            transfers.allocated(request, blocks.block_ids, num_external)
            self.kv_cache.count_lookup(request, num_local)
            transfers.count_lookup(request, num_local, num_external)
        return blocks

    # Holds, pins and idleness

    @property
    def _is_idle(self) -> bool:
        """No request runs, and no output is expected that could change anything."""
        return self.running.num_rows == 0 and not self.in_flight.steps

    def _release_holds(self, request: Request) -> bool:
        """Release a pin or a hold for `request`; False if there is none to release. Pins of later
        jobs come first, then holds of forks and sessions. If nothing else can run, all other pins
        and the holds of loaded requests follow, and finally the pin and the hold of `request`
        itself, which may need fewer blocks without them."""
        pins = self.pins
        if pins is not None and not self.gates.is_closed and pins.yield_to(request):
            return True
        if self.holds.release_youngest(loaded=False, besides=request):
            return True
        if not self._is_idle:
            return False
        if pins is not None and (pins.yield_one(besides=request) or pins.yield_one()):
            return True
        return self.holds.release_youngest(
            loaded=True, besides=request
        ) or self.holds.release_youngest(loaded=False)
