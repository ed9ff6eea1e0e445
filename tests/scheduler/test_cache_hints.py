"""Prefixes that clients ask to keep are evicted last, within limits."""

import math
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from longshore.connectors.base.retention import RetainedPrefixes
from longshore.protocol.arrays import Int32Array
from longshore.protocol.requests import NO_TENANT, CacheHint, CachePrefix, Tenant
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.blocks import FEW_BLOCKS
from longshore.scheduler.kv_cache.free_queue import OutOfBlocks
from tests.harness.driver import Driver
from tests.harness.tokens import prompt_of

HINT = CacheHint(ttl_s=1000.0)


def ids(*block_ids: int) -> Int32Array:
    return np.array(block_ids, np.int32)


def answer(
    driver: Driver, salt: str, hint: CacheHint | None = None, tenant: Tenant = NO_TENANT
) -> int:
    """Run a request of four blocks; returns how many tokens of its prompt were cached."""
    fields = {"cache_hint": hint, "tenant": tenant, "cache_salt": salt}
    key = driver.add(f"{salt}-{driver.now}", prompt_of(16), max_tokens=1, **fields)
    driver.run()
    return driver.finished[key].num_cached_tokens


def crowd_out(driver: Driver) -> None:
    """Run requests that need all blocks."""
    for index in range(8):
        name = f"other-{driver.now}-{index}"
        driver.add(name, prompt_of(40), max_tokens=1, cache_salt=name)
        driver.run()


def test_a_prefix_with_a_hint_outlives_those_without() -> None:
    driver = Driver(num_blocks=41)
    answer(driver, "hinted", HINT)
    answer(driver, "plain")
    crowd_out(driver)
    assert answer(driver, "plain") == 0
    assert answer(driver, "hinted") == 12


def test_a_prefix_of_many_blocks_is_retained_up_to_the_limit() -> None:
    num_blocks = 4 * FEW_BLOCKS
    driver = Driver(num_blocks=2 * num_blocks, max_model_len=4 * num_blocks)
    driver.add("long", prompt_of(4 * num_blocks - 4), max_tokens=1, cache_hint=HINT)
    driver.run()
    priorities = driver.scheduler.kv_cache.pool.retained.priorities(np.arange(2 * num_blocks))
    assert np.count_nonzero(priorities) == num_blocks // 2


def test_pressure_wins_over_a_hint() -> None:
    driver = Driver(num_blocks=17)
    answer(driver, "hinted", HINT)
    driver.add("all", prompt_of(60), max_tokens=1, cache_salt="all")  # 15 of 16 blocks
    driver.run()
    assert answer(driver, "hinted") < 12


def test_a_hint_ends_with_its_time_to_live() -> None:
    driver = Driver(num_blocks=41)
    answer(driver, "hinted", CacheHint(ttl_s=5.0))
    driver.now += 6.0
    crowd_out(driver)
    assert answer(driver, "hinted") == 0


def test_the_next_request_of_a_session_replaces_the_hint() -> None:
    driver = Driver(num_blocks=81)
    one = CacheHint(ttl_s=1000.0, session="s")
    answer(driver, "first", one)
    answer(driver, "other session", CacheHint(ttl_s=1000.0, session="t"))
    answer(driver, "other tenant", one, tenant=Tenant("bob"))
    answer(driver, "second", one)
    for _ in range(2):
        crowd_out(driver)
    names = ("first", "other session", "other tenant", "second")
    cached = [answer(driver, name) for name in names]
    assert cached == [0, 12, 12, 12]


def test_a_tenant_retains_a_share_and_its_oldest_prefix_goes_first() -> None:
    retained = RetainedPrefixes(40)
    for first in (1, 11, 21):
        retained.add(np.arange(first, first + 4, dtype=np.int32), HINT, tenant=Tenant("a"), now=0.0)
    assert (retained.priorities(ids(1, 11, 21)) > 0).tolist() == [False, True, True]
    retained.add(np.arange(1, 40, dtype=np.int32), HINT, tenant=Tenant("b"), now=0.0)
    assert (retained.priorities(ids(10, 30)) > 0).tolist() == [True, False]  # the first quarter


def test_blocks_that_a_later_prefix_shares_are_retained_as_long_as_it() -> None:
    retained = RetainedPrefixes(100)
    retained.add(ids(1, 2, 3), CacheHint(10.0), tenant=NO_TENANT, now=0.0)
    retained.add(ids(1, 2, 4), CacheHint(20.0), tenant=NO_TENANT, now=0.0)
    retained.expire(15.0)
    assert (retained.priorities(ids(1, 2, 3, 4)) > 0).tolist() == [True, True, False, True]
    retained.expire(20.0)
    assert not retained.prefixes
    assert not retained.priorities(ids(1, 2, 3, 4)).any()


