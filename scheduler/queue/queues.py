"""Requests that wait: the queues that a policy may use, and the two queues that admission reads."""

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
"""What requests are compared by: the smaller is served first. Of one shape in one queue."""


class PolicyRequest(Protocol):
    """What a policy may look at. It reads; it never writes.

    arrival_time: seconds on the scheduler's clock; when the request arrived anywhere.
    client_index: the connection that it came by.
    job_id:       the agent's job that it is a turn of; None outside jobs.
    num_prompt_tokens, max_total_tokens: it ends when prompt and output have so many tokens.
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
    """Requests that wait. `pop` raises LookupError when it is empty."""

    def add(self, request: RequestT) -> None:
        """At its place: the end under FCFS, by order under PRIORITY."""

    def peek(self) -> RequestT | None:
        """The head, left where it is; None if there is none."""

    def pop(self) -> RequestT:
        """The head, taken out."""

    def prepend(self, request: RequestT) -> None:
        """To the front; under PRIORITY nobody jumps the order, so this is `add`."""

    def remove(self, request: RequestT) -> None:
        """Take out one request, wherever it stands. Raises LookupError if it is not there."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[RequestT]:
        """In the order in which `pop` would give them."""


class FCFSQueue(Generic[RequestT]):
    """First come, first served; every operation O(1)."""

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
    """A heap. `order` is asked once, when a request is added; equals stand in order of their ids,
    which are unique, so the order is total and the same in every run. Operations are O(log n),
    removal of a request that is not the head O(n)."""

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
        while heap:  # most readers want a few: the rest is not sorted for them
            yield heapq.heappop(heap)[2]


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


class WaitingRequests:
    """Two queues in the policy's order: those that may be admitted, and those set aside.

    A request that cannot be admitted in a step is set aside until the step's admissions are over,
    so no request is tried twice in one step. A request that waits for an event is parked: it is not
    tried before the event, so thousands of them cost a step nothing. It keeps its position among
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
        self._head: RequestQueue[Request] = self._waiting  # of which `peek` showed the head
        self._has_warned = False

    def __len__(self) -> int:
        tried = len(self._set_aside) + len(self._parked)
        return len(self._waiting) + len(self._skipped) + tried

    def __iter__(self) -> Iterator[Request]:
        """All of them, in the order in which they are tried: first those that this step has tried,
        last those that are parked."""
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
        """A new request, at its position."""
        self._announce(request)
        self._waiting.add(request)

    def add_blocked(self, request: Request) -> None:
        """A new request that cannot be admitted yet: at its position among those set aside."""
        self._announce(request)
        self._give_position(request)
        self._skipped.add(request)

    def add_parked(self, request: Request) -> None:
        """A new request that waits for an event."""
        self._announce(request)
        self.park(request)

    def park(self, request: Request) -> None:
        """A request that is in no queue waits for an event, which calls `unpark`."""
        self._give_position(request)
        self._parked[request.request_id] = request

    def unpark(self, request: Request) -> None:
        """The event of the request has come: it may be tried again, at its position."""
        self._skipped.add(self._parked.pop(request.request_id))

    def _give_position(self, request: Request) -> None:
        if request.queue_position is None:
            self._last_position += 1
            request.queue_position = self._last_position

    def _announce(self, request: Request) -> None:
        """Tell the policy of a new request."""
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
            self._first_position -= 1
            request.queue_position = self._first_position
            self._skipped.prepend(request)
        else:
            self._waiting.prepend(request)

    def peek(self) -> Request | None:
        """The request to try next, left where it is; None when all have been tried."""
        waiting, skipped = self._waiting.peek(), self._skipped.peek()
        if skipped is None or (
            waiting is not None and not self._policy.prefers_skipped(waiting, skipped)
        ):
            self._head = self._waiting
            return waiting
        self._head = self._skipped
        return skipped

    def pop(self) -> Request:
        """Take out the request that `peek` showed, because it is admitted."""
        request = self._head.pop()
        request.queue_position = None
        return request

    def set_aside(self) -> None:
        """The request that `peek` showed is not tried again in this step."""
        request = self._head.pop()
        self._give_position(request)
        self._set_aside.append(request)

    def park_head(self) -> None:
        """Park the request that `peek` showed."""
        self.park(self._head.pop())

    def end_step(self) -> None:
        """What was set aside is tried first in the next step."""
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
        if the policy's order depends on them and the set has changed, else O(jobs)."""
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
