"""Structured output: requests wait until their grammar is compiled, and masks restrict tokens.

Grammars are compiled elsewhere. A request is parked until its grammar's event, so it adds no cost
to a step. With two steps in flight the mask of a step exists only after the tokens before it, so it
follows its plan in a message of its own (`SampleMask`).

A grammar can be lost while its request waits or runs, because it is kept in a process that may die.
The request then waits for its grammar again, and goes on from its tokens; other requests of the
step do not wait for it.
"""

import enum
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from longshore.connectors.base import FinishAction
from longshore.protocol.arrays import BoolArray, Int64Array, UInt8Array, int32_array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.outputs import FinishReason, ModelRunnerOutput
from longshore.protocol.plan import SampleMask, SchedulerOutput
from longshore.protocol.requests import StructuredOutput
from longshore.scheduler.hooks import Attempt, PlanChanges, SchedulerFeature
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.queue.queues import WaitingRequests
from longshore.scheduler.request import Outcome, Request, RequestChange
from longshore.scheduler.step.in_flight import PlannedStep, StepsInFlight
from longshore.scheduler.step.running import RunningTable

TokenMasks: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
"""(masks, cdiv(vocabulary, 8)): packed bits, the lowest token id in the lowest bit."""

MAX_EVENTS_PER_STEP: Final = 256
"""Grammars whose event is handled in one step; more wait for the next one."""

MAX_COMPILING_PER_TENANT: Final = 16
"""Grammars of one tenant that are being compiled; more wait for these. So a tenant with many slow
grammars delays those of others by a few only."""

MIN_AHEAD: Final = 64
"""Grammars of one tenant that may be compiled ahead although there are fewer rows."""


class GrammarError(LongshoreError):
    """A grammar has failed; the message is for the client."""


class InvalidGrammar(GrammarError):
    """A grammar cannot be compiled."""


def outcome_of(error: GrammarError) -> Outcome:
    """How a request ends whose grammar has failed."""
    is_invalid = isinstance(error, InvalidGrammar)
    return Outcome(FinishReason.IGNORED if is_invalid else FinishReason.ERROR, str(error))


class GrammarLost(LongshoreError):
    """A grammar has no mask now, and none soon. Its request waits for it again."""


class Grammar(Protocol):
    """The grammar of one request, and its state after the tokens so far. No method blocks."""

    def is_compiled(self) -> bool:
        """Whether masks can be asked for. It may be lost later; then it is compiled again unasked.
        Raises InvalidGrammar, or GrammarError if it is lost for good."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance by verified tokens; False, without advancing, if they are not allowed. Tokens
        before the first mask may be checked later: then `fill_masks` raises."""

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many leading drafts to verify: at most those that the grammar allows, if it knows.
        Does not advance."""

    def fill_masks(self, draft_token_ids: Sequence[int], masks: TokenMasks) -> bool:
        """Set the bits of the tokens that are allowed next, and after each draft, in `masks`:
        one mask and one per draft, zeroed by the caller. False,
        with `masks` unchanged, if they are still being computed: then it is called again. Raises
        GrammarError if the grammar has no mask: the request cannot continue. Raises GrammarLost,
        from which time on `is_compiled` is False until the grammar's next event."""

    def release(self) -> None:
        """The request has ended."""


class GrammarCompiler(Protocol):
    """Compiles in the background."""

    def compile(self, grammar_id: int, spec: StructuredOutput) -> Grammar:
        """Start to compile the grammar of one more request, under an id that is never used again.
        Never blocks."""

    def next_compiled(self) -> int | None:
        """The id of the next grammar that is compiled, or has failed, since its `compile` or its
        loss; None if there is no other one."""

    def flush(self) -> None:
        """All masks of a step have been asked for."""


class _Stage(enum.Enum):
    """What a request's grammar counts as among those of its tenant."""

    QUEUED = enum.auto()
    COMPILING = enum.auto()
    AHEAD = enum.auto()
    ADMITTED = enum.auto()


