"""Lives of blocks, seen by a clock that the test turns."""

import numpy as np
import pytest

from longshore.protocol.arrays import Int32Array
from longshore.scheduler.features.metrics import BlockLife, SampledBlockMetrics
from longshore.scheduler.kv_cache.block_pool import BlockPool
from tests.harness.driver import Driver
from tests.harness.tokens import prompt_of


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ids(*block_ids: int) -> Int32Array:
    return np.array(block_ids, np.int32)


@pytest.mark.req("MET-03")
def test_a_life_goes_from_allocation_over_accesses_to_eviction() -> None:
    clock = ManualClock()
    metrics = SampledBlockMetrics(clock, sample_every=1)
    pool = BlockPool(3, metrics=metrics)
    pool.get_new_blocks(1)
    pool.cache_blocks([1], [b"one"])
    for now in (101.0, 104.0):
        clock.now = now
        pool.touch([1])
    pool.free_blocks([1, 1, 1])
    clock.now = 106.5
    pool.get_new_blocks(2)
    assert metrics.take_lives() == [BlockLife(6.5, 2.5, (1.0, 3.0))]
    assert metrics.take_lives() == []
    assert (metrics.num_allocated, metrics.num_accessed, metrics.num_evicted) == (3, 2, 1)


@pytest.mark.req("MET-03")
def test_a_block_that_was_never_accessed_was_idle_all_its_life() -> None:
    clock = ManualClock()
    metrics = SampledBlockMetrics(clock, sample_every=1)
    metrics.allocated(ids(1))
    clock.now += 2.0
    metrics.evicted(ids(1))
    assert metrics.take_lives() == [BlockLife(2.0, 2.0, ())]


def test_only_the_sample_is_followed_and_everything_is_counted() -> None:
    metrics = SampledBlockMetrics(ManualClock(), sample_every=4)
    everything = np.arange(1, 17, dtype=np.int32)
    metrics.allocated(everything)
    metrics.accessed(everything)
    metrics.evicted(everything)
    assert len(metrics.take_lives()) == 4
    assert (metrics.num_allocated, metrics.num_accessed, metrics.num_evicted) == (16, 16, 16)


def test_blocks_that_are_older_than_the_watching_have_no_life() -> None:
    metrics = SampledBlockMetrics(ManualClock(), sample_every=1)
    metrics.accessed(ids(3))
    metrics.evicted(ids(3))
    assert metrics.take_lives() == []


def test_lives_that_are_not_taken_do_not_pile_up() -> None:
    metrics = SampledBlockMetrics(ManualClock(), sample_every=1, max_lives=2)
    for block_id in (1, 2, 3):
        metrics.allocated(ids(block_id))
        metrics.evicted(ids(block_id))
    assert len(metrics.take_lives()) == 2


@pytest.mark.req("MET-03")
def test_a_scheduler_reports_the_lifetimes_of_its_blocks() -> None:
    clock = ManualClock()
    metrics = SampledBlockMetrics(clock, sample_every=1)
    driver = Driver(num_blocks=10, max_model_len=36, scheduler={"block_metrics": metrics})
    driver.add("first", prompt_of(9), max_tokens=2)
    driver.run()
    clock.now += 1.0
    driver.add("same", prompt_of(9), max_tokens=2)  # finds two blocks
    driver.run()
    assert (metrics.num_allocated, metrics.num_accessed, metrics.num_evicted) == (4, 2, 0)
    clock.now += 2.0
    driver.add("other", prompt_of(34, 40), max_tokens=2)  # takes all blocks, cached or not
    driver.run()
    assert metrics.num_evicted == 2
    assert BlockLife(3.0, 2.0, (1.0,)) in metrics.take_lives()
