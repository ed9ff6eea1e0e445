"""Built-in scheduling policies: which request is served first, and which is preempted.

A policy sees requests, never blocks or rows, and decides three things: the order of waiting
requests, which of the two waiting queues is tried first, and the victim of a preemption. It reads
no clock and does no I/O. For policies of other packages see `outside_policies` and
docs/scheduling_policies.md.
"""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, Final

from longshore.scheduler.queue.queues import (
    FCFSQueue,
    Order,
    PolicyRequest,
    PriorityQueue,
    RequestQueue,
    SchedulingPolicy,
)

__all__ = [
    "POLICIES",
    "ContinuumPolicy",
    "FCFSPolicy",
    "FCFSQueue",
    "Order",
    "OrderedPolicy",
    "PolicyRequest",
    "PriorityPolicy",
    "PriorityQueue",
    "SchedulingPolicy",
]


class OrderedPolicy(SchedulingPolicy):
    """A policy defined by an order: the smallest request is served first, the largest is preempted
    first. Requests of equal order are sorted by their ids."""

    @abstractmethod
    def order(self, request: PolicyRequest) -> Order:
        """A number, a string or a tuple of these. It must not change while the request waits."""

    def make_queue(self) -> RequestQueue[Any]:
        return PriorityQueue(self.order)

    def prefers_skipped(self, waiting: PolicyRequest, skipped: PolicyRequest) -> bool:
        return self._position(skipped) < self._position(waiting)

    def pick_victim(self, running: Sequence[PolicyRequest]) -> int:
        return max(range(len(running)), key=lambda index: self._position(running[index]))

    def _position(self, request: PolicyRequest) -> tuple[Order, str]:
        return self.order(request), request.request_id


class FCFSPolicy(SchedulingPolicy):
    """First come, first served. The youngest request is preempted, and queued at the front."""

    ignores_priority = True

    def make_queue(self) -> RequestQueue[Any]:
        return FCFSQueue()

    def prefers_skipped(self, waiting: PolicyRequest, skipped: PolicyRequest) -> bool:
        return True  # it reached the head of the queue before every request still in it

    def pick_victim(self, running: Sequence[PolicyRequest]) -> int:
        return len(running) - 1


class PriorityPolicy(OrderedPolicy):
    """The smallest (priority, arrival, id) is served first, the largest is preempted first."""

    def order(self, request: PolicyRequest) -> Order:
        return request.priority, request.arrival_time


class _Job:
    """first_arrival_s: arrival of its first turn. turns: its requests; some may have ended."""

    def __init__(self, first_arrival_s: float) -> None:
        self.first_arrival_s = first_arrival_s
        self.turns: list[PolicyRequest] = []

    def is_live(self) -> bool:
        self.turns = [turn for turn in self.turns if not turn.is_finished]
        return bool(self.turns)


class ContinuumPolicy(OrderedPolicy):
    """First come, first served by job: a turn has the position of its job's first turn, and pinned
    jobs, whose prefix is still in memory, are served first. A request without a job is a job by
    itself.

    A job that is not pinned is removed when all of its requests have ended; its next turn then
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
        if len(self._jobs) >= self._sweep_at:  # amortised: half of them are new since the last
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
