"""Scheduling policies: which request is served first, and which is preempted.

A policy sees requests, never blocks or rows, and decides three things: the order of waiting
requests, which of the two waiting queues is tried first, and the victim of a preemption. It reads
no clock and does no I/O. First what a policy reads, uses and implements, then the built-in ones;
for those of other packages see `outside_policies` and docs/scheduling_policies.md.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar, Final, Generic, Protocol, TypeAlias, TypeVar

from longshore.protocol.requests import RequestOptions
from longshore.scheduler.heap import KeyedHeap
from longshore.scheduler.queue.shares import Shares

Order: TypeAlias = float | str | tuple[float | str, ...]
"""Sort key of a request; the smallest is served first. All keys of a queue have one shape."""


class PolicyRequest(Protocol):
    """The fields of a request that a policy may read. A policy must not write them.

    arrival_time: seconds on the scheduler's clock; when the request first arrived at any process.
    client_index: the connection that the request came from.
    options:      what its client asks for: its priority, its tenant (the API key that it was sent
                  with), the agent's job of which it is a turn, and more.
    max_total_tokens: the request ends when prompt and output together have this many tokens.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def arrival_time(self) -> float: ...
    @property
    def client_index(self) -> int: ...
    @property
    def options(self) -> RequestOptions: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def max_total_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def is_finished(self) -> bool: ...


RequestT = TypeVar("RequestT", bound=PolicyRequest)


class FCFSQueue(Generic[RequestT]):
    """First come, first served. Every operation is O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, RequestT] = OrderedDict()

    def add(self, request: RequestT) -> None:
        """Add a request at the end."""
        self._requests[request.request_id] = request

    def peek(self) -> RequestT | None:
        """The head, which stays in the queue; None if the queue is empty."""
        for request in self._requests.values():
            return request
        return None

    def pop(self) -> RequestT:
        """Remove and return the head. Raises LookupError if the queue is empty."""
        return self._requests.popitem(last=False)[1]

    def prepend(self, request: RequestT) -> None:
        """Add a request at the front."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def remove(self, request: RequestT) -> None:
        """Remove one request, at any position. Raises LookupError if it is not in the queue."""
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestT]:
        """In the order in which `pop` would return them."""
        return iter(self._requests.values())


class PriorityQueue(Generic[RequestT]):
    """A heap, with the methods of FCFSQueue; `prepend` keeps the order, so it is `add`. `order` is
    called once per request, when it is added. Requests of equal order are sorted by their ids,
    which are unique, so the order is total and the same in every run. Operations are O(log n)."""

    def __init__(self, order: Callable[[RequestT], Order]) -> None:
        self.order = order
        self._heap: KeyedHeap[Order, RequestT] = KeyedHeap()

    def add(self, request: RequestT) -> None:
        self._heap.add(request.request_id, self.order(request), request)

    def peek(self) -> RequestT | None:
        first = self._heap.first()
        return None if first is None else first[1]

    def pop(self) -> RequestT:
        return self._heap.pop()

    def prepend(self, request: RequestT) -> None:
        self.add(request)

    def remove(self, request: RequestT) -> None:
        self._heap.remove(request.request_id)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[RequestT]:
        return iter(self._heap)


class FairQueue(Generic[RequestT]):
    """A PriorityQueue per tenant; `peek` and `pop` choose the tenant by its share. They are O(t) in
    the number of tenants that wait, in addition to what a PriorityQueue takes."""

    def __init__(self, shares: Shares, order: Callable[[RequestT], Order]) -> None:
        self._shares = shares
        self._order = order
        self._queues: dict[str, PriorityQueue[RequestT]] = {}
        self._length = 0

    def add(self, request: RequestT) -> None:
        queue = self._queues.get(request.options.tenant.name)
        if queue is None:
            queue = self._queues[request.options.tenant.name] = PriorityQueue(self._order)
        queue.add(request)
        self._length += 1

    def peek(self) -> RequestT | None:
        """The head; None also if all that wait must leave what is free to others."""
        name = self._shares.first(self._queues)
        return None if name is None else self._queues[name].peek()

    def pop(self) -> RequestT:
        name = self._shares.first(self._queues)
        if name is None:
            raise LookupError("no request in the queue may be served")
        request = self._queues[name].pop()
        self._took_from(name)
        return request

    def prepend(self, request: RequestT) -> None:
        self.add(request)

    def remove(self, request: RequestT) -> None:
        name = request.options.tenant.name
        if name not in self._queues:
            raise LookupError(f"{request.request_id} is not in the queue")
        self._queues[name].remove(request)
        self._took_from(name)

    def _took_from(self, name: str) -> None:
        self._length -= 1
        if not len(self._queues[name]):
            del self._queues[name]

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[RequestT]:
        """Tenant by tenant, the one that is served next first."""
        for name in sorted(self._queues, key=self._shares.rank):
            yield from self._queues[name]


RequestQueue: TypeAlias = FCFSQueue[RequestT] | PriorityQueue[RequestT] | FairQueue[RequestT]


