"""Waiting requests: two queues in the policy's order, and those that wait for an event."""

import enum
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, cast

from longshore.protocol.logs.records import fields
from longshore.scheduler.queue.policies import (
    FCFSQueue,
    PriorityQueue,
    RequestQueue,
    SchedulingPolicy,
)
from longshore.scheduler.request import Request

logger = logging.getLogger(__name__)


RETRY_BLOCKS: Final = 4096
"""Work of trying again what has waited for a shared event, per step, in blocks of prompts, because
a connector may look up each of them."""

MIN_TRY_BLOCKS: Final = 64
"""What trying a request counts as at least, in blocks, however short its prompt is."""


class SharedEvent(enum.Enum):
    """An event for which many requests may wait, and which may concern any of them."""

    ADAPTERS = "other adapters run than before"
    ENCODER = "an encoder connector has reported"
    CONNECTOR = "the connector may know more than before"


@dataclass(slots=True)
class _Group:
    """Requests that wait for a shared event, and are tried again in turn. num_due: how many of
    them, the first, the last event concerns."""

    requests: OrderedDict[str, Request] = field(default_factory=OrderedDict)
    num_due: int = 0


class WaitingRequests:
    """Two queues in the policy's order: requests that may be admitted, and requests set aside.

    A request that cannot be admitted in a step is set aside until the step's admissions are over,
    so no request is tried twice in one step. A request that waits for an event is parked: it is not
    tried before the event, so parked requests add no cost to a step. It keeps its position among
    those set aside, which under FCFS is a number that it gets when it is first set aside.

    There are three kinds of parked requests: those with an event of their own, which names them
    (`unpark`); those with a shared event, after which they are tried again in turn, a limited
    number per step; and those that wait until other loads have ended, of which the first is tried
    in each step.

    loads_are_full: in this step, a load was delayed.
    """

    def __init__(self, policy: SchedulingPolicy, polled: Collection[SharedEvent] = ()) -> None:
        """polled: shared events that may happen at any time, so that each step is one."""
        self._policy = policy
        self._polled = polled
        self._waiting: RequestQueue[Request] = policy.make_queue()
        self._skipped = self._make_queue_of_skipped()
        self._for_loads = self._make_queue_of_skipped()
        self._next_load: Request | None = None  # of these, the one that is to be tried
        self._has_tried_load = False  # one of these in this step
        self.loads_are_full = False
        self._set_aside: dict[str, Request] = {}
        self._parked: dict[str, Request] = {}
        self._groups = {event: _Group() for event in SharedEvent}
        self._num_retries_left = 0
        self._first_position = self._last_position = 0
        self._head: RequestQueue[Request] = self._waiting  # the queue whose head `peek` returned
        self._has_warned = False

    def _make_queue_of_skipped(self) -> RequestQueue[Request]:
        is_fcfs = isinstance(self._waiting, FCFSQueue)
        return PriorityQueue(_position) if is_fcfs else self._policy.make_queue()

    def __len__(self) -> int:
        return len(self._waiting) + self._num_skipped

    @property
    def _num_skipped(self) -> int:
        """All that have been tried, or wait for an event."""
        num_skipped = len(self._skipped) + len(self._set_aside)
        num_skipped += len(self._parked) + len(self._for_loads)
        for group in self._groups.values():
            num_skipped += len(group.requests)
        return num_skipped

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
        for group in self._groups.values():
            yield from group.requests.values()
        yield from self._for_loads
        yield from self._parked.values()

    def add(self, request: Request) -> None:
        """Queue a new request at its position."""
        self._announce(request)
        self._waiting.add(request)

    def add_blocked(self, request: Request) -> None:
        """Queue a new request among those set aside, before requests that were not tried yet."""
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

    def happened(self, event: SharedEvent) -> None:
        """All that wait for this event are to be tried again, in this or the next steps."""
        group = self._groups[event]
        group.num_due = len(group.requests)

    def awaits(self, event: SharedEvent) -> bool:
        """Whether a request waits for it."""
        return bool(self._groups[event].requests)

    def unpark_one(self, event: SharedEvent, request_id: str) -> None:
        """The event concerns this request, if it waits for it."""
        request = self._groups[event].requests.pop(request_id, None)
        if request is not None:
            self._skipped.add(request)

    def _give_position(self, request: Request) -> None:
        if request.queue_position is None:
            self._last_position += 1
            request.queue_position = self._last_position

    def _announce(self, request: Request) -> None:
        """Notify the policy of a new request."""
        self._policy.arrived(request)
        if request.options.priority and self._policy.ignores_priority and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "request %s has priority %d, which the scheduling policy ignores (logged once); "
                "use a policy that supports priorities, such as 'priority'",
                request.request_id,
                request.options.priority,
                extra=fields(request_id=request.request_id),
            )

    def put_back(self, request: Request) -> None:
        """Queue a preempted request at the front: also before requests set aside. Otherwise a
        stream of requests that arrive blocked and become ready later could overtake it forever."""
        if self._num_skipped:
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
        request = self._pop_head()
        request.queue_position = None
        return request

    def _pop_head(self) -> Request:
        request = self._head.pop()
        self._has_tried_load |= request is self._next_load
        self._forget_next_load(request)
        return request

    def set_aside(self) -> None:
        """Do not try the request that `peek` returned again in this step."""
        request = self._pop_head()
        self._give_position(request)
        self._set_aside[request.request_id] = request

    def park_head(self, event: SharedEvent | None = None) -> None:
        """Park the request that `peek` returned. None: its event will name it."""
        request = self._pop_head()
        if event is None:
            self.park(request)
            return
        self._give_position(request)
        self._groups[event].requests[request.request_id] = request

    def delay_load(self) -> None:
        """Park the request that `peek` returned until other loads have ended. In this step, no
        load begins from now on: a smaller one must not go first."""
        self.loads_are_full = True
        request = self._pop_head()
        self._give_position(request)
        self._for_loads.add(request)
        if self._has_tried_load:
            self._park_next_load()

    @property
    def has_retries(self) -> bool:
        """Whether `begin_step` lets requests be tried again."""
        for event, group in self._groups.items():
            if group.requests and (group.num_due or event in self._polled):
                return True
        return self._for_loads.peek() is not None

    def begin_step(self) -> None:
        """Let those be tried again whose shared event has happened, as many as a step may try."""
        for event in self._polled:
            self.happened(event)
        self._num_retries_left = RETRY_BLOCKS
        self.loads_are_full = False
        self._has_tried_load = False
        self.unpark_due()
        self._park_next_load()  # it was not tried, and another one may be first by now
        self.unpark_load()

    def unpark_due(self) -> None:
        """Unpark requests whose event has happened in this step."""
        for group in self._groups.values():
            while group.num_due and group.requests and self._num_retries_left > 0:
                group.num_due -= 1
                _, request = group.requests.popitem(last=False)
                self._num_retries_left -= try_cost(request)
                self._skipped.add(request)

    def unpark_load(self) -> None:
        """Let the first of those be tried again that wait until other loads have ended."""
        if self._next_load is None and self._for_loads.peek() is not None:
            self._next_load = self._for_loads.pop()
            self._skipped.add(self._next_load)

    def _park_next_load(self) -> None:
        if self._next_load is not None:
            self._skipped.remove(self._next_load)
            self._for_loads.add(self._next_load)
            self._next_load = None

    def _forget_next_load(self, request: Request) -> None:
        """It is no longer queued. The next one of its kind may be tried, unless loads are full."""
        if request is self._next_load:
            self._next_load = None
            if not self.loads_are_full:
                self.unpark_load()

    def end_step(self) -> None:
        """Requests that were set aside are tried first in the next step."""
        for request in self._set_aside.values():
            self._skipped.add(request)
        self._set_aside.clear()

    def remove(self, request: Request) -> None:
        """Remove a request that ends while it waits."""
        self._forget_next_load(request)
        in_groups = (group.requests for group in self._groups.values())
        for others in (self._parked, self._set_aside, *in_groups):
            if others.pop(request.request_id, None) is not None:
                return
        if self._take_out(request) is None:
            raise LookupError(f"{request.request_id} is not waiting")

    def _take_out(self, request: Request) -> RequestQueue[Request] | None:
        """Remove a request from the queue that it is in, which is returned; None if it is in
        none."""
        for queue in (self._waiting, self._skipped, self._for_loads):
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


def try_cost(request: Request) -> int:
    """The cost of trying a request, in blocks; see RETRY_BLOCKS."""
    return max(len(request.block_hashes), MIN_TRY_BLOCKS)


def _position(request: Request) -> int:
    assert request.queue_position is not None
    return request.queue_position
