"""Waiting requests: two queues in the policy's order, and those that wait for an event."""

import logging
from collections.abc import Collection, Iterator
from typing import cast

from longshore.protocol.logs.records import fields
from longshore.scheduler.queue.policies import (
    FCFSQueue,
    PriorityQueue,
    RequestQueue,
    SchedulingPolicy,
)
from longshore.scheduler.request import Request

logger = logging.getLogger(__name__)


class WaitingRequests:
    """Two queues in the policy's order: requests that may be admitted, and requests set aside.

    A request that cannot be admitted in a step is set aside until the step's admissions are over,
    so no request is tried twice in one step. A request that waits for an event is parked: it is not
    tried before the event, so parked requests add no cost to a step. It keeps its position among
    those set aside, which under FCFS is a number that it gets when it is first set aside.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._waiting: RequestQueue[Request] = policy.make_queue()
        self._skipped: RequestQueue[Request] = (
            PriorityQueue(_position)
            if isinstance(self._waiting, FCFSQueue)
            else policy.make_queue()
        )
        self._set_aside: dict[str, Request] = {}
        self._parked: dict[str, Request] = {}
        self._first_position = self._last_position = 0
        self._head: RequestQueue[Request] = self._waiting  # the queue whose head `peek` returned
        self._has_warned = False

    def __len__(self) -> int:
        tried = len(self._set_aside) + len(self._parked)
        return len(self._waiting) + len(self._skipped) + tried

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in the order in which they are tried: first those that this step
        has tried, last those that are parked."""
        yield from self._set_aside.values()
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
        """Queue a new request at its position."""
        self._announce(request)
        self._waiting.add(request)

    def add_blocked(self, request: Request) -> None:
        """Queue a new request that cannot be admitted yet, among those set aside."""
        self._announce(request)
        self._give_position(request)
        self._skipped.add(request)

    def add_parked(self, request: Request) -> None:
        """Park a new request, which waits for an event."""
        self._announce(request)
        self.park(request)

    def park(self, request: Request) -> None:
        """Park a request that is in no queue until an event, which calls `unpark`."""
        self._give_position(request)
        self._parked[request.request_id] = request

    def unpark(self, request: Request) -> None:
        """The event of a parked request has happened: it may be tried again, at its position."""
        self._skipped.add(self._parked.pop(request.request_id))

    def _give_position(self, request: Request) -> None:
        if request.queue_position is None:
            self._last_position += 1
            request.queue_position = self._last_position

    def _announce(self, request: Request) -> None:
        """Notify the policy of a new request."""
        self._policy.arrived(request)
        if request.priority and self._policy.ignores_priority and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "request %s has priority %d, which the scheduling policy ignores (logged once); "
                "use a policy that supports priorities, such as 'priority'",
                request.request_id,
                request.priority,
                extra=fields(request_id=request.request_id),
            )

    def put_back(self, request: Request) -> None:
        """Queue a preempted request at the front: also before requests set aside. Otherwise a
        stream of requests that arrive blocked and become ready later could overtake it forever."""
        if len(self._skipped) or self._parked:
            self._first_position -= 1
            request.queue_position = self._first_position
            self._skipped.prepend(request)
        else:
            self._waiting.prepend(request)

    def peek(self) -> Request | None:
        """The request to try next, which stays queued; None when all have been tried."""
        waiting, skipped = self._waiting.peek(), self._skipped.peek()
        if skipped is None or (
            waiting is not None and not self._policy.prefers_skipped(waiting, skipped)
        ):
            self._head = self._waiting
            return waiting
        self._head = self._skipped
        return skipped

    def pop(self) -> Request:
        """Remove the request that `peek` returned: it is admitted."""
        request = self._head.pop()
        request.queue_position = None
        return request

    def set_aside(self) -> None:
        """Do not try the request that `peek` returned again in this step."""
        request = self._head.pop()
        self._give_position(request)
        self._set_aside[request.request_id] = request

    def park_head(self) -> None:
        """Park the request that `peek` returned."""
        self.park(self._head.pop())

    def end_step(self) -> None:
        """Requests that were set aside are tried first in the next step."""
        for request in self._set_aside.values():
            self._skipped.add(request)
        self._set_aside.clear()

    def remove(self, request: Request) -> None:
        """Remove a request that ends while it waits."""
        for others in (self._parked, self._set_aside):
            if others.pop(request.request_id, None) is not None:
                return
        if self._take_out(request) is None:
            raise LookupError(f"{request.request_id} is not waiting")

    def _take_out(self, request: Request) -> RequestQueue[Request] | None:
        """Remove a request from the queue that it is in, which is returned; None if it is in
        neither."""
        for queue in (self._waiting, self._skipped):
            try:
                queue.remove(request)
            except LookupError:
                continue
            return queue
        return None

    def ended(self, request: Request) -> None:
        """Notify the policy of the end of a request."""
        self._policy.ended(request)

    def update_pinned_state(self, job_ids: Collection[str]) -> None:
        """Set the jobs whose KV is kept for their next turn. Not to be called while requests are
        set aside. O(jobs), and O(log n) for each turn of a job that was added or removed."""
        for turn in self._policy.update_pinned_state(job_ids):
            request = cast(Request, turn)
            if (queue := self._take_out(request)) is not None:
                queue.add(request)


def _position(request: Request) -> int:
    assert request.queue_position is not None
    return request.queue_position
