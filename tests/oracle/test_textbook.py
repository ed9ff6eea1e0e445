"""The textbook scheduler on random workloads, and what it refuses."""

import pytest

from longshore.protocol.errors import ConfigError
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from tests.oracle.script import Add
from tests.oracle.textbook import TextbookScheduler
from tests.oracle.workloads import Event, Workload, drive, first_difference

NUM_WORKLOADS = 150


def run(workload: Workload) -> list[Event]:
    scheduler = TextbookScheduler(
        workload.scheduler,
        workload.cache,
        num_blocks=workload.num_blocks,
        eos_token_ids=workload.eos_token_ids,
    )
    return drive(scheduler, workload)


def make_scheduler() -> TextbookScheduler:
    config = SchedulerConfig(max_model_len=16)
    return TextbookScheduler(config, CacheConfig(block_size=4), num_blocks=5)


def test_random_workloads_end_with_the_right_tokens_and_all_blocks_free() -> None:
    plans = []
    for seed in range(NUM_WORKLOADS):
        plans += [event.plan for event in run(Workload.random(seed)) if event.plan]
    # The driver checks each run; here, that the runs are worth checking.
    assert sum(len(plan.preempted) for plan in plans) > 300
    assert sum(entry.resumed for plan in plans for entry in plan.admitted) > 300
    assert sum(entry.num_cached_tokens > 0 for plan in plans for entry in plan.admitted) > 1000
    assert sum(not plan.scheduled for plan in plans) > 100


def test_a_workload_leaves_the_same_trace_every_time() -> None:
    workload = Workload.random(5)
    assert workload.operations
    trace = run(workload)
    assert first_difference(trace, run(Workload.random(5))) is None
    assert first_difference(trace, run(Workload.random(6))) is not None
    assert first_difference(trace, trace[:-1]) is not None


def test_an_answer_to_another_step_or_other_requests_changes_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(Add("one", range(3)).message(0), now=0.0)
    with pytest.raises(ValueError, match="step 1 is not the oldest"):
        scheduler.update_from_output(1, {})
    plan = scheduler.schedule(0.0)
    assert plan is not None
    with pytest.raises(ValueError, match="the answer is for"):
        scheduler.update_from_output(1, {"two": 5})
    scheduler.update_from_output(1, [5])
    assert [delivery.token for delivery in scheduler.take_outputs().deliveries] == [5]


def test_a_pool_that_cannot_hold_the_longest_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise num_blocks"):
        TextbookScheduler(
            SchedulerConfig(max_model_len=17), CacheConfig(block_size=4), num_blocks=5
        )