class SchedulingPolicy(ABC):
    """A scheduling policy: one object per scheduler, called only on its thread.

    ignores_priority: the first request with a priority is logged as a warning.
    """

    ignores_priority: ClassVar[bool] = False

    @abstractmethod
    def make_queue(self) -> RequestQueue[Any]:
        """An empty FCFSQueue() or PriorityQueue(order), for requests that may be admitted. Called
        a second time for requests set aside, unless the first queue is an FCFSQueue (they keep
        their positions then)."""

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

    def ended(self, request: PolicyRequest) -> None:  # noqa: B027  # optional
        """A request has ended, for any reason. Called once for each that has arrived."""

    def update_pinned_state(self, job_ids: Collection[str]) -> Collection[PolicyRequest]:
        """Receive the jobs whose KV is kept for their next turn. Returns the requests whose order
        this changes, waiting or not. Policies of other packages are not called."""
        return ()


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
        return request.options.priority, request.arrival_time


class FairPolicy(PriorityPolicy):
    """Shares rows, KV cache and tokens between tenants; the order is that within one tenant. A
    request of a tenant that runs more than its share is preempted first.

    shares: the scheduler, which knows the sizes, replaces them before the first call.
    """

    def __init__(self) -> None:
        self.shares = Shares(max_num_seqs=1 << 16, num_slots=1 << 62)

    def make_queue(self) -> RequestQueue[Any]:
        return FairQueue(self.shares, self.order)

    def arrived(self, request: PolicyRequest) -> None:
        self.shares.arrived(request, request.options.tenant)

    def prefers_skipped(self, waiting: PolicyRequest, skipped: PolicyRequest) -> bool:
        ranks = [self.shares.rank(request.options.tenant.name) for request in (waiting, skipped)]
        return (ranks[1], self._position(skipped)) < (ranks[0], self._position(waiting))

    def pick_victim(self, running: Sequence[PolicyRequest]) -> int:
        over = self.shares.pick_over([request.options.tenant.name for request in running])
        return max(
            (index for index, request in enumerate(running) if request.options.tenant.name in over),
            key=lambda index: self._position(running[index]),
        )


class _Job:
    """first_arrival_s: arrival of its first turn. turns: its requests that have not ended, in
    order. is_over: the turn that arrived last is its last step."""

    def __init__(self, first_arrival_s: float) -> None:
        self.first_arrival_s = first_arrival_s
        self.turns: dict[PolicyRequest, None] = {}
        self.is_over = False


class ContinuumPolicy(OrderedPolicy):
    """First come, first served by job: a turn has the position of its job's first turn, and pinned
    jobs, whose prefix is still in memory, are served first. A request without a job is a job by
    itself.

    A job keeps its position between two turns. It is removed when all of its requests have ended,
    the newest of them was its last step, and it is not pinned; its next turn then counts as the
    first. Of the jobs without live requests, at most `MAX_IDLE_JOBS` are remembered. After
    Continuum (arXiv 2511.02230).
    """

    ignores_priority = True

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._pinned: frozenset[str] = frozenset()
        self._sweep_at = _MIN_SWEEP

    def arrived(self, request: PolicyRequest) -> None:
        job_id = request.options.job_id
        if job_id is None:
            return
        job = self._jobs.get(job_id)
        if job is None or not self._is_remembered(job_id, job):
            job = _Job(request.arrival_time)
        job.is_over = request.options.is_last_step
        job.turns[request] = None
        self._jobs.pop(job_id, None)
        self._jobs[job_id] = job  # the jobs whose last turn is the newest come last
        if len(self._jobs) >= self._sweep_at:  # amortised: half of them are new since the last
            self._sweep()
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._jobs))

    def ended(self, request: PolicyRequest) -> None:
        if (job := self._jobs.get(request.options.job_id or "")) is not None:
            job.turns.pop(request, None)

    def turns_of(self, job_id: str) -> Collection[PolicyRequest]:
        """The requests of a job that have not ended."""
        job = self._jobs.get(job_id)
        return () if job is None else job.turns.keys()

    def _is_remembered(self, job_id: str, job: _Job) -> bool:
        return bool(job.turns) or job_id in self._pinned or not job.is_over

    def _sweep(self) -> None:
        jobs = {id_: job for id_, job in self._jobs.items() if self._is_remembered(id_, job)}
        idle = [id_ for id_, job in jobs.items() if not job.turns and id_ not in self._pinned]
        for job_id in idle[: max(len(idle) - MAX_IDLE_JOBS, 0)]:
            del jobs[job_id]
        self._jobs = jobs

    def first_arrival_s(self, request: PolicyRequest) -> float:
        """When the first turn of a live request's job arrived; without a job, the request."""
        job_id = request.options.job_id
        return request.arrival_time if job_id is None else self._jobs[job_id].first_arrival_s

    def update_pinned_state(self, job_ids: Collection[str]) -> Collection[PolicyRequest]:
        previous, self._pinned = self._pinned, frozenset(job_ids)
        return [turn for job_id in self._pinned ^ previous for turn in self.turns_of(job_id)]

    def order(self, request: PolicyRequest) -> Order:
        job_id = request.options.job_id
        is_pinned = job_id is not None and job_id in self._pinned
        return not is_pinned, self.first_arrival_s(request), request.arrival_time

    def pick_victim(self, running: Sequence[PolicyRequest]) -> int:
        last = len(running) - 1
        unpinned = (i for i in range(last, -1, -1) if running[i].options.job_id not in self._pinned)
        return next(unpinned, last)


_MIN_SWEEP: Final = 64
MAX_IDLE_JOBS: Final = 4096

POLICIES: Final[dict[str, type[SchedulingPolicy]]] = {
    "fcfs": FCFSPolicy,
    "priority": PriorityPolicy,
    "continuum": ContinuumPolicy,
    "fair": FairPolicy,
}
