"""Scheduling policies from other packages: loaded by name, and checked at every call.

Entry point group `longshore.scheduling_policies`, or `package.module:Class`.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from longshore.protocol.errors import ConfigError, LongshoreError
from longshore.scheduler.queue.policies import (
    POLICIES,
    FCFSQueue,
    Order,
    PolicyRequest,
    PriorityQueue,
    RequestQueue,
    SchedulingPolicy,
)

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP: Final = "longshore.scheduling_policies"

Answer = TypeVar("Answer")


class PolicyError(LongshoreError):
    """A policy from another package raised, or returned an invalid value."""


class CheckedPolicy(SchedulingPolicy):
    """Wraps another policy and checks what it returns. If it raises or returns an invalid value,
    a PolicyError says which policy and method. If it chooses as victim the request that it serves
    first, the youngest other request is preempted instead, so that one can make progress."""

    def __init__(self, policy: SchedulingPolicy, name: str) -> None:
        self.policy = policy
        self.name = name
        self._shape: object = None
        self._order: Callable[[PolicyRequest], Order] | None = None
        self._has_warned = False
        self.ignores_priority = policy.ignores_priority  # type: ignore[misc]  # of this instance

    def make_queue(self) -> RequestQueue[Any]:
        queue = self._ask(self.policy.make_queue)
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
        answer = self._ask(self.policy.prefers_skipped, waiting, skipped)
        if not isinstance(answer, bool):
            raise self._nonsense("prefers_skipped", answer, "True or False")
        return answer

    def pick_victim(self, running: Sequence[PolicyRequest]) -> int:
        answer = self._ask(self.policy.pick_victim, tuple(running))
        if type(answer) is not int or not 0 <= answer < len(running):
            raise self._nonsense("pick_victim", answer, f"an index of {len(running)} requests")
        if len(running) == 1 or answer != self._first(running):
            return answer
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "scheduling policy %r preempts the request that it serves first; preempting the "
                "youngest other request instead, so that one can make progress (logged once)",
                self.name,
            )
        last = len(running) - 1
        return last if answer != last else last - 1

    def _first(self, running: Sequence[PolicyRequest]) -> int:
        """Index of the request that the policy serves first: the oldest, with an FCFSQueue."""
        order = self._order
        if order is None:
            return 0
        positions = [(order(request), request.request_id) for request in running]
        return positions.index(min(positions))

    def arrived(self, request: PolicyRequest) -> None:
        self._ask(self.policy.arrived, request)

    def ended(self, request: PolicyRequest) -> None:
        self._ask(self.policy.ended, request)

    def _ask(self, method: Callable[..., Answer], *arguments: Any) -> Answer:
        try:
            return method(*arguments)
        except Exception as error:
            name = getattr(method, "__name__", str(method))
            raise PolicyError(
                f"scheduling policy {self.name!r} raised in {name}: {error!r}"
            ) from error

    def _nonsense(self, method: str, answer: object, wanted: str) -> PolicyError:
        return PolicyError(
            f"scheduling policy {self.name!r}: {method} returned {answer!r}, which is not {wanted}"
        )


def checked(policy: SchedulingPolicy, name: str | None = None) -> SchedulingPolicy:
    """The policy itself if it is built in or already checked; otherwise wrapped in a
    CheckedPolicy, whose errors call it `name`, by default the name of its class."""
    if type(policy) in (CheckedPolicy, *POLICIES.values()):
        return policy
    return CheckedPolicy(policy, name or type(policy).__qualname__)


def load_policy(name: str) -> SchedulingPolicy:
    """Load a policy: a built-in one, an installed entry point, or `package.module:Class`. One that
    is not built in is checked at every call. Raises ConfigError."""
    if name in POLICIES:
        return POLICIES[name]()
    from importlib.metadata import EntryPoint, entry_points  # takes 20 ms

    installed = {each.name: each for each in entry_points(group=ENTRY_POINT_GROUP)}
    if name in installed:
        point = installed[name]
    elif ":" in name:
        point = EntryPoint(name, name, ENTRY_POINT_GROUP)
    else:
        raise ConfigError(
            f"unknown scheduling policy {name!r}; use one of {', '.join((*POLICIES, *installed))}"
            f" or package.module:Class (other packages register names as {ENTRY_POINT_GROUP})"
        )
    try:
        policy = point.load()()
    except Exception as error:
        raise ConfigError(
            f"scheduling policy {name!r} ({point.value}) cannot be created: {error!r}"
        ) from error
    if not isinstance(policy, SchedulingPolicy):
        raise ConfigError(
            f"scheduling policy {name!r} ({point.value}) is a {type(policy).__name__}; it "
            "must extend longshore.scheduler.queue.policies.SchedulingPolicy"
        )
    return checked(policy, name)
