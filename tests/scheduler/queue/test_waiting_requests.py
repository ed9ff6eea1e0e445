"""The two waiting queues and what is set aside for a step."""

import logging

import pytest

from longshore.scheduler.queue.policies import (
    POLICIES,
    FCFSPolicy,
    PolicyRequest,
    PriorityPolicy,
)
from longshore.scheduler.queue.queues import (
    MIN_TRY_BLOCKS,
    RETRY_BLOCKS,
    SharedEvent,
    WaitingRequests,
)
from longshore.scheduler.request import Request
from tests.scheduler.test_request import make_request


def take(waiting: WaitingRequests) -> Request:
    """As admission does: look at the head, then take it."""
    assert waiting.peek() is not None
    return waiting.pop()


def set_aside(waiting: WaitingRequests) -> None:
    """As admission does: look at the head, then set it aside."""
    assert waiting.peek() is not None
    waiting.set_aside()


def drain(waiting: WaitingRequests) -> list[str]:
    popped = []
    while waiting.peek() is not None:
        popped.append(take(waiting).request_id)
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
    assert take(waiting) is first


@pytest.mark.req("SCH-11")
def test_what_is_set_aside_is_not_seen_again_before_the_step_has_ended() -> None:
    waiting = WaitingRequests(FCFSPolicy())
    for name in ("a", "b", "c"):
        waiting.add(make_request(name))
    set_aside(waiting)
    set_aside(waiting)
    assert len(waiting) == 3
    assert take(waiting).request_id == "c"
    assert waiting.peek() is None
    waiting.end_step()
    waiting.add(make_request("d"))
    assert drain(waiting) == ["a", "b", "d"]


@pytest.mark.req("SCH-11")
def test_set_aside_requests_go_before_those_set_aside_longer_ago() -> None:
    waiting = WaitingRequests(FCFSPolicy())
    for name in ("a", "b"):
        waiting.add(make_request(name))
    set_aside(waiting)
    waiting.end_step()
    set_aside(waiting)  # a, from the skipped queue
    set_aside(waiting)  # b
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


@pytest.mark.req("QUE-06")
@pytest.mark.parametrize("name", list(POLICIES))
def test_a_preempted_request_keeps_its_place_among_its_equals(name: str) -> None:
    """Equals have one priority and separate jobs. The youngest is preempted first."""
    policy = POLICIES[name]()
    waiting = WaitingRequests(policy)
    requests = [make_request(f"r{index}", now=float(index)) for index in range(8)]
    for request in requests:
        waiting.add(request)
    running = [take(waiting) for _ in range(4)]
    while running:
        waiting.put_back(running.pop(policy.pick_victim(running)))
    waiting.add(make_request("r8", now=8.0))
    assert drain(waiting) == [f"r{index}" for index in range(9)]


@pytest.mark.req("QUE-01")
def test_a_blocked_request_is_tried_each_step_and_delays_no_others() -> None:
    waiting = WaitingRequests(FCFSPolicy())
    waiting.add(make_request("free"))
    blocked = make_request("blocked")
    waiting.add_blocked(blocked)
    assert len(waiting) == 2
    for _ in range(2):
        assert waiting.peek() is blocked
        set_aside(waiting)
        head = waiting.peek()
        assert head is not None
        assert head.request_id == "free"
        waiting.end_step()
    waiting.remove(blocked)
    assert drain(waiting) == ["free"]


@pytest.mark.parametrize("name", list(POLICIES))
def test_iterating_shows_the_order_of_serving_and_takes_nothing_out(name: str) -> None:
    waiting = WaitingRequests(POLICIES[name]())
    for index, priority in enumerate((3, 1, 2, 1, 0, 3, 2)):
        request = make_request(f"r{index}", priority=priority, now=float(index))
        (waiting.add_blocked if index % 3 == 0 else waiting.add)(request)
    listed = [request.request_id for request in waiting]
    assert len(listed) == len(waiting) == 7
    assert listed == drain(waiting)


def test_what_a_step_has_tried_is_listed_first_and_can_end() -> None:
    waiting = WaitingRequests(FCFSPolicy())
    requests = [make_request(name) for name in ("a", "b", "c")]
    for request in requests:
        waiting.add(request)
    set_aside(waiting)
    set_aside(waiting)
    assert list(waiting) == requests
    waiting.remove(requests[0])
    waiting.end_step()
    assert drain(waiting) == ["b", "c"]


