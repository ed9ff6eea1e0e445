"""Both queues against a list."""

import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.scheduler.queue.policies import (
    FCFSQueue,
    Order,
    PolicyRequest,
    PriorityQueue,
    RequestQueue,
)
from longshore.scheduler.request import Request
from tests.scheduler.test_request import make_request

Queue = RequestQueue[Request]


def by_priority_and_arrival(request: PolicyRequest) -> Order:
    return request.options.priority, request.arrival_time


def priority_queue() -> Queue:
    return PriorityQueue(by_priority_and_arrival)


QUEUES: list[Callable[[], Queue]] = [FCFSQueue, priority_queue]
operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "prepend", "pop", "remove"]),
        st.integers(0, 2),
        st.integers(0, 9),
    ),
    max_size=40,
)


def ids(queue: Queue) -> list[str]:
    return [request.request_id for request in queue]


def numbered(count: int, priority: int = 0) -> list[Request]:
    return [make_request(f"r{index}", priority=priority) for index in range(count)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(operations)
@pytest.mark.req("QUE-02")
def test_fcfs_queue_behaves_like_a_list(steps: list[tuple[str, int, int]]) -> None:
    check_against_list(FCFSQueue(), steps, keep_order=lambda requests: requests)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(operations)
@pytest.mark.req("QUE-03")
def test_priority_queue_behaves_like_a_sorted_list(steps: list[tuple[str, int, int]]) -> None:
    check_against_list(
        priority_queue(),
        steps,
        keep_order=lambda requests: sorted(
            requests, key=lambda each: (each.options.priority, each.arrival_time, each.request_id)
        ),
    )


def check_against_list(
    queue: Queue,
    steps: list[tuple[str, int, int]],
    *,
    keep_order: Callable[[list[Request]], list[Request]],
) -> None:
    model: list[Request] = []
    for number, (name, priority, position) in enumerate(steps):
        new = make_request(f"{number:02}", priority=priority, now=float(position))
        match name:
            case "add":
                queue.add(new)
                model.append(new)
            case "prepend":
                queue.prepend(new)
                model.insert(0, new)
            case "pop" if model:
                assert queue.pop() is model.pop(0)
            case "pop":
                with pytest.raises(LookupError):
                    queue.pop()
            case "remove" if model:
                queue.remove(model.pop(position % len(model)))
            case "remove":
                with pytest.raises(LookupError):
                    queue.remove(new)
        model = keep_order(model)
        assert list(queue) == model
        assert len(queue) == len(model)
        if model:
            assert queue.peek() is model[0]
        else:
            assert queue.peek() is None


@pytest.mark.req("QUE-02")
def test_fcfs_appends_right_pops_left_and_prepends_left() -> None:
    queue: Queue = FCFSQueue()
    a, b, c, d = numbered(4)
    queue.add(a)
    queue.add(b)
    queue.prepend(c)
    assert ids(queue) == ["r2", "r0", "r1"]
    queue.prepend(b)  # moves it
    queue.prepend(d)
    assert ids(queue) == ["r3", "r1", "r2", "r0"]
    assert queue.pop() is d
    assert queue.peek() is b


@pytest.mark.req("QUE-02")
@pytest.mark.parametrize("operation", ["add", "pop", "prepend", "remove"])
def test_fcfs_work_per_operation_does_not_grow_with_the_queue(operation: str) -> None:
    def lines_run(length: int) -> int:
        queue: Queue = FCFSQueue()
        requests = numbered(length)
        for request in requests:
            queue.add(request)
        new = make_request("new")
        arguments = {"add": [new], "pop": [], "prepend": [new], "remove": [requests[length // 2]]}
        count = 0

        def trace(*_: object) -> object:
            nonlocal count
            count += 1
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            getattr(queue, operation)(*arguments[operation])
        finally:
            sys.settrace(previous)
        return count

    assert lines_run(1000) == lines_run(10)


@pytest.mark.req("QUE-03")
def test_prepending_under_priority_jumps_no_order() -> None:
    queue = priority_queue()
    urgent, late = make_request("urgent", priority=-1), make_request("late", priority=5)
    queue.add(urgent)
    queue.prepend(late)
    assert ids(queue) == ["urgent", "late"]


@pytest.mark.req("QUE-03")
@pytest.mark.parametrize("removed", [0, 5, 1, 6, 7, 2])
def test_removal_from_anywhere_keeps_the_heap_in_order(removed: int) -> None:
    queue = priority_queue()
    requests = {index: make_request(str(index), priority=index) for index in (0, 5, 1, 6, 7, 2)}
    for request in requests.values():
        queue.add(request)
    queue.remove(requests.pop(removed))
    popped = [queue.pop().options.priority for _ in range(5)]
    assert popped == sorted(requests)


@pytest.mark.req("REQ-11", "ERR-31")
def test_equals_under_priority_stand_in_the_order_of_arrival_and_then_of_their_ids() -> None:
    requests = [
        make_request("b", priority=1, now=2.0),
        make_request("a", priority=1, now=2.0),
        make_request("late", priority=1, now=3.0),
        make_request("early", priority=1, now=1.0),
        make_request("urgent", priority=0, now=9.0),
    ]
    for shuffled in (requests, requests[::-1], sorted(requests, key=lambda each: each.request_id)):
        queue = priority_queue()
        for request in shuffled:
            queue.prepend(request)
        assert [queue.pop().request_id for _ in requests] == ["urgent", "early", "a", "b", "late"]


def test_order_is_asked_once_per_request() -> None:
    asked = []

    def order(request: PolicyRequest) -> Order:
        asked.append(request.request_id)
        return request.options.priority

    queue: Queue = PriorityQueue(order)
    requests = numbered(20)
    for request in requests:
        queue.prepend(request)
    queue.remove(requests[7])
    while len(queue):
        queue.pop()
    assert asked == [request.request_id for request in requests]


@pytest.mark.parametrize("make_queue", QUEUES)
def test_an_empty_queue_has_no_head(make_queue: Callable[[], Queue]) -> None:
    queue = make_queue()
    assert queue.peek() is None
    with pytest.raises(LookupError):
        queue.pop()
    with pytest.raises(LookupError):
        queue.remove(make_request())
    assert (len(queue), list(queue)) == (0, [])
