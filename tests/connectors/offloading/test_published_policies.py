"""ARC and S3-FIFO against their papers: the same entries, in the same lists, after each request."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.connectors.offloading.policies.arc import ARC
from longshore.connectors.offloading.policies.policy import EvictionPolicy, Protected
from longshore.connectors.offloading.policies.s3fifo import S3FIFO
from tests.connectors.offloading.published import PublishedARC, PublishedS3FIFO

NOTHING = Protected()


def request(policy: EvictionPolicy, key: bytes) -> None:
    """One key at a time, as in the papers."""
    if key in policy:
        policy.touch([key], range(1))
    else:
        assert (
            policy.admit([key], range(1), int(len(policy) >= policy.capacity), NOTHING) is not None
        )


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "big")


def requests(seed: int, capacity: int) -> Iterator[bytes]:
    """Loops, scans, and keys with a skewed popularity, in phases."""
    chance = random.Random(seed)
    new = 10_000
    for _ in range(40):
        width = chance.randrange(1, 4 * capacity)
        kind = chance.randrange(3)
        for step in range(chance.randrange(1, 4 * capacity)):
            if kind == 0:
                yield key_of(step % width)
            elif kind == 1:
                new += 1
                yield key_of(new)
            else:
                yield key_of(int(width * chance.random() ** 3))


@pytest.mark.req("POL-05", "POL-06", "POL-07", "ERR-28")
@pytest.mark.parametrize("capacity", [1, 2, 3, 10, 64])
def test_arc_makes_the_decisions_of_the_paper(capacity: int) -> None:
    for seed in range(4):
        policy, paper = ARC(capacity), PublishedARC(capacity)
        for key in requests(seed, capacity):
            request(policy, key)
            paper.request(key)
            assert list(policy._t1) == paper.t1
            assert list(policy._t2) == paper.t2
            assert list(policy._b1) == paper.b1
            assert list(policy._b2) == paper.b2
            assert policy.target == paper.p
        policy.check()


@pytest.mark.parametrize("capacity", [1, 2, 3, 10, 64])
def test_s3fifo_makes_the_decisions_of_the_paper(capacity: int) -> None:
    for seed in range(4):
        policy, paper = S3FIFO(capacity), PublishedS3FIFO(capacity)
        for key in requests(seed, capacity):
            request(policy, key)
            paper.request(key)
            assert list(policy._small) == paper.small
            assert list(policy._main) == paper.main
            assert list(policy._remembered) == paper.ghost
        policy.check()


@pytest.mark.req("ERR-28")
@given(st.lists(st.lists(st.integers(0, 60), max_size=8, unique=True), max_size=60))
def test_ghosts_and_target_are_bounded_with_many_keys_per_call(calls: list[list[int]]) -> None:
    policy = ARC(8)
    for numbers in calls:
        keys = [key_of(number) for number in numbers]
        policy.touch(keys, range(len(keys)))
        new = [key for key in keys if key not in policy]
        num_evict = max(0, len(policy) + len(new) - policy.capacity)
        policy.admit(new, range(len(new)), num_evict, Protected(set(keys)))
        policy.check()
        assert 0 <= policy.target <= 8
        assert policy.num_remembered() <= 2 * 8 - len(policy)


@given(st.data())
def test_arc_evicts_the_same_with_many_new_keys_per_call(data: st.DataObject) -> None:
    """New keys that are not ghosts, and do not fill the tier alone: one call and many calls are the
    same."""
    numbers = data.draw(st.lists(st.integers(0, 30), min_size=20, max_size=120))
    one, many = ARC(16), ARC(16)
    for number in numbers:
        request(one, key_of(number))
        request(many, key_of(number))
    new = [key_of(1000 + number) for number in range(data.draw(st.integers(1, 4)))]
    # Entries of T1 that are newer than half of it are not reached by either.
    num_evict = max(0, len(one) + len(new) - one.capacity)
    evicted = one.admit(new, range(len(new)), num_evict, NOTHING)
    one_by_one = []
    protected = Protected(set(new))
    for key in reversed(new):
        is_full = len(many) >= many.capacity
        one_by_one += many.admit([key], range(1), int(is_full), protected) or []
    assert evicted is not None
    assert sorted(evicted) == sorted(one_by_one)
    assert list(one._t1) == list(many._t1)
    assert sorted(one) == sorted(many)
    assert one.target == many.target


def test_a_key_evicted_by_arc_that_returns_enters_t2_and_moves_the_target() -> None:
    policy = ARC(2)
    first, second, third, fourth = map(key_of, range(4))
    for key in (first, second, second, third, fourth):  # `first`, then `third`, leave T1
        request(policy, key)
    assert third not in policy
    assert policy.target == 0
    request(policy, third)
    assert policy.target == 1
    assert third in list(policy._t2)


@pytest.mark.req("POL-08")
@pytest.mark.parametrize("num_keys", [1, 7])
def test_a_scan_does_not_displace_what_was_used_twice(num_keys: int) -> None:
    policy = ARC(100)
    used_twice = [key_of(number) for number in range(60)]
    policy.insert(used_twice, range(60))
    policy.touch(used_twice, range(60))
    for first in range(1000, 5000, num_keys):
        keys = [key_of(number) for number in range(first, first + num_keys)]
        policy.touch(keys, range(num_keys))
        num_evict = max(0, len(policy) + num_keys - policy.capacity)
        assert policy.admit(keys, range(num_keys), num_evict, NOTHING) is not None
    assert all(key in policy for key in used_twice)
    assert len(policy) == 100


def test_s3fifo_evicts_when_all_of_a_short_small_queue_was_used_often() -> None:
    policy = S3FIFO(100)
    keys = [key_of(number) for number in range(5)]
    policy.insert(keys, range(5))
    for _ in range(2):
        policy.touch(keys, range(5))
    assert policy.evict(2, NOTHING) == keys[:2:-1]  # they pass through the main queue
    policy.check()
