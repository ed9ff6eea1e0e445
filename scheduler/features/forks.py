"""Requests that begin with the KV of another one (`fork_of`).

A fork refers to a live request of its client, its parent. It is parked until the parent has
computed the tokens that both begin with, and outputs have confirmed this. Then it takes a reference
to each of their blocks, including the partial last one. It writes only to that one, so it gets a
copy of it before its first step, unless it is the only holder (copy-on-write, as in PagedAttention,
Kwon et al., 2023, section 4.4). The same holds for a recurrent state, which must be that after
exactly the common tokens: see `fork_states`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.requests import AddRequest
from longshore.protocol.statistics import BlockState
from longshore.scheduler.heap import KeyedHeap
from longshore.scheduler.hooks import Admitter, Attempt, SchedulerFeature
from longshore.scheduler.kv_cache.blocks import ComputedBlocks, HeldBlocks
from longshore.scheduler.kv_cache.holds import Holds
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.queue.queues import WaitingRequests
from longshore.scheduler.request import Hold, HoldKind, Request, RequestStatus
from longshore.scheduler.step.in_flight import PlannedStep, StepsInFlight
from longshore.scheduler.step.running import RunningTable


@dataclass(eq=False, slots=True)
class _Fork:
    """A fork that has not begun.

    num_common: leading tokens that it shares with its parent; all of its tokens but one at most.
    step:       the plan in which the parent computed them, as occupant `generation` of its row.
    """

    request: Request
    parent: Request
    num_common: int
    step: int | None = None
    generation: int = 0
    is_parked: bool = False

    @property
    def parent_has_paused(self) -> bool:
        """The parent is a session between two inputs."""
        return self.parent.status is RequestStatus.WAITING_FOR_STREAMING_REQ


@dataclass(slots=True)
class _Family:
    """The parked forks of a running parent.

    ahead:   those whose common tokens no plan has computed yet, the fewest tokens first.
    planned: those whose common tokens a plan has computed, the oldest plan first.
    """

    ahead: KeyedHeap[int, _Fork] = field(default_factory=KeyedHeap)
    planned: dict[_Fork, None] = field(default_factory=dict)

    def add(self, fork: _Fork) -> None:
        """Add a fork, or move it back to those whose common tokens must be computed."""
        fork.step = None
        self.planned.pop(fork, None)
        self.ahead.add(fork.request.request_id, fork.num_common, fork)

    def discard(self, fork: _Fork) -> None:
        """Remove a fork, if it is one of these."""
        self.planned.pop(fork, None)
        self.ahead.discard(fork.request.request_id)

    def __len__(self) -> int:
        return len(self.ahead) + len(self.planned)


class StatesOfForks(Protocol):
    """See `ForkStates`."""

    @property
    def of_fork(self) -> Mapping[Request, HeldBlocks]: ...

    def release(self, request: Request) -> None: ...
    def owners(self) -> Iterator[tuple[BlockState, str, HeldBlocks]]: ...


@dataclass(slots=True, eq=False)
class Forks(SchedulerFeature):
    """Forks that have not begun; asleep until the first one arrives. A step costs O(1) for each
    running parent of parked forks, and O(log n) for each fork whose common tokens it computes or
    confirms.

    find:    the live request of a client with this handle.
    waiting: by request.
    parents: the forks of a request that has some.
    pending: the parked forks of parents that run.
    states:  of the forks, in models with states.
    """

    running: RunningTable
    queues: WaitingRequests
    kv_cache: KVCacheManager
    holds: Holds
    in_flight: StepsInFlight
    find: Callable[[int, int], Request | None]
    waiting: dict[Request, _Fork] = field(default_factory=dict)
    parents: dict[Request, dict[_Fork, None]] = field(default_factory=dict)
    pending: dict[Request, _Family] = field(default_factory=dict)
    states: StatesOfForks | None = None
    _parent: Request | None = None  # of the request that is being added

    def problem(self, message: AddRequest, client: int) -> str | None:
        """See `fork_problem`."""
        self._parent = None
        if message.fork_of is None or not self.kv_cache.follows_from_tokens:
            return None
        self._parent = self.find(client, message.fork_of)
        return fork_problem(message, self._parent)

    def queue(self, request: Request, is_queued: bool) -> bool:
        """Queue or park a new request that is to begin with its parent's KV. One that shares
        nothing with its parent is queued like any other request."""
        parent, self._parent = self._parent, None
        return is_queued if parent is None else self._add(request, parent)

    def _add(self, request: Request, parent: Request) -> bool:
        if not self.kv_cache.can_fork or request.skips_prefix_cache:
            return False
        num_common = num_common_tokens(request.token_ids[:-1], self._tokens_of(parent))
        fork = _Fork(request, parent, num_common)
        if not num_common or self._is_hopeless(fork):
            return False
        self.waiting[request] = fork
        self.parents.setdefault(parent, {})[fork] = None
        if self._is_ready(fork):
            self.queues.add_blocked(request)
        else:
            self.queues.add_parked(request)
            self._wait(fork)
        return True

    def gate(self, request: Request) -> Attempt | None:
        """A fork waits if its parent has not computed the common tokens yet, but will. It is
        unparked when it can be tried again."""
        fork = self.waiting.get(request)
        if fork is None or request.hold is not None:
            return None
        if self._is_ready(fork) or self._is_hopeless(fork):
            return None
        self._wait(fork)
        self.queues.park_head()
        return Attempt.PARKED

    def begin(
        self, admission: Admitter, request: Request, prefix: ComputedBlocks, now: float
    ) -> Attempt | None:
        """Start a fork with the common blocks, if they are more than its cached prefix."""
        if request not in self.waiting or (hold := self.take(request)) is None:
            return None
        attempt = None
        if hold.num_computed_tokens > prefix.num_tokens:
            attempt = admission.start(request, hold)
        if attempt is not Attempt.ADMITTED:
            self.holds.release(request)
        return attempt

    def admitted(self, request: Request, num_computed: int, num_tokens: int) -> None:
        """The request is no fork any more, and its own forks may see what it computes."""
        self.drop(request)
        for fork in self.parents.get(request, ()):
            if fork.is_parked:
                self._pend(fork)

    def take(self, request: Request) -> Hold | None:
        """Give a fork that need not wait a hold on the common blocks; None if there are none."""
        fork = self.waiting[request]
        if self._is_hopeless(fork):
            return None
        parent, state = fork.parent, None
        if parent.hold is None:
            tables, num_tokens = self.kv_cache.block_ids(parent.row), fork.num_common
            state = None if self.states is None else self.states.of_fork[request]
        else:
            tables = parent.hold.blocks.block_ids
            num_tokens = min(fork.num_common, parent.hold.num_computed_tokens)
        blocks = self.kv_cache.fork(tables, num_tokens, state)
        hold = Hold(HoldKind.FORK, blocks, num_tokens, self.holds.next_order())
        self.holds.add(request, hold)
        return hold

    def drop(self, request: Request) -> None:
        """The request has begun to run or to load, or it has ended: its parent must not give it a
        hold."""
        fork = self.waiting.pop(request, None)
        if fork is not None:
            self._release_state(fork)
            self._stop_pending(fork)
            siblings = self.parents[fork.parent]
            del siblings[fork]
            if not siblings:
                del self.parents[fork.parent]

    # Parents

    def ending(self, request: Request, now: float) -> None:
        """The forks of a request that ends take the common blocks, if these are computed, and
        continue without it."""
        for fork in list(self.parents.get(request, ())):
            if self._is_ready(fork):
                self.take(fork.request)
            self._unpark(fork)
            self.drop(fork.request)
        self.drop(request)

    def planned(self, plan: SchedulerOutput | None, now: float) -> None:
        """Parents may have computed what their forks share."""
        for parent in list(self.pending if plan is not None else ()):
            self._note_step(parent)

    def answered(self, output: ModelRunnerOutput, planned: PlannedStep, now: float) -> None:
        """Unpark the forks whose common tokens the output confirms."""
        for family in list(self.pending.values()):
            while (fork := next(iter(family.planned), None)) and self._is_ready(fork):
                self._unpark(fork)

    def plan_through(self, parent: Request, num_tokens: int, step: int) -> Iterator[_Fork]:
        """Take the forks of a running parent whose common tokens are among its first `num_tokens`
        as computed in plan `step`, unless the caller says that they `miss` it."""
        family = self.pending[parent]
        self._return_invalid(family)
        while (first := family.ahead.first()) is not None and first[0] <= num_tokens:
            fork = family.ahead.pop()
            fork.step, fork.generation = step, int(self.running.generation[parent.row])
            family.planned[fork] = None
            yield fork

    def miss(self, fork: _Fork) -> None:
        """The state after the common tokens is not kept: the fork begins like any request."""
        self._unpark(fork)
        self.drop(fork.request)

    def begin_epoch(self, epoch: int) -> None:
        """All KV is lost; parents recompute it, and their forks keep waiting for them."""
        self.pending.clear()

    def check(self, running: Collection[Request], waiting: Collection[Request]) -> None:
        """Raise LongshoreError unless all forks are among the `waiting` requests, have no blocks
        or load yet, and are recorded with their parents, which have not ended."""
        of_parents = [fork for forks in self.parents.values() for fork in forks]
        wrong: list[_Fork] = [
            fork
            for fork in of_parents
            if self.waiting.get(fork.request) is not fork
            or fork not in self.parents.get(fork.parent, ())
            or fork.parent.is_finished
            or fork.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        ]
        for parent, family in self.pending.items():
            forks = [*family.ahead, *family.planned]
            siblings = self.parents.get(parent, ())
            wrong += [fork for fork in forks if fork not in siblings or not fork.is_parked]
        if wrong:
            raise LongshoreError(f"the fork {wrong[0].request.request_id} is recorded wrongly")
        if len(of_parents) != len(self.waiting) or not all(self.parents.values()):
            raise LongshoreError(
                f"{len(of_parents)} forks have a parent, but {len(self.waiting)} wait"
            )
        if not self.waiting.keys() <= set(waiting):
            raise LongshoreError("a fork is recorded that does not wait")

    def _tokens_of(self, parent: Request) -> Int32Array:
        return self.running.tokens_of(parent.row) if parent.row >= 0 else parent.token_ids

    def _wait(self, fork: _Fork) -> None:
        fork.is_parked = True
        fork.request.waits_for = (
            f"request {fork.parent.request_id} to compute the {fork.num_common} tokens that both "
            "begin with"
        )
        if fork.parent.row >= 0:
            self._pend(fork)
            self._note_step(fork.parent)

    def _unpark(self, fork: _Fork) -> None:
        self._stop_pending(fork)
        if fork.is_parked:
            fork.is_parked = False
            fork.request.waits_for = None
            self.queues.unpark(fork.request)

    def _release_state(self, fork: _Fork) -> None:
        if self.states is not None:
            self.states.release(fork.request)

    def _pend(self, fork: _Fork) -> None:
        self._release_state(fork)
        self.pending.setdefault(fork.parent, _Family()).add(fork)

    def _stop_pending(self, fork: _Fork) -> None:
        family = self.pending.get(fork.parent)
        if family is not None:
            family.discard(fork)
            if not family:
                del self.pending[fork.parent]

    def _note_step(self, parent: Request) -> None:
        """Note which forks of a parent have their common tokens in a plan by now. If it has lost
        its row, its forks wait until it has one again."""
        if parent.row < 0:
            del self.pending[parent]
            return
        num_computed = int(self.running.num_computed[parent.row])
        for fork in self.plan_through(parent, num_computed, self.in_flight.newest_step):
            if self.states is not None:
                self.miss(fork)

    def _return_invalid(self, family: _Family) -> None:
        """Return the forks whose parent was rewound, or has another row, to those that wait."""
        while (fork := next(iter(family.planned), None)) and not self._is_valid(fork):
            self._release_state(fork)
            family.add(fork)

    def _is_valid(self, fork: _Fork) -> bool:
        """The parent still has the row on which it computed, and has not been rewound since."""
        row, running = fork.parent.row, self.running
        return (
            fork.step is not None
            and row >= 0
            and running.generation[row] == fork.generation
            and running.void_through[row] < fork.step
        )

    def _is_ready(self, fork: _Fork) -> bool:
        parent, answered_step = fork.parent, self.in_flight.last_answered_step
        if parent.row >= 0:
            return self._is_valid(fork) and fork.step is not None and fork.step <= answered_step
        if parent.hold is None or parent.hold.kind is HoldKind.LOADED:
            return False
        num_held = parent.hold.num_computed_tokens
        if self.states is not None and (
            num_held > fork.num_common or parent.resume_after_step > answered_step
        ):
            return False
        return fork.parent_has_paused or num_held >= fork.num_common

    def _is_hopeless(self, fork: _Fork) -> bool:
        """The parent waits for input and holds no blocks; when it continues is unknown. Or it has
        no state any more after the common tokens."""
        parent = fork.parent
        if fork.parent_has_paused:
            return parent.num_computed_tokens == 0 or not self._is_ready(fork)
        if self.states is None:
            return False
        if parent.row >= 0:
            is_past = self.running.num_computed[parent.row] >= fork.num_common
            return bool(is_past) and not self._is_valid(fork)
        return parent.hold is not None and parent.num_computed_tokens > fork.num_common


def num_common_tokens(one: Int32Array, other: Int32Array) -> int:
    """Number of leading tokens that are equal in both."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(np.argmax(differs)) if differs.any() else length


def fork_problem(message: AddRequest, parent: Request | None) -> str | None:
    """Why a request cannot be a fork of this parent; None if it can. If the parent is unknown, it
    has ended, and the request is queued like any other."""
    asked = message.options
    for name in ("multimodal", "prompt_embeds", "pooling"):
        if getattr(asked, name):
            return f"fork_of cannot be combined with {name}"
        if parent is not None and getattr(parent.options, name):
            return f"the parent of a fork has {name}; only the KV of token ids can be shared"
    if parent is None:
        return None
    if asked.lora != parent.options.lora:
        return "a fork and its parent must have the same adapter, or both none"
    if asked.cache_salt != parent.options.cache_salt:
        return "a fork and its parent must have the same cache_salt, or both none"
    if asked.no_store != parent.options.no_store:
        return "a fork and its parent must both have no_store, or both not"
    return None
