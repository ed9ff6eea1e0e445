"""Requests that do not run: those that may be admitted, and those set aside for now."""

import logging
from collections.abc import Collection, Iterator

from longshore.protocol.logs.records import fields
from longshore.scheduler.queue.policies import SchedulingPolicy
from longshore.scheduler.queue.queues import (
    FCFSQueue,
    PriorityQueue,
    RequestQueue,
)
from longshore.scheduler.request import Request

logger = logging.getLogger(__name__)


class WaitingRequests:
    """Two queues in the policy's order. A request that cannot be admitted in a step is set aside
    until the step's admissions are over, so no request is looked at twice in one step.

    A request that waits for an event is parked: nobody looks at it before the event comes, so
    thousands of them cost a step nothing. It keeps its place among those set aside, which under
    FCFS is a number that it gets when it is set aside first.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._waiting: RequestQueue[Request] = policy.make_queue()
        self._is_fcfs = isinstance(self._waiting, FCFSQueue)
        self._skipped: RequestQueue[Request] = (
            PriorityQueue(_position) if self._is_fcfs else policy.make_queue()
        )
        self._set_aside: list[Request] = []
        self._parked: dict[str, Request] = {}
        self._first_place = self._last_place = 0
        self._has_warned = False

    def __len__(self) -> int:
        tried = len(self._set_aside) + len(self._parked)
        return len(self._waiting) + len(self._skipped) + tried

    def __iter__(self) -> Iterator[Request]:
        """All of them, in the order in which they are served: what this step has tried first, what
        is parked last."""
        yield from self._set_aside
        queues = {True: iter(self._skipped), False: iter(self._waiting)}
        heads = {key: next(queue, None) for key, queue in queues.items()}
        while (waiting := heads[False]) and (skipped := heads[True]):
            first = self._policy.prefers_skipped(waiting, skipped)
            yield skipped if first else waiting
            heads[first] = next(queues[first], None)
        for key, head in heads.items():
            if head is not None:
                yield head
            yield from queues[key]
        yield from self._parked.values()

    def add(self, request: Request) -> None:
        """A new request, at its place."""
        self.announce(request)
        self._waiting.add(request)

    def add_blocked(self, request: Request) -> None:
        """A new request that cannot be admitted yet: at its place among those set aside."""
        self.announce(request)
        self._give_place(request)
        self._skipped.add(request)

    def add_parked(self, request: Request) -> None:
        """A new request that waits for an event."""
        self.announce(request)
        self.park(request)

    def park(self, request: Request) -> None:
        """A request that is in no queue waits for an event; `unpark` tells it."""
        self._give_place(request)
        self._parked[request.request_id] = request

    def unpark(self, request: Request) -> None:
        """What the request waits for has come: it may be tried again, at its place."""
        self._skipped.add(self._parked.pop(request.request_id))

    def _give_place(self, request: Request) -> None:
        if request.position is None:
            self._last_place += 1
            request.position = self._last_place

    def announce(self, request: Request) -> None:
        """A new request; `add` and the other two see to it themselves."""
        self._policy.arrived(request)
        if request.priority and self._policy.ignores_priority and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "request %s has priority %d, which the scheduling policy ignores; no further "
                "request will be warned about",
                request.request_id,
                request.priority,
                extra=fields(request_id=request.request_id),
            )

    def put_back(self, request: Request) -> None:
        """A preempted request, before its equals: also before those set aside, or a stream of
        requests that arrive blocked and are ready later would overtake it for ever."""
        if len(self._skipped) or self._parked:
            self._first_place -= 1
            request.position = self._first_place
            self._skipped.prepend(request)
        else:
            self._waiting.prepend(request)

    def peek(self) -> Request | None:
        """The request to try next, left where it is; None when all have been tried."""
        queue = self._next_queue()
        return None if queue is None else queue.peek()

    def pop(self) -> Request:
        """Take out the request that `peek` shows, because it is admitted."""
        request = self._take()
        request.position = None
        return request

    def set_aside(self) -> None:
        """Take the request that `peek` shows out of the way for this step."""
        request = self._take()
        self._give_place(request)
        self._set_aside.append(request)

    def park_head(self) -> None:
        """Park the request that `peek` shows."""
        self.park(self._take())

    def _take(self) -> Request:
        queue = self._next_queue()
        assert queue is not None
        return queue.pop()

    def end_step(self) -> None:
        """What was set aside may be tried again, first."""
        for request in self._set_aside:
            self._skipped.add(request)
        self._set_aside = []

    def remove(self, request: Request) -> None:
        """The request ends while it waits."""
        if self._parked.pop(request.request_id, None) is not None:
            return
        if request in self._set_aside:
            self._set_aside.remove(request)
            return
        for queue in (self._waiting, self._skipped):
            try:
                queue.remove(request)
            except LookupError:
                continue
            return
        raise LookupError(f"{request.request_id} does not wait")

    def update_pinned_state(self, job_ids: Collection[str]) -> None:
        """Jobs whose KV is kept for their next turn; not while requests are set aside. O(n log n)
        if the policy's order follows them and the set has changed, O(jobs) otherwise."""
        if self._policy.update_pinned_state(job_ids):
            self._waiting = self._ordered_anew(self._waiting)
            if not self._is_fcfs:
                self._skipped = self._ordered_anew(self._skipped)

    def _ordered_anew(self, requests: RequestQueue[Request]) -> RequestQueue[Request]:
        queue: RequestQueue[Request] = self._policy.make_queue()
        for request in requests:
            queue.add(request)
        return queue

    def _next_queue(self) -> RequestQueue[Request] | None:
        if not len(self._skipped):
            return self._waiting if len(self._waiting) else None
        if not len(self._waiting):
            return self._skipped
        prefers_skipped = self._policy.prefers_skipped(self._waiting.peek(), self._skipped.peek())
        return self._skipped if prefers_skipped else self._waiting


def _position(request: Request) -> int:
    assert request.position is not None
    return request.position
