"""Both queues against a list."""

import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.scheduler.request import Request
from longshore.scheduler.request_queue import FCFSQueue, PriorityQueue, RequestQueue
from tests.scheduler.test_request import make_request

QUEUES: list[Callable[[], RequestQueue]] = [FCFSQueue, PriorityQueue]
operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "prepend", "prepend_all", "pop", "remove"]),
        st.integers(0, 2),
        st.integers(0, 9),
    ),
    max_size=40,
)


def ids(queue: RequestQueue) -> list[str]:
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
    check_against_list(PriorityQueue(), steps, keep_order=sorted)


def check_against_list(
    queue: RequestQueue,
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
            case "prepend_all":
                other = make_request(f"{number:02}b", priority=priority)
                queue.prepend_all(iter([new, other]))
                model[:0] = [new, other]
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
            with pytest.raises(LookupError):
                queue.peek()


@pytest.mark.req("QUE-02")
def test_fcfs_appends_right_pops_left_and_prepends_left() -> None:
    queue = FCFSQueue()
    a, b, c, d = numbered(4)
    queue.add(a)
    queue.add(b)
    queue.prepend(c)
    assert ids(queue) == ["r2", "r0", "r1"]
    queue.prepend_all([d, b])  # moves b, keeps the order of the two
    assert ids(queue) == ["r3", "r1", "r2", "r0"]
    assert queue.pop() is d
    assert queue.peek() is b


@pytest.mark.req("QUE-02")
@pytest.mark.parametrize("operation", ["add", "pop", "prepend", "remove"])
def test_fcfs_work_per_operation_does_not_grow_with_the_queue(operation: str) -> None:
    def lines_run(length: int) -> int:
        queue = FCFSQueue()
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
    queue = PriorityQueue()
    urgent, late = make_request("urgent", priority=-1), make_request("late", priority=5)
    queue.add(urgent)
    queue.prepend(late)
    assert ids(queue) == ["urgent", "late"]
    queue.prepend_all([make_request("later", priority=6)])
    assert ids(queue) == ["urgent", "late", "later"]


@pytest.mark.req("QUE-03")
@pytest.mark.parametrize("removed", [0, 5, 1, 6, 7, 2])
def test_removal_from_anywhere_keeps_the_heap_in_order(removed: int) -> None:
    queue = PriorityQueue()
    requests = {index: make_request(str(index), priority=index) for index in (0, 5, 1, 6, 7, 2)}
    for request in requests.values():
        queue.add(request)
    queue.remove(requests.pop(removed))
    popped = [queue.pop().priority for _ in range(5)]
    assert popped == sorted(requests)


@pytest.mark.parametrize("make_queue", QUEUES)
def test_an_empty_queue_has_no_head(make_queue: Callable[[], RequestQueue]) -> None:
    queue = make_queue()
    with pytest.raises(LookupError):
        queue.peek()
    with pytest.raises(LookupError):
        queue.pop()
    with pytest.raises(LookupError):
        queue.remove(make_request())
    assert (len(queue), list(queue)) == (0, [])