def test_a_later_hint_does_not_shorten_the_time_of_an_earlier_one() -> None:
    retained = RetainedPrefixes(100)
    retained.add(ids(1, 2, 3), CacheHint(20.0), tenant=NO_TENANT, now=0.0)
    retained.add(ids(1, 2, 4), CacheHint(10.0), tenant=NO_TENANT, now=0.0)
    assert retained.expire(15.0).tolist() == [4]
    assert retained.priorities(ids(1, 2, 3)).all()


def test_evicted_blocks_do_not_count_against_the_bound_of_their_tenant() -> None:
    retained = RetainedPrefixes(40)
    retained.add(np.arange(1, 9, dtype=np.int32), HINT, tenant=Tenant("a"), now=0.0)
    retained.evicted([8, 7, 6])
    retained.add(ids(11, 12, 13, 14, 15), HINT, tenant=Tenant("a"), now=0.0)
    assert retained.priorities(ids(1, 5, 11, 15)).all()
    retained.evicted([1, 2, 3, 4, 5])
    assert len(retained.prefixes) == 1


class Hinted:
    """A hint of the reference, for the first blocks of a request."""

    def __init__(
        self, tenant: str, session: str | None, priority: int, expires_at: float, blocks: list[int]
    ) -> None:
        self.tenant, self.session = tenant, session
        self.priority, self.expires_at = priority, expires_at
        self.asked, self.blocks = blocks, set[int]()

    @property
    def rank(self) -> tuple[int, float]:
        return self.priority, self.expires_at


PRIORITIES = st.integers(1, 3)
TTLS_S = st.sampled_from([1.0, 2.0, 5.0])


class RetainedPrefixesMachine(RuleBasedStateMachine):
    """Beside it, a list of hints with sets of blocks, oldest first, searched for every block."""

    NUM_BLOCKS = 24

    def __init__(self) -> None:
        super().__init__()
        self.retained = RetainedPrefixes(self.NUM_BLOCKS)
        self.hints: list[Hinted] = []
        self.now = 0.0

    def blocks(self) -> set[int]:
        return {block_id for hint in self.hints for block_id in hint.blocks}

    @rule(
        block_ids=st.lists(st.integers(1, NUM_BLOCKS - 1), unique=True, max_size=8),
        ttl_s=TTLS_S,
        session=st.sampled_from([None, "s", "t"]),
        priority=PRIORITIES,
        prefixes=st.lists(
            st.builds(CachePrefix, st.integers(1, 8), TTLS_S, PRIORITIES),
            max_size=2,
            unique_by=lambda prefix: prefix.num_tokens,
        ),
        tenant=st.sampled_from([Tenant(), Tenant("a"), Tenant("b", cache_share=0.1)]),
    )
    def add(
        self,
        block_ids: list[int],
        ttl_s: float,
        session: str | None,
        priority: int,
        prefixes: list[CachePrefix],
        tenant: Tenant,
    ) -> None:
        before, name = self.blocks(), tenant.name
        same = [h for h in self.hints if session and (h.tenant, h.session) == (name, session)]
        self.hints = [hint for hint in self.hints if hint not in same]
        limit = int(self.NUM_BLOCKS * tenant.cache_share)
        asked = [*prefixes, CachePrefix(99, ttl_s, priority)]
        for part in sorted(asked, key=lambda each: -each.num_tokens):
            longer = [each for each in asked if each.num_tokens >= part.num_tokens]
            highest = max(each.priority for each in longer)
            expires_at = self.now + max(each.ttl_s for each in longer)
            new = Hinted(name, session, highest, expires_at, block_ids[: part.num_tokens])
            for block_id in new.asked[:limit]:
                others = [hint for hint in self.hints if block_id in hint.blocks]
                if not any(other.rank > new.rank for other in others):
                    for other in others:
                        other.blocks.remove(block_id)
                    new.blocks.add(block_id)
            self.hints.append(new)
        self.hints = [hint for hint in self.hints if hint.blocks]
        mine = [hint for hint in self.hints if hint.tenant == name]
        mine.sort(key=lambda hint: hint.priority)
        while sum(len(hint.blocks) for hint in mine) > limit:
            self.hints.remove(mine.pop(0))
        hint = CacheHint(ttl_s, session, priority, tuple(prefixes))
        leading = [ids(*block_ids[: prefix.num_tokens]) for prefix in prefixes]
        ended = self.retained.add(ids(*block_ids), hint, leading, tenant=tenant, now=self.now)
        assert before - self.blocks() <= set(ended.tolist()) <= before | set(block_ids)
        assert self.blocks().isdisjoint(ended.tolist())

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def expire(self, seconds: float) -> None:
        before = self.blocks()
        self.now += seconds
        self.hints = [hint for hint in self.hints if hint.expires_at > self.now]
        ended = self.retained.expire(self.now)
        assert sorted(ended.tolist()) == sorted(before - self.blocks())

    @rule(block_ids=st.lists(st.integers(1, NUM_BLOCKS - 1), unique=True, max_size=6))
    def evict(self, block_ids: list[int]) -> None:
        self.retained.evicted(block_ids)
        for hint in self.hints:
            hint.blocks -= set(block_ids)
        self.hints = [hint for hint in self.hints if hint.blocks]

    @rule()
    def clear(self) -> None:
        assert set(self.retained.clear().tolist()) == self.blocks()
        self.hints = []

    @invariant()
    def they_retain_the_same_blocks(self) -> None:
        everything = np.arange(self.NUM_BLOCKS, dtype=np.int32)
        priorities = {b: hint.priority for hint in self.hints for b in hint.blocks}
        found = self.retained.priorities(everything).tolist()
        assert found == [priorities.get(block_id, 0) for block_id in range(self.NUM_BLOCKS)]
        assert len(self.retained.prefixes) == len(self.hints)
        next_expiry_s = min((hint.expires_at for hint in self.hints), default=math.inf)
        assert self.retained.next_expiry_s <= next_expiry_s