@dataclass(slots=True, eq=False)
class _Entry:
    """A request with a grammar.

    number:    the id of its grammar.
    grammar:   None while it is queued.
    is_waiting: the request waits for its grammar, and `is_parked` unless it waits for its parent.
    has_begun: the grammar has got the output that the request came with.
    """

    request: Request
    number: int
    grammar: Grammar | None = None
    stage: _Stage = _Stage.QUEUED
    is_waiting: bool = True
    is_parked: bool = False
    has_begun: bool = False


@dataclass(slots=True, eq=False)
class _Tenant:
    """The grammars of one tenant.

    queued:    (priority, number, entry), a heap of those to be compiled. Some may have ended.
    num_queued: without those that have ended.
    num_ahead: compiled, of requests that have not been admitted yet.
    """

    queued: list[tuple[int, int, _Entry]] = field(default_factory=list)
    num_queued: int = 0
    num_compiling: int = 0
    num_ahead: int = 0

    def count(self, stage: _Stage, change: int) -> None:
        """Add to the number of grammars in a stage."""
        match stage:
            case _Stage.QUEUED:
                self.num_queued += change
                if not self.num_queued:
                    self.queued = []
            case _Stage.COMPILING:
                self.num_compiling += change
            case _Stage.AHEAD:
                self.num_ahead += change

    @property
    def is_idle(self) -> bool:
        return not (self.num_queued or self.num_compiling or self.num_ahead)


