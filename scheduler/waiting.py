"""Requests that do not run: those that may be admitted, and those set aside for now."""

from longshore.scheduler.policy import SchedulingPolicy
from longshore.scheduler.request import Request
from longshore.scheduler.request_queue import RequestQueue


class WaitingRequests:
    """Two queues of the policy's kind. A request that cannot be admitted in a step is set aside
    until the step's admissions are over, so no request is looked at twice in one step."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._waiting = policy.make_queue()
        self._skipped = policy.make_queue()
        self._set_aside: list[Request] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._skipped) + len(self._set_aside)

    def add(self, request: Request) -> None:
        """A new request, at its place."""
        self._waiting.add(request)

    def put_back(self, request: Request) -> None:
        """A preempted request, before its equals."""
        self._waiting.prepend(request)

    def peek(self) -> Request | None:
        """The request to try next, left where it is; None when all have been tried."""
        queue = self._next_queue()
        return None if queue is None else queue.peek()

    def pop(self) -> Request:
        """Take out the request that `peek` showed, because it is admitted."""
        queue = self._next_queue()
        assert queue is not None
        return queue.pop()

    def set_aside(self) -> None:
        """Take the request that `peek` showed out of the way for this step."""
        self._set_aside.append(self.pop())

    def end_step(self) -> None:
        """What was set aside may be tried again, first."""
        if self._set_aside:
            self._skipped.prepend_all(self._set_aside)
            self._set_aside = []

    def remove(self, request: Request) -> None:
        """The request ends while it waits."""
        for queue in (self._waiting, self._skipped):
            try:
                queue.remove(request)
            except LookupError:
                continue
            return
        raise LookupError(f"{request.request_id} does not wait")

    def _next_queue(self) -> RequestQueue | None:
        if not len(self._waiting) and not len(self._skipped):
            return None
        return self._policy.choose_queue(self._waiting, self._skipped)
