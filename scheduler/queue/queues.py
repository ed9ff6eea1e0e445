"""Waiting requests: the queues that a policy may use, and the two queues that admission reads."""

import heapq
import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from longshore.protocol.logs.records import fields
from longshore.scheduler.request import Request

logger = logging.getLogger(__name__)

Order: TypeAlias = float | str | tuple[float | str, ...]
"""Sort key of a request; the smallest is served first. All keys of a queue have one shape."""


class PolicyRequest(Protocol):
    """The fields of a request that a policy may read. A policy must not write them.

    arrival_time: seconds on the scheduler's clock; when the request first arrived at any process.
    client_index: the connection that the request came from.
    job_id:       the agent's job of which the request is a turn; None outside jobs.
    max_total_tokens: the request ends when prompt and output together have this many tokens.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def arrival_time(self) -> float: ...
    @property
    def client_index(self) -> int: ...
    @property
    def job_id(self) -> str | None: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def max_total_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def is_finished(self) -> bool: ...


RequestT = TypeVar("RequestT", bound=PolicyRequest)


class RequestQueue(Protocol[RequestT]):
    """A queue of waiting requests. `pop` raises LookupError if it is empty."""

    def add(self, request: RequestT) -> None:
        """Add a request: at the end (FCFSQueue), or by its order (PriorityQueue)."""

    def peek(self) -> RequestT | None:
        """The head, which stays in the queue; None if the queue is empty."""

    def pop(self) -> RequestT:
        """Remove and return the head."""

    def prepend(self, request: RequestT) -> None:
        """Add a request at the front. A PriorityQueue keeps its order, so this is `add`."""

    def remove(self, request: RequestT) -> None:
        """Remove one request, at any position. Raises LookupError if it is not in the queue."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[RequestT]:
        """In the order in which `pop` would return them."""


class FCFSQueue(Generic[RequestT]):
    """First come, first served. Every operation is O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, RequestT] = OrderedDict()

    def add(self, request: RequestT) -> None:
        self._requests[request.request_id] = request

    def peek(self) -> RequestT | None:
        for request in self._requests.values():
            return request
        return None

    def pop(self) -> RequestT:
        return self._requests.popitem(last=False)[1]

    def prepend(self, request: RequestT) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def remove(self, request: RequestT) -> None:
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestT]:
        return iter(self._requests.values())


class PriorityQueue(Generic[RequestT]):
    """A heap. `order` is called once per request, when it is added. Requests of equal order are
    sorted by their ids, which are unique, so the order is total and the same in every run.
    Operations are O(log n); removing a request that is not the head is O(n)."""

    def __init__(self, order: Callable[[RequestT], Order]) -> None:
        self.order = order
        self._heap: list[tuple[Order, str, RequestT]] = []

    def add(self, request: RequestT) -> None:
        heapq.heappush(self._heap, (self.order(request), request.request_id, request))

    def peek(self) -> RequestT | None:
        return self._heap[0][2] if self._heap else None

    def pop(self) -> RequestT:
        if not self._heap:
            raise LookupError("the queue is empty")
        return heapq.heappop(self._heap)[2]

    def prepend(self, request: RequestT) -> None:
        self.add(request)

    def remove(self, request: RequestT) -> None:
        for index, (_, _, other) in enumerate(self._heap):
            if other is request:
                del self._heap[index]
                heapq.heapify(self._heap)
                return
        raise LookupError(f"{request.request_id} is not in the queue")

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[RequestT]:
        heap = self._heap.copy()
        while heap:  # most callers read only a few, so the rest is not sorted
            yield heapq.heappop(heap)[2]


class SchedulingPolicy(ABC):
    """A scheduling policy: one object per scheduler, called only on its thread.

    ignores_priority: the first request with a priority is logged as a warning.
    """

    ignores_priority: ClassVar[bool] = False

    @abstractmethod
    def make_queue(self) -> RequestQueue[Any]:
        """An empty FCFSQueue() or PriorityQueue(order), for requests that may be admitted. Called
        a second time for requests set aside, unless the first queue is an FCFSQueue (they keep
        their positions then), and again after `update_pinned_state` returned True."""

    @abstractmethod
    def prefers_skipped(self, waiting: PolicyRequest, skipped: PolicyRequest) -> bool:
        """Whether the head of the requests set aside is tried before the head of the others."""

    @abstractmethod
    def pick_victim(self, running: Sequence[PolicyRequest]) -> int:
        """Index in `running` (in admission order, not empty) of the request to preempt. While
        others run, it must not be the request that this policy would serve first (the oldest, with
        an FCFSQueue); otherwise all requests could preempt one another forever."""

    # The hooks below do nothing by default.

    def arrived(self, request: PolicyRequest) -> None:  # noqa: B027  # optional
        """A new request is about to be queued. Not called for a preempted request."""

    def update_pinned_state(self, job_ids: Collection[str]) -> bool:
        """Receive the jobs whose KV is kept for their next turn. True if this changes the order of
        waiting requests. No step of this version calls it, because nothing is pinned yet."""
        return False


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
        self._is_fcfs = isinstance(self._waiting, FCFSQueue)
        self._skipped: RequestQueue[Request] = (
            PriorityQueue(_position) if self._is_fcfs else policy.make_queue()
        )
        self._set_aside: list[Request] = []
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
        self._set_aside.append(request)

    def park_head(self) -> None:
        """Park the request that `peek` returned."""
        self.park(self._head.pop())

    def end_step(self) -> None:
        """Requests that were set aside are tried first in the next step."""
        for request in self._set_aside:
            self._skipped.add(request)
        self._set_aside = []

    def remove(self, request: Request) -> None:
        """Remove a request that ends while it waits."""
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
        raise LookupError(f"{request.request_id} is not waiting")

    def update_pinned_state(self, job_ids: Collection[str]) -> None:
        """Set the jobs whose KV is kept for their next turn. Not to be called while requests are
        set aside. O(n log n) if this changes the policy's order, else O(jobs)."""
        if self._policy.update_pinned_state(job_ids):
            self._waiting = self._ordered_anew(self._waiting)
            if not self._is_fcfs:
                self._skipped = self._ordered_anew(self._skipped)

    def _ordered_anew(self, requests: RequestQueue[Request]) -> RequestQueue[Request]:
        queue: RequestQueue[Request] = self._policy.make_queue()
        for request in requests:
            queue.add(request)
        return queue


def _position(request: Request) -> int:
    assert request.queue_position is not None
    return request.queue_position
