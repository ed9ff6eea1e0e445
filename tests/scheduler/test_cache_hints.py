"""Prefixes that clients ask to keep are evicted last, within limits."""

import numpy as np
import pytest

from longshore.protocol.arrays import Int32Array
from longshore.protocol.requests import NO_TENANT, CacheHint, Tenant
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.blocks import FEW_BLOCKS
from longshore.scheduler.kv_cache.free_queue import OutOfBlocks
from longshore.scheduler.kv_cache.retention import RetainedPrefixes
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
    (retained,) = driver.scheduler.kv_cache.pool.retained.is_retained(
        np.arange(2 * num_blocks)
    ).nonzero()
    assert len(retained) == num_blocks // 2


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
        retained.add(np.arange(first, first + 4, dtype=np.int32), HINT, tenant="a", now=0.0)
    assert retained.is_retained(ids(1, 11, 21)).tolist() == [False, True, True]
    retained.add(np.arange(1, 40, dtype=np.int32), HINT, tenant="b", now=0.0)
    assert retained.is_retained(ids(10, 30)).tolist() == [True, False]  # the first quarter


def test_blocks_that_a_later_prefix_shares_are_retained_as_long_as_it() -> None:
    retained = RetainedPrefixes(100)
    retained.add(ids(1, 2, 3), CacheHint(10.0), tenant="", now=0.0)
    retained.add(ids(1, 2, 4), CacheHint(20.0), tenant="", now=0.0)
    retained.expire(15.0)
    assert retained.is_retained(ids(1, 2, 3, 4)).tolist() == [True, True, False, True]
    retained.expire(20.0)
    assert len(retained) == 0
    assert not retained.is_retained(ids(1, 2, 3, 4)).any()


def test_retained_blocks_are_allocated_last_and_evicted_ones_are_not_retained() -> None:
    pool = BlockPool(41)
    taken = np.asarray(pool.get_new_blocks(40), np.int32)
    pool.cache_blocks(taken.tolist(), [b"%d" % block_id for block_id in taken])
    pool.retain(taken[:5], HINT, tenant="", now=0.0)
    pool.free_blocks(taken)
    assert not set(taken[:5].tolist()) & set(np.asarray(pool.get_new_blocks(20)).tolist())
    assert pool.free_block_ids()[-5:] == taken[:5].tolist()
    rest = np.asarray(pool.get_new_blocks(17)).tolist()
    assert rest[-2:] == taken[:2].tolist()
    assert pool.retained.is_retained(taken[:5]).tolist() == [False, False, True, True, True]
    with pytest.raises(OutOfBlocks):
        pool.get_new_blocks(4)


def test_loads_take_retained_blocks_last() -> None:
    pool = BlockPool(9)
    taken = np.asarray(pool.get_new_blocks(8), np.int32)
    pool.cache_blocks(taken.tolist(), [b"%d" % block_id for block_id in taken])
    pool.retain(taken[:2], HINT, tenant="", now=0.0)
    pool.free_blocks(taken)
    nothing = ids()
    first = pool.get_settled_blocks(6, 0, nothing)
    assert first is not None
    assert sorted(first.tolist()) == sorted(taken[2:].tolist())
    assert pool.get_settled_blocks(2, 0, nothing) is not None