class Grammars(SchedulerFeature):
    """Requests with a grammar: parked until it is compiled, and masked after planning.

    Only so many grammars of a tenant are compiled ahead as there are rows (`max_num_seqs`, at least
    MIN_AHEAD), because each of them takes memory. The others are queued here, by priority if the
    policy has priorities.

    failed: requests whose grammar has failed since they run; to be ended before a token of them is
            applied.
    lost:   requests whose grammar is lost since they run; to be preempted before a token of them is
            applied, because their latest mask allowed every token.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        running: RunningTable,
        in_flight: StepsInFlight,
        waiting: WaitingRequests,
        lifecycle: Lifecycle,
        *,
        vocab_size: int,
        epoch: int,
        max_num_seqs: int,
        has_priorities: bool = False,
    ) -> None:
        self._compiler = compiler
        self._running = running
        self._lifecycle = lifecycle
        self._in_flight = in_flight
        self._waiting = waiting
        self._vocab_size = vocab_size
        self._max_ahead = max(max_num_seqs, MIN_AHEAD)
        self._has_priorities = has_priorities
        self._entries: dict[Request, _Entry] = {}
        self._by_number: dict[int, _Entry] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._with_room: dict[str, None] = {}  # tenants some of whose grammars may be compiled now
        self._last_number = 0
        self._num_waiting = 0
        self.failed: dict[Request, Outcome] = {}
        self.lost: dict[Request, None] = {}
        self.begin_epoch(epoch)

    def begin_epoch(self, epoch: int) -> None:
        """Plans count from 1 again."""
        self._epoch = epoch
        self._last_masked_step = 0

    # Waiting for a grammar

    def queue(self, request: Request, is_queued: bool) -> bool:
        """A request with a grammar is parked until that is compiled, if it is not parked for
        another reason."""
        if request.options.structured_output is None:
            return is_queued
        parks = not is_queued
        request.change(RequestChange.NEEDS_GRAMMAR)
        self._last_number += 1
        entry = _Entry(request, self._last_number, is_parked=parks)
        self._entries[request] = self._by_number[entry.number] = entry
        self._num_waiting += 1
        if parks:
            self._waiting.add_parked(request)
        name = request.options.tenant.name
        tenant = self._tenants.setdefault(name, _Tenant())
        tenant.count(_Stage.QUEUED, 1)
        priority = request.options.priority if self._has_priorities else 0
        heapq.heappush(tenant.queued, (priority, entry.number, entry))
        self._compile_queued(tenant)
        return True

    def poll(self, now: float) -> None:
        """Grammars may be compiled by now, or have failed."""
        self._settle(now)
        self._lifecycle.end_all(self._take_events(), now)

    def _take_events(self) -> list[tuple[Request, Outcome]]:
        """Unpark requests whose grammar is compiled by now. Returns those whose grammar has failed,
        to be ended. At most `MAX_EVENTS_PER_STEP` of both."""
        failed: list[tuple[Request, Outcome]] = []
        if not self._num_waiting:
            return failed
        with_room, self._with_room = self._with_room, {}
        for name in with_room:
            if (tenant := self._tenants.get(name)) is not None:
                self._compile_queued(tenant)
        for _ in range(MAX_EVENTS_PER_STEP):
            number = self._compiler.next_compiled()
            if number is None:
                break
            entry = self._by_number.get(number)
            if entry is None or not entry.is_waiting:
                continue  # it has ended, or it runs and was not in need of a mask meanwhile
            try:
                self._take_event(entry)
            except GrammarError as error:
                self._move(entry, _Stage.ADMITTED)
                failed.append((entry.request, outcome_of(error)))
            if (tenant := self._tenants.get(entry.request.options.tenant.name)) is not None:
                self._compile_queued(tenant)
        return failed

    def _take_event(self, entry: _Entry) -> None:
        request, grammar = entry.request, entry.grammar
        assert grammar is not None
        if not grammar.is_compiled():
            return  # it was lost meanwhile
        if not entry.has_begun and request.num_output_tokens:  # it continues output of another one
            outputs = request.token_ids[request.num_prompt_tokens :].tolist()
            if not grammar.accept_tokens(outputs):
                raise GrammarError("the output emitted so far does not match the grammar")
        entry.has_begun = True
        if entry.stage is _Stage.COMPILING:
            self._move(entry, _Stage.AHEAD)
        request.change(RequestChange.GRAMMAR_COMPILED)
        entry.is_waiting = False
        self._num_waiting -= 1
        if entry.is_parked:
            entry.is_parked = False
            self._waiting.unpark(request)

    def gate(self, request: Request) -> Attempt | Outcome | None:
        """The head of the queue may have lost its grammar. It is unparked when that is compiled."""
        if request.options.structured_output is None:
            return None
        try:
            if not self._must_wait(request):
                return None
        except GrammarError as error:
            return outcome_of(error)
        self._waiting.park_head()
        return Attempt.PARKED

    def _must_wait(self, request: Request) -> bool:
        entry = self._entries[request]
        if not entry.is_waiting:
            assert entry.grammar is not None
            if entry.grammar.is_compiled():
                return False
            request.change(RequestChange.NEEDS_GRAMMAR)
            entry.is_waiting = True
            self._num_waiting += 1
        entry.is_parked = True
        return True

    def admitted(self, request: Request, num_computed: int, num_tokens: int) -> None:
        """Another grammar may be compiled ahead."""
        if request.options.structured_output is not None:
            self._move(self._entries[request], _Stage.ADMITTED)

    def _compile_queued(self, tenant: _Tenant) -> None:
        while (
            tenant.num_queued
            and tenant.num_compiling < MAX_COMPILING_PER_TENANT
            and tenant.num_ahead < self._max_ahead
        ):
            _, number, entry = heapq.heappop(tenant.queued)
            if number not in self._by_number:
                continue  # its request has ended
            self._move(entry, _Stage.COMPILING)
            spec = entry.request.options.structured_output
            assert spec is not None
            entry.grammar = self._compiler.compile(number, spec)

    def _move(self, entry: _Entry, stage: _Stage) -> None:
        """The grammar of a request reaches another stage."""
        if entry.stage is _Stage.ADMITTED:
            return
        name = entry.request.options.tenant.name
        tenant = self._tenants[name]
        tenant.count(entry.stage, -1)
        tenant.count(stage, 1)
        entry.stage = stage
        if tenant.is_idle:
            del self._tenants[name]
        elif stage is _Stage.ADMITTED and tenant.num_queued:
            self._with_room[name] = None

    # Tokens and masks

    def appended(self, request: Request, token_id: int) -> Outcome | None:
        """Advance by a verified token."""
        grammar = self._grammar_of(request)
        if grammar is None or grammar.accept_tokens([token_id]):
            return None
        return Outcome(FinishReason.ERROR, f"token {token_id} was sampled against the grammar")

    def num_valid(self, request: Request, token_ids: Sequence[int]) -> int:
        """How many leading drafts the request's grammar allows."""
        grammar = self._grammar_of(request)
        return len(token_ids) if grammar is None else grammar.num_valid(token_ids)

    def _grammar_of(self, request: Request) -> Grammar | None:
        entry = self._entries.get(request)
        return None if entry is None else entry.grammar

    def ended(
        self, request: Request, blocks: HeldBlocks | None, outcome: Outcome, now: float
    ) -> FinishAction | None:
        """The request's grammar is not needed any more."""
        self.failed.pop(request, None)
        self.lost.pop(request, None)
        if (entry := self._entries.pop(request, None)) is not None:
            del self._by_number[entry.number]
            self._num_waiting -= entry.is_waiting
            self._move(entry, _Stage.ADMITTED)
            if entry.grammar is not None:
                entry.grammar.release()
        return None

    def received(self, output: ModelRunnerOutput, planned: PlannedStep, now: float) -> None:
        """No token may be applied to a request whose grammar has failed or is lost."""
        self._settle(now)

    def _settle(self, now: float) -> None:
        """End running requests whose grammar has failed, and preempt those whose grammar is lost;
        their latest mask allows every token. The latter wait for their grammars again, and sample
        again what they sample in unanswered steps."""
        while self.failed:
            self._lifecycle.end(*next(iter(self.failed.items())), now)
        lost, self.lost = self.lost, {}
        for request in lost:
            if request.row >= 0:
                self._lifecycle.preempt(request, now)
            self._in_flight.void_past_occupants(request)

    def fields(
        self, plan: PlanChanges, num_scheduled: Int64Array, answered_step: int
    ) -> dict[str, Any]:
        """Whether the workers must wait for masks."""
        running = self._running
        ends = running.num_computed + num_scheduled >= running.num_known
        is_masked = bool((running.has_grammar & (num_scheduled > 0) & ends).any())
        return {"has_structured_output": is_masked}

    def built(self, plan: SchedulerOutput, planned: PlannedStep, now: float) -> None:
        """The masks of the plan are of these rows."""
        if plan.has_structured_output:
            planned.is_masked = self._running.has_grammar[planned.sampling.rows]

    def take_masks(self) -> list[SampleMask]:
        """The mask of the oldest unanswered plan, once, as soon as it is computed: all tokens
        before it are known."""
        if not self._in_flight.steps:
            return []
        planned = self._in_flight.steps[0]
        if planned.is_masked is None or planned.step == self._last_masked_step:
            return []
        mask = self._make_mask(planned, planned.is_masked)
        if mask is None:
            self._compiler.flush()
            return []
        self._last_masked_step = planned.step
        return [mask]

    def _make_mask(self, planned: PlannedStep, is_masked: BoolArray) -> SampleMask | None:
        """None if the mask of a row is still being computed; all rows have been asked for then."""
        width = -(-self._vocab_size // 8)
        rows: list[int] = []
        masks: list[UInt8Array] = []
        sampling = planned.sampling
        is_complete = True
        for index in np.flatnonzero(is_masked).tolist():
            row, drafts = int(sampling.rows[index]), planned.draft_token_ids(index)
            bits = np.zeros((1 + len(drafts), width), np.uint8)
            occupant = self._in_flight.occupant(row, int(sampling.generations[index]))
            if occupant.expects_output_of(planned.step):
                is_complete &= self._fill(occupant.request, drafts, bits)
            else:
                bits[:] = 0xFF  # its tokens are void, but the worker waits for a mask
            rows += [row] * len(bits)
            masks.append(bits.reshape(-1))
        if not is_complete:
            return None
        return SampleMask(self._epoch, planned.step, int32_array(rows), np.concatenate(masks))

    def _fill(self, request: Request, drafts: Sequence[int], bits: TokenMasks) -> bool:
        grammar = self._grammar_of(request)
        assert grammar is not None
        try:
            return grammar.fill_masks(drafts, bits)
        except GrammarError as error:
            self.failed[request] = outcome_of(error)
        except GrammarLost:
            self.lost[request] = None
        bits[:] = 0xFF  # the request ends, or is preempted, before what is sampled is applied
        return True
