"""Queues of requests that wait: in order of arrival, or by a policy's order."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeAlias, TypeVar

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
    """Requests that wait. `peek` and `pop` raise LookupError when it is empty."""

    def add(self, request: RequestT) -> None:
        """At its place: the end under FCFS, by order under PRIORITY."""

    def peek(self) -> RequestT:
        """The head, left where it is."""

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

    def peek(self) -> RequestT:
        for request in self._requests.values():
            return request
        raise LookupError("the queue is empty")

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

    def peek(self) -> RequestT:
        if not self._heap:
            raise LookupError("the queue is empty")
        return self._heap[0][2]

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
