"""The two waiting queues and what is set aside for a step."""

import pytest

from longshore.scheduler.policy import FCFSPolicy, PriorityPolicy
from longshore.scheduler.waiting import WaitingRequests
from tests.scheduler.test_request import make_request


def drain(waiting: WaitingRequests) -> list[str]:
    popped = []
    while waiting.peek() is not None:
        popped.append(waiting.pop().request_id)
    return popped


@pytest.mark.req("SCH-10")
def test_the_head_stays_until_it_is_popped() -> None:
    waiting = WaitingRequests(FCFSPolicy())
    assert waiting.peek() is None
    first = make_request("first")
    waiting.add(first)
    waiting.add(make_request("second"))
    assert waiting.peek() is first
    assert waiting.peek() is first
    assert len(waiting) == 2
    assert waiting.pop() is first


@pytest.mark.req("SCH-11")
def test_what_is_set_aside_is_not_seen_again_before_the_step_has_ended() -> None:
    waiting = WaitingRequests(FCFSPolicy())
    for name in ("a", "b", "c"):
        waiting.add(make_request(name))
    waiting.set_aside()
    waiting.set_aside()
    assert len(waiting) == 3
    assert waiting.pop().request_id == "c"
    assert waiting.peek() is None
    waiting.end_step()
    waiting.add(make_request("d"))
    assert drain(waiting) == ["a", "b", "d"]


@pytest.mark.req("SCH-11")
def test_set_aside_requests_go_before_those_set_aside_longer_ago() -> None:
    waiting = WaitingRequests(FCFSPolicy())
    for name in ("a", "b"):
        waiting.add(make_request(name))
    waiting.set_aside()
    waiting.end_step()
    waiting.set_aside()  # a, from the skipped queue
    waiting.set_aside()  # b
    waiting.end_step()
    assert drain(waiting) == ["a", "b"]


@pytest.mark.req("QUE-06")
def test_a_preempted_request_returns_to_the_front_under_fcfs() -> None:
    waiting = WaitingRequests(FCFSPolicy())
    waiting.add(make_request("waits"))
    waiting.put_back(make_request("younger victim"))
    waiting.put_back(make_request("older victim"))
    assert drain(waiting) == ["older victim", "younger victim", "waits"]


@pytest.mark.req("QUE-06")
def test_a_preempted_request_returns_to_its_place_under_priority() -> None:
    waiting = WaitingRequests(PriorityPolicy())
    waiting.add(make_request("urgent", priority=0))
    waiting.add(make_request("patient", priority=2))
    waiting.put_back(make_request("victim", priority=1))
    assert drain(waiting) == ["urgent", "victim", "patient"]


def test_a_request_can_be_removed_from_either_queue_and_only_once() -> None:
    waiting = WaitingRequests(FCFSPolicy())
    requests = [make_request(name) for name in ("a", "b", "c")]
    for request in requests:
        waiting.add(request)
    waiting.set_aside()
    waiting.end_step()
    waiting.remove(requests[0])
    waiting.remove(requests[2])
    assert len(waiting) == 1
    with pytest.raises(LookupError, match="a does not wait"):
        waiting.remove(requests[0])
    assert drain(waiting) == ["b"]
