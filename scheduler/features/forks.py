"""Requests that begin with the KV of another one: who waits for whom, and who holds what.

A fork names a live request of its client, its parent. It waits, parked, until the parent has
computed the tokens that both begin with, and answers have confirmed it; then it takes a reference
to each of their blocks, the partial last one included. It writes to that one alone, so it gets a
copy of it before its first step, unless nobody else has it any more (copy-on-write, as in
PagedAttention, Kwon et al., 2023, section 4.4).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longshore.protocol.arrays import Int32Array
from longshore.protocol.requests import AddRequest
from longshore.scheduler.kv_cache.manager import HeldBlocks, KVCacheManager
from longshore.scheduler.queue.waiting import WaitingRequests
from longshore.scheduler.request import Request, RequestStatus
from longshore.scheduler.step.in_flight import StepsInFlight
from longshore.scheduler.step.running import RunningTable


@dataclass(eq=False, slots=True)
class _Fork:
    """A fork that has not begun.

    num_common: leading tokens that it shares with its parent, at least one short of all its own.
    step:       the plan in which the parent has computed them, as occupant `generation` of its row.
    """

    request: Request
    parent: Request
    num_common: int
    step: int | None = None
    generation: int = 0
    is_parked: bool = False


class Forks:
    """Forks that wait for their turn, and requests that hold blocks without running.

    A hold is what a fork keeps of a parent that has left, or a session between two inputs that
    `keeps_blocks`: useful, and given up before anybody who runs is preempted, the youngest first.
    """

    def __init__(
        self,
        running: RunningTable,
        waiting: WaitingRequests,
        kv_cache: KVCacheManager,
        in_flight: StepsInFlight,
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._kv_cache = kv_cache
        self._in_flight = in_flight
        self._forks: dict[Request, _Fork] = {}
        self._of_parent: dict[Request, list[_Fork]] = {}
        self._pending: dict[_Fork, None] = {}  # their parents run
        self._holders: dict[Request, None] = {}  # the youngest hold last

    # Forks

    def __contains__(self, request: Request) -> bool:
        return request in self._forks

    def add(self, request: Request, parent: Request) -> bool:
        """A new request that is to begin with its parent's KV is put where it waits. False if it
        shares nothing that could be had: then it is a request like any other."""
        if not self._kv_cache.can_fork or request.skip_reading_prefix_cache:
            return False
        num_common = num_common_tokens(request.token_ids[:-1], self._tokens_of(parent))
        fork = _Fork(request, parent, num_common)
        if not num_common or self._is_hopeless(fork):
            return False
        self._forks[request] = fork
        self._of_parent.setdefault(parent, []).append(fork)
        if self._is_ready(fork):
            self._waiting.add_blocked(request)
        else:
            self._waiting.add_parked(request)
            self._wait(fork)
        return True

    def must_wait(self, request: Request) -> bool:
        """Whether the parent has not computed what they share, but will; the caller parks the
        fork then, which comes back when it may be tried again."""
        fork = self._forks[request]
        if self._is_ready(fork) or self._is_hopeless(fork):
            return False
        self._wait(fork)
        return True

    def take(self, request: Request) -> HeldBlocks | None:
        """What a fork that need not wait can begin with, as a hold of its own; None if that is
        nothing."""
        fork = self._forks[request]
        if self._is_hopeless(fork):
            return None
        parent = fork.parent
        if parent.held is None:
            tables, num_tokens = self._kv_cache.block_ids(parent.row), fork.num_common
        else:
            tables = parent.held.block_ids
            num_tokens = min(fork.num_common, parent.num_computed_tokens)
        held = self._kv_cache.fork(tables, num_tokens)
        self.hold(request, held, num_tokens)
        return held

    def drop(self, request: Request) -> None:
        """The request has begun, or ended, or begins like any other."""
        fork = self._forks.pop(request, None)
        if fork is not None:
            self._pending.pop(fork, None)
            siblings = self._of_parent[fork.parent]
            siblings.remove(fork)
            if not siblings:
                del self._of_parent[fork.parent]

    # Parents

    def parent_begins(self, request: Request) -> None:
        """A request has got a row."""
        for fork in self._of_parent.get(request, ()):
            if fork.is_parked:
                self._pending[fork] = None

    def parent_ends(self, request: Request) -> None:
        """A request gives up row or hold for good, and still has it: its forks go on without it,
        with what they share if it is computed."""
        for fork in list(self._of_parent.get(request, ())):
            if self._is_ready(fork):
                self.take(fork.request)
            self._release(fork)
            self.drop(fork.request)

    def planned(self) -> None:
        """A plan has been built: parents may have got there."""
        for fork in self._pending:
            self._note_step(fork)

    def answered(self) -> None:
        """An answer has been applied: forks whose parents' work it confirms may be tried."""
        for fork in [fork for fork in self._pending if self._is_ready(fork)]:
            self._release(fork)

    def _tokens_of(self, parent: Request) -> Int32Array:
        return self._running.tokens_of(parent.row) if parent.row >= 0 else parent.token_ids

    def _wait(self, fork: _Fork) -> None:
        fork.is_parked = True
        fork.request.waits_for = (
            f"request {fork.parent.request_id} to compute the {fork.num_common} tokens that both "
            "begin with"
        )
        if fork.parent.row >= 0:
            self._pending[fork] = None
            self._note_step(fork)

    def _release(self, fork: _Fork) -> None:
        """It may be tried."""
        self._pending.pop(fork, None)
        if fork.is_parked:
            fork.is_parked = False
            fork.request.waits_for = None
            self._waiting.unpark(fork.request)

    def _note_step(self, fork: _Fork) -> None:
        row, running = fork.parent.row, self._running
        if row < 0 or running.num_computed[row] < fork.num_common:
            fork.step = None
        elif fork.step is None or not self._stands(fork):
            fork.step, fork.generation = self._in_flight.newest_step, int(running.generation[row])

    def _stands(self, fork: _Fork) -> bool:
        """The parent has not left the row on which it computed, nor been sent back since."""
        row, running = fork.parent.row, self._running
        return (
            fork.step is not None
            and row >= 0
            and running.generation[row] == fork.generation
            and running.void_through[row] < fork.step
        )

    def _is_ready(self, fork: _Fork) -> bool:
        parent = fork.parent
        if parent.row >= 0:
            answered_step = self._in_flight.last_answered_step
            return self._stands(fork) and fork.step is not None and fork.step <= answered_step
        if parent not in self._holders:
            return False
        is_between = parent.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        return is_between or parent.num_computed_tokens >= fork.num_common

    def _is_hopeless(self, fork: _Fork) -> bool:
        """The parent is between two inputs and has nothing; nobody knows when it goes on."""
        parent = fork.parent
        is_between = parent.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        return is_between and (parent.held is None or parent.num_computed_tokens == 0)

    # Holds

    def __iter__(self) -> Iterator[Request]:
        """Those who hold blocks, the eldest hold first."""
        return iter(self._holders)

    def holds(self, request: Request) -> bool:
        """Whether `request.held` is a hold; else a load has brought it, if anything."""
        return request in self._holders

    def hold(self, request: Request, held: HeldBlocks, num_tokens: int) -> None:
        """The request, which is on no row, owns these references from now on: the KV of its first
        `num_tokens` tokens."""
        request.held, request.num_computed_tokens = held, num_tokens
        self._holders[request] = None

    def take_over(self, request: Request) -> HeldBlocks:
        """The hold is over; its references are the caller's."""
        held = request.held
        assert held is not None
        del self._holders[request]
        request.held, request.num_computed_tokens = None, 0
        return held

    def give_up(self, request: Request) -> None:
        """The blocks go back; the request computes everything when its turn comes."""
        self._kv_cache.release(self.take_over(request))

    def release_youngest(self, *, besides: Request | None = None) -> bool:
        """Blocks are short. False if nobody else holds any."""
        for request in reversed(self._holders):
            if request is not besides:
                self.give_up(request)
                return True
        return False

    def begin_epoch(self) -> None:
        """All KV is gone; parents compute it again, and who waits for them goes on waiting."""
        for request in self._holders:
            request.held, request.num_computed_tokens = None, 0
        self._holders.clear()
        self._pending.clear()


def num_common_tokens(one: Int32Array, other: Int32Array) -> int:
    """Leading tokens that are the same in both."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(np.argmax(differs)) if differs.any() else length


def fork_problem(message: AddRequest, parent: Request | None) -> str | None:
    """Why a request cannot be a fork of this parent; None if it can. An unknown parent has ended:
    the request is one like any other."""
    for name in ("multimodal", "prompt_embeds", "pooling"):
        if getattr(message, name):
            return f"fork_of does not go together with {name}"
        if parent is not None and getattr(parent, name):
            return f"it is a fork of a request that has {name}; only token ids can be shared"
    if parent is None:
        return None
    if message.lora != parent.lora:
        return "a fork has the adapter of its parent, or none if that has none"
    if message.cache_salt != parent.cache_salt:
        return "a fork has the cache_salt of its parent, or none if that has none"
    return None
