"""Requests that wait for capacity at the engines of one role."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from longshore.deploy.gateway.router.role_queue import MAX_ATTEMPTS, Assignment, Refusal, RoleQueue


def queue_of(*capacities: int, max_waiting: int = 2) -> RoleQueue[str]:
    """It chooses the engine with the lowest number."""
    queue: RoleQueue[str] = RoleQueue(
        lambda request, engines: min(engines), max_waiting=max_waiting
    )
    for engine, capacity in enumerate(capacities):
        queue.set_capacity(engine, capacity)
    return queue


def test_requests_are_assigned_while_they_fit_then_wait_then_are_rejected() -> None:
    queue = queue_of(10, 5)
    assert queue.add("a", 6) == [Assignment("a", 0)]
    assert queue.add("b", 5) == [Assignment("b", 1)]
    assert queue.add("c", 5) == []
    assert queue.add("d", 1) == []  # it would fit, but does not overtake
    assert queue.add("e", 1) is Refusal.FULL
    assert queue.num_waiting == 2
    assert queue.release("a") == [Assignment("c", 0), Assignment("d", 0)]
    assert queue.add("e", 1) == [Assignment("e", 0)]
    assert [queue.num_used(engine) for engine in (0, 1)] == [7, 5]


def test_a_request_that_fits_nowhere_is_refused_and_without_engines_it_waits() -> None:
    assert queue_of(10, 5).add("a", 11) is Refusal.TOO_LARGE
    for queue in (queue_of(), queue_of(0)):
        assert queue.add("a", 11) == []
        assert queue.set_capacity(0, 11) == [Assignment("a", 0)]


def test_a_request_that_does_not_wait_any_more_makes_way() -> None:
    queue = queue_of(10)
    assert queue.add("a", 5) == [Assignment("a", 0)]
    assert queue.add("b", 6) == []
    assert queue.add("c", 5) == []
    assert queue.release("b") == [Assignment("c", 0)]
    assert queue.release("b") == []


def test_an_engine_that_drains_takes_no_more() -> None:
    queue = queue_of(10, 10)
    queue.add("a", 5)
    assert queue.set_capacity(0, 0) == []
    assert queue.add("b", 5) == [Assignment("b", 1)]
    assert queue.num_used(0) == 5


def test_requests_of_a_lost_engine_go_first_to_another_one() -> None:
    queue = queue_of(10, 5)
    queue.add("a", 6)
    queue.add("b", 4)
    queue.add("c", 5)
    assert queue.add("d", 1) == []
    assert queue.remove_engine(0) == ["a", "b"]
    assert queue.retry("b") == []
    assert queue.release("c") == [Assignment("b", 1), Assignment("d", 1)]
    assert queue.retry("a") == []
    assert queue.set_capacity(0, 10) == [Assignment("a", 0)]  # also where it has failed, if need be


def test_a_request_that_fails_avoids_that_engine_and_not_for_ever() -> None:
    queue = queue_of(10, 10, 10)
    assert queue.add("a", 5) == [Assignment("a", 0)]
    assert queue.retry("a") == [Assignment("a", 1)]
    assert queue.retry("a") == [Assignment("a", 2)]
    assert MAX_ATTEMPTS == 3
    assert queue.retry("a") is Refusal.FAILED
    assert queue.num_used(0) == queue.num_used(1) == queue.num_used(2) == 0


def test_a_request_is_added_once() -> None:
    queue = queue_of(10)
    queue.add("a", 5)
    with pytest.raises(ValueError, match="'a' is in the queue already"):
        queue.add("a", 5)


class Requests(RuleBasedStateMachine):
    """Compare with lists that are searched again at each step."""

    @initialize(capacities=st.lists(st.integers(0, 12), max_size=3), max_waiting=st.integers(0, 4))
    def start(self, capacities: list[int], max_waiting: int) -> None:
        self.queue: RoleQueue[int] = RoleQueue(self.choose, max_waiting=max_waiting)
        self.max_waiting = max_waiting
        self.capacity: dict[int, int] = {}
        self.units: dict[int, int] = {}
        self.engine_of: dict[int, int] = {}
        self.waiting: list[int] = []
        self.failures: dict[int, list[int]] = {}
        self.next_request = 0
        for engine, capacity in enumerate(capacities):
            self.take(self.queue.set_capacity(engine, capacity))
            self.capacity[engine] = capacity

    def used(self, engine: int) -> int:
        return sum(self.units[r] for r, e in self.engine_of.items() if e == engine)

    def choose(self, request: int, engines: Sequence[int]) -> int:
        has_capacity = {
            engine
            for engine, capacity in self.capacity.items()
            if self.used(engine) + self.units[request] <= capacity
            or (capacity > 0 and self.used(engine) == 0)
        }
        fresh = has_capacity - set(self.failures[request])
        assert set(engines) == (fresh or has_capacity)
        chosen = engines[request % len(engines)]
        assert request == self.waiting.pop(0)
        self.engine_of[request] = chosen
        return chosen

    def take(self, placed: list[Assignment[int]]) -> None:
        for request, engine in placed:
            assert self.engine_of[request] == engine

    @rule(num_units=st.integers(1, 14))
    def add(self, num_units: int) -> None:
        request, self.next_request = self.next_request, self.next_request + 1
        self.units[request], self.failures[request] = num_units, []
        largest = max(self.capacity.values(), default=0)
        is_too_large = 0 < largest < num_units
        if not is_too_large:
            self.waiting.append(request)
        answer = self.queue.add(request, num_units)
        if is_too_large:
            assert answer is Refusal.TOO_LARGE
        elif isinstance(answer, Refusal):
            assert answer is Refusal.FULL
            assert self.waiting.pop() == request
            assert len(self.waiting) >= self.max_waiting
        else:
            self.take(answer)

    @precondition(lambda self: self.engine_of or self.waiting)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([*self.engine_of, *self.waiting]))
        self.engine_of.pop(request, None)
        self.waiting = [each for each in self.waiting if each != request]
        self.take(self.queue.release(request))

    @precondition(lambda self: self.engine_of)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.engine_of)))
        self.retry_one(request)

    def retry_one(self, request: int) -> None:
        self.failures[request].append(self.engine_of.pop(request))
        has_failed = len(self.failures[request]) >= MAX_ATTEMPTS
        if not has_failed:
            self.waiting.insert(0, request)
        answer = self.queue.retry(request)
        if isinstance(answer, Refusal):
            assert has_failed
            assert answer is Refusal.FAILED
        else:
            self.take(answer)

    @rule(engine=st.integers(0, 3), num_units=st.integers(0, 12))
    def set_capacity(self, engine: int, num_units: int) -> None:
        self.capacity[engine] = num_units
        self.take(self.queue.set_capacity(engine, num_units))

    @rule(engine=st.integers(0, 3))
    def lose(self, engine: int) -> None:
        self.capacity.pop(engine, None)
        lost = self.queue.remove_engine(engine)
        assert set(lost) == {each for each, other in self.engine_of.items() if other == engine}
        for request in reversed(lost):
            self.retry_one(request)

    @invariant()
    def what_is_used_is_what_requests_have(self) -> None:
        if hasattr(self, "queue"):
            assert self.queue.num_waiting == len(self.waiting)
            for engine in range(4):
                assert self.queue.num_used(engine) == self.used(engine)


TestRequests = Requests.TestCase