def test_retained_prefixes_behave_like_a_list_of_hints() -> None:
    run_state_machine_as_test(
        RetainedPrefixesMachine,
        settings=settings(
            max_examples=100, stateful_step_count=30, deadline=None, derandomize=True
        ),
    )


def num_lines_of_an_event(num_prefixes: int) -> float:
    """Lines of Python that begin and end one more hint, on average, beside so many others."""
    retained = RetainedPrefixes(20_000)
    for index in range(num_prefixes):
        hint = CacheHint(50_000.0 + index, f"{index}")
        retained.add(ids(1 + 2 * index, 2 + 2 * index), hint, tenant=NO_TENANT, now=0.0)
    assert len(retained.prefixes) == num_prefixes
    num_lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    for turn in range(1000):
        index = turn % num_prefixes
        hint = CacheHint(1.0, "new") if turn % 2 else CacheHint(50_000.0, f"{index}")
        block_id = 10_000 if turn % 2 else 1 + 2 * index
        retained.add(ids(block_id, block_id + 1), hint, tenant=NO_TENANT, now=float(turn))
        retained.expire(float(turn))
        retained.evicted([block_id + 1])
    sys.settrace(before)
    return num_lines / 1000


def test_an_event_costs_the_same_however_many_prefixes_are_retained() -> None:
    assert num_lines_of_an_event(2000) < 2 * num_lines_of_an_event(20)


def test_retained_blocks_are_allocated_last_and_evicted_ones_are_not_retained() -> None:
    pool = BlockPool(41)
    taken = np.asarray(pool.get_new_blocks(40), np.int32)
    pool.cache_blocks(taken.tolist(), [b"%d" % block_id for block_id in taken])
    pool.retain(taken[:5], HINT, tenant=NO_TENANT, now=0.0)
    pool.free_blocks(taken)
    assert not set(taken[:5].tolist()) & set(np.asarray(pool.get_new_blocks(20)).tolist())
    assert pool.free_block_ids()[-5:] == taken[:5].tolist()
    rest = np.asarray(pool.get_new_blocks(17)).tolist()
    assert rest[-2:] == taken[:2].tolist()
    assert (pool.retained.priorities(taken[:5]) > 0).tolist() == [False, False, True, True, True]
    with pytest.raises(OutOfBlocks):
        pool.get_new_blocks(4)


def test_loads_take_retained_blocks_last() -> None:
    pool = BlockPool(9)
    taken = np.asarray(pool.get_new_blocks(8), np.int32)
    pool.cache_blocks(taken.tolist(), [b"%d" % block_id for block_id in taken])
    pool.retain(taken[:2], HINT, tenant=NO_TENANT, now=0.0)
    pool.free_blocks(taken)
    nothing = ids()
    first = pool.get_settled_blocks(6, 0, nothing)
    assert first is not None
    assert sorted(first.tolist()) == sorted(taken[2:].tolist())
    assert pool.get_settled_blocks(2, 0, nothing) is not None


