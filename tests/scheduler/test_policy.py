"""Which queue is looked at next, and who gives way."""

import pytest

from longshore.scheduler.policy import POLICIES, FCFSPolicy, PriorityPolicy
from longshore.scheduler.request_queue import FCFSQueue, PriorityQueue
from tests.scheduler.test_request import make_request


@pytest.mark.req("QUE-04")
def test_fcfs_looks_at_what_was_set_aside_first() -> None:
    policy = FCFSPolicy()
    waiting, skipped = policy.make_queue(), policy.make_queue()
    waiting.add(make_request("new", now=1.0))
    assert policy.choose_queue(waiting, skipped) is waiting
    skipped.add(make_request("old", now=2.0))
    assert policy.choose_queue(waiting, skipped) is skipped


@pytest.mark.req("QUE-04")
def test_priority_compares_the_two_heads() -> None:
    policy = PriorityPolicy()
    waiting, skipped = policy.make_queue(), policy.make_queue()
    waiting.add(make_request("w", priority=1))
    assert policy.choose_queue(waiting, skipped) is waiting
    skipped.add(make_request("s", priority=2))
    assert policy.choose_queue(waiting, skipped) is waiting
    skipped.add(make_request("t", priority=0))
    assert policy.choose_queue(waiting, skipped) is skipped
    waiting.pop()
    assert policy.choose_queue(waiting, skipped) is skipped


def test_victim_is_the_youngest_under_fcfs() -> None:
    running = [make_request(str(index), priority=-index) for index in range(3)]
    assert FCFSPolicy().pick_victim(running) == 2


def test_victim_is_the_last_in_order_under_priority() -> None:
    running = [
        make_request("a", priority=1, now=1.0),
        make_request("b", priority=1, now=3.0),
        make_request("c", priority=0, now=9.0),
        make_request("d", priority=1, now=2.0),
    ]
    assert PriorityPolicy().pick_victim(running) == 1


def test_each_policy_makes_queues_of_its_own_kind() -> None:
    assert isinstance(POLICIES["fcfs"]().make_queue(), FCFSQueue)
    assert isinstance(POLICIES["priority"]().make_queue(), PriorityQueue)
