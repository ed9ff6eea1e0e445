"""Scheduling policies: who is served first, and who gives up blocks."""

from collections.abc import Sequence
from typing import Protocol

from longshore.scheduler.request import Request
from longshore.scheduler.request_queue import FCFSQueue, PriorityQueue, RequestQueue


class SchedulingPolicy(Protocol):
    """One small class per policy; it sees requests, never blocks or rows."""

    def make_queue(self) -> RequestQueue:
        """A queue that serves in the policy's order."""

    def choose_queue(self, waiting: RequestQueue, skipped: RequestQueue) -> RequestQueue:
        """Which of two queues, not both empty, to look at next."""

    def pick_victim(self, running: Sequence[Request]) -> int:
        """Index in `running` (in admission order, not empty) of the request to preempt."""


class FCFSPolicy:
    """First come, first served; the youngest running request gives way."""

    def make_queue(self) -> RequestQueue:
        return FCFSQueue()

    def choose_queue(self, waiting: RequestQueue, skipped: RequestQueue) -> RequestQueue:
        # What was set aside had reached the head before everything that still waits.
        return skipped if len(skipped) else waiting

    def pick_victim(self, running: Sequence[Request]) -> int:
        return len(running) - 1


class PriorityPolicy:
    """The smallest (priority, arrival, id) is served first, the largest gives way."""

    def make_queue(self) -> RequestQueue:
        return PriorityQueue()

    def choose_queue(self, waiting: RequestQueue, skipped: RequestQueue) -> RequestQueue:
        if not len(waiting) or not len(skipped):
            return waiting if len(waiting) else skipped
        return waiting if waiting.peek() < skipped.peek() else skipped

    def pick_victim(self, running: Sequence[Request]) -> int:
        return max(range(len(running)), key=lambda index: running[index].order)


POLICIES: dict[str, type[FCFSPolicy] | type[PriorityPolicy]] = {
    "fcfs": FCFSPolicy,
    "priority": PriorityPolicy,
}