def test_retained_blocks_are_evicted_in_the_order_in_which_they_were_freed() -> None:
    pool = BlockPool(41)
    taken = np.asarray(pool.get_new_blocks(40), np.int32)
    pool.cache_blocks(taken.tolist(), [b"%d" % block_id for block_id in taken])
    for session, prefix in (("s", taken[:3]), ("t", taken[3:6])):
        pool.retain(prefix, CacheHint(1000.0, session), tenant=NO_TENANT, now=0.0)
    pool.free_blocks(taken[2::-1])  # tails first, between others
    pool.free_blocks(taken[6:])
    pool.free_blocks(taken[5:2:-1])
    assert pool.free_block_ids() == [*range(7, 41), 3, 2, 1, 6, 5, 4]
    for _ in range(20):
        pool.free_blocks(pool.get_new_blocks(1))
    assert pool.free_block_ids()[-6:] == [3, 2, 1, 6, 5, 4]
    held = pool.get_new_blocks(1)
    pool.cache_blocks(held, [b"new"])
    pool.retain(np.array(held, np.int32), CacheHint(5.0, "s"), tenant=NO_TENANT, now=0.0)
    pool.free_blocks(held)
    assert pool.free_block_ids()[-7:] == [3, 2, 1, 6, 5, 4, held[0]]
    pool.expire_retained(5.0)
    assert pool.free_block_ids()[-4:] == [held[0], 6, 5, 4]


def test_lower_priorities_are_evicted_first() -> None:
    pool = BlockPool(41)
    taken = np.asarray(pool.get_new_blocks(40), np.int32)
    pool.cache_blocks(taken.tolist(), [b"%d" % block_id for block_id in taken])
    for priority, first in ((3, 0), (1, 3), (2, 6)):
        hint = CacheHint(10.0 + priority, priority=priority)
        pool.retain(taken[first : first + 3], hint, tenant=NO_TENANT, now=0.0)
    pool.free_blocks(taken)
    assert pool.free_block_ids()[-9:] == [4, 5, 6, 7, 8, 9, 1, 2, 3]
    pool.expire_retained(12.0)
    assert pool.free_block_ids()[-9:] == [4, 5, 6, 7, 8, 9, 1, 2, 3]
    pool.free_blocks(pool.get_new_blocks(1))
    assert list(pool.get_new_blocks(37))[-3:] == [7, 8, 9]
    assert list(pool.get_new_blocks(2)) == [1, 2]


def test_a_prefix_is_kept_in_place_of_the_whole_request() -> None:
    driver = Driver(num_blocks=41)
    prefixes = (CachePrefix(7, 1000.0),)  # half of the second block
    answer(driver, "hinted", CacheHint(0.0, prefixes=prefixes))
    crowd_out(driver)
    assert answer(driver, "hinted") == 8


def test_a_prefix_lasts_as_long_as_the_longest_one_that_needs_it() -> None:
    retained = RetainedPrefixes(100)
    hint = CacheHint(20.0, priority=2, prefixes=(CachePrefix(1, 5.0), CachePrefix(2, 30.0, 3)))
    retained.add(ids(1, 2, 3), hint, [ids(1), ids(1, 2)], tenant=NO_TENANT, now=0.0)
    assert retained.priorities(ids(1, 2, 3)).tolist() == [3, 3, 2]
    retained.expire(20.0)
    assert retained.priorities(ids(1, 2, 3)).tolist() == [3, 3, 0]


def test_a_tenant_has_the_share_of_its_key() -> None:
    retained = RetainedPrefixes(40)
    everything = np.arange(1, 40, dtype=np.int32)
    retained.add(everything, HINT, tenant=Tenant("a", cache_share=0.1), now=0.0)
    assert np.count_nonzero(retained.priorities(everything)) == 4
    retained.add(everything, HINT, tenant=Tenant("none", cache_share=0.0), now=0.0)
    assert np.count_nonzero(retained.priorities(everything)) == 4


def test_a_reset_of_the_prefix_cache_ends_all_hints() -> None:
    pool = BlockPool(9)
    taken = np.asarray(pool.get_new_blocks(8), np.int32)
    pool.cache_blocks(taken.tolist(), [b"%d" % block_id for block_id in taken])
    pool.retain(taken[:2], HINT, tenant=NO_TENANT, now=0.0)
    pool.free_blocks(taken[::-1])
    assert pool.reset_prefix_cache()
    held = pool.get_new_blocks(4)
    pool.cache_blocks(held, [b"a", b"b", b"c", b"d"])
    pool.free_blocks(held)
    pool.check(np.zeros(9, np.int64))
