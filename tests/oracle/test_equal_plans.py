"""The scheduler makes the plans that the textbook makes, on random workloads."""

import pytest

from tests.oracle.fast_adapter import FastAdapter
from tests.oracle.textbook import TextbookScheduler
from tests.oracle.workloads import Workload, drive, first_difference

NUM_WORKLOADS = 600
NUM_SHARDS = 12


def compare(seed: int) -> None:
    workload = Workload.random(seed)
    textbook = TextbookScheduler(
        workload.scheduler,
        workload.cache,
        num_blocks=workload.num_blocks,
        eos_token_ids=workload.eos_token_ids,
    )
    fast = FastAdapter(
        workload.scheduler,
        workload.cache,
        num_blocks=workload.num_blocks,
        eos_token_ids=workload.eos_token_ids,
        vocab_size=workload.vocab_size,
        verify_plan=seed % 2 == 0,
    )
    difference = first_difference(drive(textbook, workload), drive(fast, workload))
    assert difference is None, f"workload {seed}: {difference}"


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_plans_equal_the_textbook_on_random_workloads(shard: int) -> None:
    for seed in range(shard, NUM_WORKLOADS, NUM_SHARDS):
        compare(seed)


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_plans_equal_the_textbook_on_many_more_workloads(shard: int) -> None:
    for seed in range(NUM_WORKLOADS + shard, 10 * NUM_WORKLOADS, NUM_SHARDS):
        compare(seed)
