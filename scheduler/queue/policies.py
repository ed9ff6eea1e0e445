"""Scheduling policies: who is served first, and who gives up blocks.

A policy sees requests, never blocks or rows, and decides three things: the order of those that
wait, which of two waiting queues goes first, and the victim. It keeps no clock and does no I/O.
Other packages bring their own: entry point group `longshore.scheduling_policies`, or
`package.module:Class`. docs/scheduling_policies.md shows one.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Final, TypeVar

from longshore.protocol.errors import ConfigError, LongshoreError
from longshore.scheduler.queue.queues import (
    FCFSQueue,
    Order,
    PolicyRequest,
    PriorityQueue,
    RequestQueue,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "POLICIES",
    "CheckedPolicy",
    "ContinuumPolicy",
    "FCFSPolicy",
    "FCFSQueue",
    "Order",
    "OrderedPolicy",
    "PolicyError",
    "PolicyRequest",
    "PriorityPolicy",
    "PriorityQueue",
    "SchedulingPolicy",
    "checked",
    "load_policy",
]

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP: Final = "longshore.scheduling_policies"

Answer = TypeVar("Answer")


class PolicyError(LongshoreError):
    """A policy from elsewhere raised, or answered something that makes no sense."""


class SchedulingPolicy(ABC):
    """One object per scheduler, called on its thread only.

    ignores_priority: a request that asks for one is then warned about, once.
    """

    ignores_priority: ClassVar[bool] = False

    @abstractmethod
    def make_queue(self) -> RequestQueue[Any]:
        """FCFSQueue() or PriorityQueue(order), empty: for the requests that may be admitted, and
        for those set aside unless the first is an FCFSQueue (they keep their places then). Called
        again after `update_pinned_state` returned True."""

    @abstractmethod
    def prefers_skipped(self, waiting: PolicyRequest, skipped: PolicyRequest) -> bool:
        """Whether the head of those set aside goes before the head of those that wait."""

    @abstractmethod
    def pick_victim(self, running: Sequence[PolicyRequest]) -> int:
        """Index in `running` (in admission order, not empty) of the request to preempt. While
        others run it must not be the one that this policy itself serves first (the eldest, if it
        keeps an FCFSQueue): were nobody safe, all could preempt one another for ever."""

    # The hooks below do nothing by default.

    def arrived(self, request: PolicyRequest) -> None:  # noqa: B027  # optional
        """A new request is about to wait. A preempted one that returns is not announced."""

    def update_pinned_state(self, job_ids: Collection[str]) -> bool:
        """Jobs whose KV is kept for their next turn. True if the order of requests that wait has
        changed by it. Nothing pins yet, so no step of this version says it."""
        return False


class OrderedPolicy(SchedulingPolicy):
    """A policy that is an order: the smallest is served first, the largest gives way. Equals are
    told apart by their request ids."""

    @abstractmethod
    def order(self, request: PolicyRequest) -> Order:
        """A number, a string or a tuple of them. It must not change while the request waits."""

    def make_queue(self) -> RequestQueue[Any]:
        return PriorityQueue(self.order)

    def prefers_skipped(self, waiting: PolicyRequest, skipped: PolicyRequest) -> bool:
        return self._position(skipped) < self._position(waiting)

    def pick_victim(self, running: Sequence[PolicyRequest]) -> int:
        return max(range(len(running)), key=lambda index: self._position(running[index]))

    def _position(self, request: PolicyRequest) -> tuple[Order, str]:
        return self.order(request), request.request_id


class FCFSPolicy(SchedulingPolicy):
    """First come, first served; the youngest running request gives way and returns to the front."""

    ignores_priority = True

    def make_queue(self) -> RequestQueue[Any]:
        return FCFSQueue()

    def prefers_skipped(self, waiting: PolicyRequest, skipped: PolicyRequest) -> bool:
        return True  # it had reached the head before everything that still waits

    def pick_victim(self, running: Sequence[PolicyRequest]) -> int:
        return len(running) - 1


class PriorityPolicy(OrderedPolicy):
    """The smallest (priority, arrival, id) is served first, the largest gives way."""

    def order(self, request: PolicyRequest) -> Order:
        return request.priority, request.arrival_time


class _Job:
    """first_arrival_s: of the first turn seen. turns: its requests; some may have ended."""

    def __init__(self, first_arrival_s: float) -> None:
        self.first_arrival_s = first_arrival_s
        self.turns: list[PolicyRequest] = []

    def is_live(self) -> bool:
        self.turns = [turn for turn in self.turns if not turn.is_finished]
        return bool(self.turns)


class ContinuumPolicy(OrderedPolicy):
    """First come, first served by jobs: a turn stands where its job's first turn stood, and pinned
    jobs, whose prefix is still in memory, go first. A request without a job is a job of its own.

    A job is forgotten when none of its requests is live and it is not pinned: the next turn then
    counts as the first. After Continuum (arXiv 2511.02230).
    """

    ignores_priority = True

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._pinned: frozenset[str] = frozenset()
        self._sweep_at = _MIN_SWEEP

    def arrived(self, request: PolicyRequest) -> None:
        if request.job_id is None:
            return
        job = self._jobs.get(request.job_id)
        if job is None or not self._is_remembered(request.job_id, job):
            job = self._jobs[request.job_id] = _Job(request.arrival_time)
        if request not in job.turns:
            job.turns.append(request)
        if len(self._jobs) >= self._sweep_at:  # amortised: the dead half or more went with the last
            self._jobs = {
                id_: job for id_, job in self._jobs.items() if self._is_remembered(id_, job)
            }
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._jobs))

    def _is_remembered(self, job_id: str, job: _Job) -> bool:
        return job.is_live() or job_id in self._pinned

    def update_pinned_state(self, job_ids: Collection[str]) -> bool:
        previous, self._pinned = self._pinned, frozenset(job_ids)
        return self._pinned != previous

    def order(self, request: PolicyRequest) -> Order:
        job_id = request.job_id
        if job_id is None:
            return True, request.arrival_time, request.arrival_time
        return job_id not in self._pinned, self._jobs[job_id].first_arrival_s, request.arrival_time

    def pick_victim(self, running: Sequence[PolicyRequest]) -> int:
        last = len(running) - 1
        unpinned = (i for i in range(last, -1, -1) if running[i].job_id not in self._pinned)
        return next(unpinned, last)


_MIN_SWEEP: Final = 64

POLICIES: Final[dict[str, type[SchedulingPolicy]]] = {
    "fcfs": FCFSPolicy,
    "priority": PriorityPolicy,
    "continuum": ContinuumPolicy,
}


class CheckedPolicy(SchedulingPolicy):
    """Another policy, whose answers are checked before anything is done with them: whatever it
    raises, and whatever makes no sense, is a PolicyError that names it and its method. A victim
    without which nobody would be sure to advance is replaced by the youngest other request."""

    def __init__(self, policy: SchedulingPolicy, name: str) -> None:
        self._policy = policy
        self._name = name
        self._shape: object = None
        self._order: Callable[[PolicyRequest], Order] | None = None
        self._has_warned = False
        self.ignores_priority = policy.ignores_priority  # type: ignore[misc]  # of this instance

    def make_queue(self) -> RequestQueue[Any]:
        queue = self._ask(self._policy.make_queue)
        if type(queue) is PriorityQueue:
            self._order = partial(self._check_order, queue.order)
            return PriorityQueue(self._order)
        if type(queue) is not FCFSQueue:
            raise self._nonsense("make_queue", queue, "an FCFSQueue or a PriorityQueue")
        return queue

    def _check_order(
        self, order: Callable[[PolicyRequest], Order], request: PolicyRequest
    ) -> Order:
        answer = self._ask(order, request)
        parts = answer if isinstance(answer, tuple) else (answer,)
        for part in parts:
            if not isinstance(part, int | float | str) or part != part:
                raise self._nonsense("order", answer, "made of numbers and strings")
        shape = (type(answer) is tuple, *(isinstance(part, str) for part in parts))
        self._shape = self._shape or shape
        if shape != self._shape:
            raise self._nonsense("order", answer, "comparable with what it returned before")
        return answer

    def prefers_skipped(self, waiting: PolicyRequest, skipped: PolicyRequest) -> bool:
        answer = self._ask(self._policy.prefers_skipped, waiting, skipped)
        if not isinstance(answer, bool):
            raise self._nonsense("prefers_skipped", answer, "True or False")
        return answer

    def pick_victim(self, running: Sequence[PolicyRequest]) -> int:
        answer = self._ask(self._policy.pick_victim, tuple(running))
        if type(answer) is not int or not 0 <= answer < len(running):
            raise self._nonsense("pick_victim", answer, f"an index of {len(running)} requests")
        if len(running) == 1 or answer != self._first(running):
            return answer
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "scheduling policy %r preempts the request that it serves first; so that somebody "
                "advances, the youngest other one gives way instead (said once)",
                self._name,
            )
        last = len(running) - 1
        return last if answer != last else last - 1

    def _first(self, running: Sequence[PolicyRequest]) -> int:
        """Whom the policy serves first; the eldest, if it keeps no order."""
        order = self._order
        if order is None:
            return 0
        positions = [(order(request), request.request_id) for request in running]
        return positions.index(min(positions))

    def arrived(self, request: PolicyRequest) -> None:
        self._ask(self._policy.arrived, request)

    def update_pinned_state(self, job_ids: Collection[str]) -> bool:
        return bool(self._ask(self._policy.update_pinned_state, job_ids))

    def _ask(self, method: Callable[..., Answer], *arguments: Any) -> Answer:
        try:
            return method(*arguments)
        except Exception as error:
            name = getattr(method, "__name__", str(method))
            raise PolicyError(
                f"scheduling policy {self._name!r} raised in {name}: {error!r}"
            ) from error

    def _nonsense(self, method: str, answer: object, wanted: str) -> PolicyError:
        return PolicyError(
            f"scheduling policy {self._name!r}: {method} returned {answer!r}, which is not {wanted}"
        )


def checked(policy: SchedulingPolicy, name: str | None = None) -> SchedulingPolicy:
    """The policy itself if it is built in or checked already; else checked at every call, under
    `name` or its class's."""
    if type(policy) in (CheckedPolicy, *POLICIES.values()):
        return policy
    return CheckedPolicy(policy, name or type(policy).__qualname__)


def load_policy(name: str) -> SchedulingPolicy:
    """A new policy: a built-in one, an installed entry point, or `package.module:Class`; what is
    not built in is checked at every call. Raises ConfigError that names what exists."""
    if name in POLICIES:
        return POLICIES[name]()
    installed = {each.name: each for each in entry_points(group=ENTRY_POINT_GROUP)}
    if name in installed:
        point = installed[name]
    elif ":" in name:
        point = EntryPoint(name, name, ENTRY_POINT_GROUP)
    else:
        raise ConfigError(
            f"scheduling policy {name!r} is unknown; there are {', '.join((*POLICIES, *installed))}"
            f" and package.module:Class (other packages register names as {ENTRY_POINT_GROUP})"
        )
    try:
        policy = point.load()()
    except Exception as error:
        raise ConfigError(
            f"scheduling policy {name!r} ({point.value}) cannot be made: {error!r}"
        ) from error
    if not isinstance(policy, SchedulingPolicy):
        raise ConfigError(
            f"scheduling policy {name!r} ({point.value}) is a {type(policy).__name__}; a policy "
            f"extends {SchedulingPolicy.__module__}.{SchedulingPolicy.__qualname__}"
        )
    return checked(policy, name)
