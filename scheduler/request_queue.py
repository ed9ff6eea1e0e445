"""Queues of requests that wait, one per scheduling policy."""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

from longshore.scheduler.request import Request


class RequestQueue(Protocol):
    """Requests that wait. `peek` and `pop` raise LookupError when it is empty."""

    def add(self, request: Request) -> None:
        """At its place: the end under FCFS, by order under PRIORITY."""

    def peek(self) -> Request:
        """The head, left where it is."""

    def pop(self) -> Request:
        """The head, taken out."""

    def prepend(self, request: Request) -> None:
        """To the front; under PRIORITY nobody jumps the order, so this is `add`."""

    def prepend_all(self, requests: Iterable[Request]) -> None:
        """To the front, keeping their order among themselves."""

    def remove(self, request: Request) -> None:
        """Take out one request, wherever it stands. Raises LookupError if it is not there."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue:
    """First come, first served; every operation O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def peek(self) -> Request:
        for request in self._requests.values():
            return request
        raise LookupError("the queue is empty")

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def prepend(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def prepend_all(self, requests: Iterable[Request]) -> None:
        for request in reversed(list(requests)):
            self.prepend(request)

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityQueue:
    """A heap by `Request.order`; removal of one that is not the head is O(n)."""

    def __init__(self) -> None:
        self._heap: list[Request] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, request)

    def peek(self) -> Request:
        if not self._heap:
            raise LookupError("the queue is empty")
        return self._heap[0]

    def pop(self) -> Request:
        if not self._heap:
            raise LookupError("the queue is empty")
        return heapq.heappop(self._heap)

    def prepend(self, request: Request) -> None:
        self.add(request)

    def prepend_all(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add(request)

    def remove(self, request: Request) -> None:
        try:
            self._heap.remove(request)
        except ValueError:
            raise LookupError(f"{request.request_id} is not in the queue") from None
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._heap))