@pytest.mark.parametrize(("name", "num_warnings"), [("fcfs", 1), ("continuum", 1), ("priority", 0)])
def test_a_priority_that_the_policy_ignores_is_warned_about_once(
    name: str, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = WaitingRequests(POLICIES[name]())
    with caplog.at_level(logging.WARNING):
        waiting.add(make_request("plain"))
        assert caplog.messages == []
        waiting.add(make_request("urgent", priority=-3))
        waiting.add_blocked(make_request("also urgent", priority=-3))
    assert len(caplog.messages) == num_warnings
    assert all("urgent" in each and "priority -3" in each for each in caplog.messages)


def test_a_request_can_be_removed_from_either_queue_and_only_once() -> None:
    waiting = WaitingRequests(FCFSPolicy())
    requests = [make_request(name) for name in ("a", "b", "c")]
    for request in requests:
        waiting.add(request)
    set_aside(waiting)
    waiting.end_step()
    waiting.remove(requests[0])
    waiting.remove(requests[2])
    assert len(waiting) == 1
    with pytest.raises(LookupError, match="a is not waiting"):
        waiting.remove(requests[0])
    assert drain(waiting) == ["b"]


@pytest.mark.req("QUE-05")
@pytest.mark.parametrize("name", list(POLICIES))
def test_a_parked_request_is_not_looked_at_before_its_event_and_keeps_its_place(name: str) -> None:
    waiting = WaitingRequests(POLICIES[name]())
    requests = [make_request(f"r{index}", now=float(index)) for index in range(4)]
    for request in requests:
        waiting.add(request)
    waiting.park_head()  # r0 waits for an event
    set_aside(waiting)  # r1 is tried again in the next step
    waiting.end_step()
    assert waiting.peek() is requests[1]
    assert (len(waiting), list(waiting)[-1]) == (4, requests[0])
    waiting.unpark(requests[0])
    assert drain(waiting) == ["r0", "r1", "r2", "r3"]


def test_a_parked_request_can_end_and_a_preempted_one_goes_before_it() -> None:
    waiting = WaitingRequests(FCFSPolicy())
    parked, gone, victim = (make_request(name) for name in ("parked", "gone", "victim"))
    waiting.park(parked)
    waiting.park(gone)
    waiting.put_back(victim)
    waiting.remove(gone)
    with pytest.raises(LookupError):
        waiting.remove(gone)
    waiting.unpark(parked)
    assert drain(waiting) == ["victim", "parked"]


class _Unlooked(FCFSPolicy):
    """Counts how often it is asked about requests."""

    num_questions = 0

    def prefers_skipped(self, waiting: PolicyRequest, skipped: PolicyRequest) -> bool:
        self.num_questions += 1
        return super().prefers_skipped(waiting, skipped)


def test_parked_requests_cost_a_step_nothing() -> None:
    policy = _Unlooked()
    waiting = WaitingRequests(policy)
    for index in range(1000):
        waiting.park(make_request(f"parked-{index}"))
    waiting.add(make_request("runs"))
    assert take(waiting).request_id == "runs"
    assert waiting.peek() is None
    assert policy.num_questions == 0


# Events that concern many requests


def park_all(waiting: WaitingRequests, event: SharedEvent, count: int) -> list[Request]:
    requests = [make_request(f"r{index:03}", now=float(index)) for index in range(count)]
    for request in requests:
        waiting.add(request)
    for _ in requests:
        assert waiting.peek() is not None
        waiting.park_head(event)
    return requests


@pytest.mark.req("QUE-05")
@pytest.mark.parametrize("name", list(POLICIES))
def test_what_waits_for_a_shared_event_is_tried_after_it_a_limited_number_per_step(
    name: str,
) -> None:
    waiting = WaitingRequests(POLICIES[name]())
    per_step = RETRY_BLOCKS // MIN_TRY_BLOCKS
    requests = park_all(waiting, SharedEvent.ADAPTERS, per_step + 10)
    waiting.begin_step()
    assert waiting.peek() is None
    assert not waiting.has_retries
    waiting.happened(SharedEvent.ENCODER)  # another one
    waiting.begin_step()
    assert waiting.peek() is None
    waiting.happened(SharedEvent.ADAPTERS)
    tried = []
    for _ in range(2):
        assert waiting.has_retries
        waiting.begin_step()
        tried.append(drain(waiting))
        waiting.end_step()
    ids = [request.request_id for request in requests]
    assert tried == [ids[:per_step], ids[per_step:]]
    assert len(waiting) == 0


def test_what_was_tried_in_vain_waits_for_the_next_event_behind_those_not_tried() -> None:
    waiting = WaitingRequests(FCFSPolicy())
    per_step = RETRY_BLOCKS // MIN_TRY_BLOCKS
    requests = park_all(waiting, SharedEvent.CONNECTOR, per_step + 10)
    waiting.happened(SharedEvent.CONNECTOR)
    waiting.begin_step()
    for request in requests[:per_step]:
        assert waiting.peek() is request
        waiting.park_head(SharedEvent.CONNECTOR)
    waiting.happened(SharedEvent.CONNECTOR)
    waiting.begin_step()
    tried = drain(waiting)
    assert {request.request_id for request in requests[per_step:]} < set(tried)


def test_a_long_prompt_counts_for_as_many_tries_as_it_has_blocks() -> None:
    waiting = WaitingRequests(FCFSPolicy())
    requests = park_all(waiting, SharedEvent.CONNECTOR, 4)
    for request in requests:
        request.block_hashes = [b"hash"] * RETRY_BLOCKS
    waiting.happened(SharedEvent.CONNECTOR)
    for request in requests:
        waiting.begin_step()
        assert drain(waiting) == [request.request_id]


def test_an_event_that_names_its_request_wakes_only_that_one() -> None:
    waiting = WaitingRequests(FCFSPolicy())
    requests = park_all(waiting, SharedEvent.CONNECTOR, 5)
    waiting.unpark_one(SharedEvent.CONNECTOR, "r003")
    waiting.unpark_one(SharedEvent.CONNECTOR, "gone")
    waiting.unpark_one(SharedEvent.ENCODER, "r001")  # it waits for something else
    waiting.begin_step()
    assert drain(waiting) == ["r003"]
    waiting.remove(requests[0])
    assert len(waiting) == 3


def test_a_polled_event_happens_in_every_step() -> None:
    waiting = WaitingRequests(FCFSPolicy(), polled=(SharedEvent.CONNECTOR,))
    park_all(waiting, SharedEvent.CONNECTOR, 2)
    assert waiting.has_retries
    waiting.begin_step()
    assert drain(waiting) == ["r000", "r001"]


@pytest.mark.parametrize("name", list(POLICIES))
def test_of_those_that_wait_for_other_loads_a_step_tries_the_first(name: str) -> None:
    waiting = WaitingRequests(POLICIES[name]())
    requests = [make_request(f"r{index}", now=float(index)) for index in range(4)]
    for request in requests:
        waiting.add(request)
    for _ in requests:
        assert waiting.peek() is not None
        waiting.delay_load()
    for _ in range(3):
        waiting.begin_step()
        waiting.begin_step()  # no other one before the first has been tried
        assert waiting.peek() is requests[0]
        waiting.delay_load()
        assert waiting.peek() is None
        assert len(waiting) == 4
    waiting.begin_step()
    waiting.remove(requests[0])
    waiting.remove(requests[2])
    waiting.begin_step()
    assert take(waiting) is requests[1]
    waiting.unpark_load()
    assert take(waiting) is requests[3]
    assert len(waiting) == 0


def test_when_loads_become_full_no_second_delayed_load_is_tried() -> None:
    waiting = WaitingRequests(FCFSPolicy())
    first, between, second = (make_request(f"r{index}", now=float(index)) for index in range(3))
    for request in (first, between, second):
        waiting.add(request)
    for request in (first, between, second):
        assert waiting.peek() is request
        if request is between:
            waiting.set_aside()
        else:
            waiting.delay_load()
    waiting.end_step()
    waiting.begin_step()
    assert waiting.peek() is first
    waiting.park_head(SharedEvent.CONNECTOR)  # it does not know yet, so the second may be tried
    assert waiting.peek() is between
    waiting.delay_load()
    assert waiting.peek() is None
    waiting.begin_step()
    assert waiting.peek() is between
