"""What all eviction policies must do, and the order of LRU."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.connectors.offloading.policies.lru import LRU
from longshore.connectors.offloading.policies.policy import EvictionPolicy, Protected
from longshore.connectors.offloading.policies.registry import POLICIES

NOTHING = Protected()
EVERY_POLICY = pytest.mark.parametrize("policy_class", POLICIES.values(), ids=list(POLICIES))


def keys_of(first: int, last: int) -> list[bytes]:
    return [number.to_bytes(4, "big") for number in range(first, last)]


def state_of(policy: EvictionPolicy) -> object:
    """Everything that a later decision can depend on."""
    evicted = []
    while len(policy):
        evicted += policy.evict(1, NOTHING) or []
    return evicted


def random_calls(policy: EvictionPolicy, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(60):
        first = chance.randrange(40)
        keys = keys_of(first, first + chance.randrange(1, 7))
        policy.touch(keys, range(first, first + len(keys)))
        new = [key for key in keys if key not in policy]
        num_evict = max(0, len(policy) + len(new) - policy.capacity)
        policy.admit(new, range(len(new)), num_evict, Protected(set(keys)))
        if chance.random() < 0.2:
            policy.remove([key for key in keys if key in policy])
        policy.check()


@pytest.mark.req("POL-02", "POL-03")
@EVERY_POLICY
@pytest.mark.parametrize("seed", range(10))
def test_too_few_unprotected_entries_change_nothing(
    policy_class: type[EvictionPolicy], seed: int
) -> None:
    policy, untouched = policy_class(20), policy_class(20)
    for each in (policy, untouched):
        random_calls(each, seed)
    chance = random.Random(seed)
    held = {key for key in policy if chance.random() < 0.5}
    num_free = len(policy) - len(held)
    assert policy.evict(num_free + 1, Protected(held)) is None
    new = keys_of(1000, 1000 + num_free + 1)
    assert policy.admit(new, range(len(new)), num_free + 1, Protected(held)) is None
    policy.check()
    assert state_of(policy) == state_of(untouched)


@pytest.mark.req("POL-01", "POL-03")
@EVERY_POLICY
@pytest.mark.parametrize("seed", range(10))
def test_all_unprotected_entries_can_be_evicted_at_once(
    policy_class: type[EvictionPolicy], seed: int
) -> None:
    policy = policy_class(20)
    random_calls(policy, seed)
    chance = random.Random(seed)
    entries = set(policy)
    held = {key for key in entries if chance.random() < 0.5}
    evicted = policy.evict(len(entries) - len(held), Protected(set(), held))
    assert evicted is not None
    assert set(evicted) == entries - held
    assert len(evicted) == len(entries) - len(held)
    assert set(policy) == held
    policy.check()


@pytest.mark.req("POL-01")
@EVERY_POLICY
def test_entries_are_what_was_inserted_and_neither_removed_nor_evicted(
    policy_class: type[EvictionPolicy],
) -> None:
    policy = policy_class(8)
    policy.insert(keys_of(0, 6), range(6))
    assert sorted(policy) == keys_of(0, 6)
    policy.touch(keys_of(2, 10), range(2, 10))  # some are no entries, and do not become any
    policy.remove(keys_of(4, 6))
    assert sorted(policy) == keys_of(0, 4)
    (evicted,) = policy.evict(1, NOTHING) or []
    assert evicted not in policy
    assert len(policy) == 3
    assert all(key in policy for key in keys_of(0, 4) if key != evicted)
    assert keys_of(7, 8)[0] not in policy


@EVERY_POLICY
def test_the_end_of_a_prompt_is_evicted_before_its_beginning(
    policy_class: type[EvictionPolicy],
) -> None:
    """Also if it was stored in parts, because `refresh` puts them in order."""
    for step in (1, 3, 10):
        policy = policy_class(30)
        prompt = keys_of(0, 10)
        policy.touch(prompt, range(10))
        for first in range(0, 10, step):
            part = prompt[first : first + step]
            policy.insert(part, range(first, first + len(part)))
            policy.refresh(prompt)
        if step == 10 or policy_class.__name__ != "S3FIFO":  # its queues do not reorder entries
            assert policy.evict(10, NOTHING) == prompt[::-1]


@EVERY_POLICY
@given(st.integers(1, 40), st.data())
def test_admitted_keys_are_never_evicted_by_the_same_call(
    policy_class: type[EvictionPolicy], capacity: int, data: st.DataObject
) -> None:
    policy = policy_class(capacity)
    ends = data.draw(st.lists(st.integers(0, 60), max_size=60))
    for first, last in map(sorted, pairwise(ends)):
        keys = keys_of(first, min(last, first + capacity))
        policy.touch(keys, range(len(keys)))
        present = {key for key in keys if key in policy}
        new = [key for key in keys if key not in present]
        num_evict = max(0, len(policy) + len(new) - capacity)
        evicted = policy.admit(new, range(len(new)), num_evict, Protected(present))
        assert evicted is not None
        assert len(evicted) == num_evict
        assert all(key in policy for key in keys)
        assert not any(key in policy for key in evicted)
        policy.check()


@pytest.mark.req("POL-04")
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=60))
def test_lru_evicts_the_oldest_and_uses_prefixes_in_reverse(calls: list[tuple[int, int]]) -> None:
    policy = LRU(12)
    expected: list[bytes] = []  # oldest first
    for first, length in calls:
        keys = keys_of(first, first + length)
        policy.touch(keys, range(length))
        for key in reversed(keys):
            if key in expected:
                expected.remove(key)
                expected.append(key)
        new = [key for key in keys if key not in expected]
        num_evict = max(0, len(expected) + len(new) - 12)
        evicted = policy.admit(new, range(len(new)), num_evict, NOTHING)
        assert evicted == expected[:num_evict]
        expected = expected[num_evict:] + new[::-1]
        assert list(policy) == expected
        policy.check()


def test_protected_keys_are_filtered_in_order() -> None:
    loads, stores = {b"b": 1}, {b"d"}
    protected = Protected(loads, stores)
    assert list(protected.evictable([b"a", b"b", b"c", b"d", b"e"])) == [b"a", b"c", b"e"]
    assert b"b" in protected
    assert b"d" in protected
    assert b"a" not in protected
    loads.clear()  # it looks into the collections themselves
    assert list(protected.evictable([b"b", b"d"])) == [b"b"]
    assert protected.at_most() == 1
