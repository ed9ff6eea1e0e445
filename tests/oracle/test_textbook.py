"""The textbook scheduler on random workloads, and what it rejects."""

import pytest

from longshore.protocol.errors import ConfigError
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from tests.oracle.driver import Event, Surroundings, drive, first_difference
from tests.oracle.plan import Answer
from tests.oracle.script import Add
from tests.oracle.textbook import TextbookScheduler
from tests.oracle.workloads import ALL_FEATURES, Workload

NUM_WORKLOADS = 150


def run(workload: Workload) -> list[Event]:
    surroundings = Surroundings.of(workload)
    scheduler = TextbookScheduler(
        workload.scheduler,
        workload.cache,
        num_blocks=workload.num_blocks,
        eos_token_ids=workload.eos_token_ids,
        connector=surroundings.connector,
        grammars=surroundings.grammars,
        num_ranks=workload.num_ranks,
        cross=workload.cross,
    )
    return drive(scheduler, workload, surroundings)


def make_scheduler() -> TextbookScheduler:
    config = SchedulerConfig(max_model_len=16)
    return TextbookScheduler(config, CacheConfig(block_size=4), num_blocks=5)


def test_random_workloads_end_with_the_right_tokens_and_all_blocks_free() -> None:
    plans = []
    for seed in range(NUM_WORKLOADS):
        plans += [event.plan for event in run(Workload.random(seed, ())) if event.plan]
    # The driver checks each run; here, that the runs are worth checking.
    assert sum(len(plan.preempted) for plan in plans) > 200
    assert sum(entry.resumed for plan in plans for entry in plan.admitted) > 200
    assert sum(entry.num_cached_tokens > 0 for plan in plans for entry in plan.admitted) > 500
    assert sum(not plan.scheduled for plan in plans) > 100


@pytest.mark.parametrize("feature", ALL_FEATURES)
def test_workloads_with_one_feature_end_well_too(feature: str, long_run: bool) -> None:
    for seed in range(200 if long_run else 20):
        run(Workload.random(seed, (feature,)))


@pytest.mark.slow
def test_workloads_with_many_features_end_well_and_use_them() -> None:
    events = [event for seed in range(400) for event in run(Workload.random(seed, ALL_FEATURES))]
    plans = [event.plan for event in events if event.plan]
    finishes = [finish for event in events for finish in event.outputs.finishes]
    hooks = [hook[0] for event in events for hook in event.hooks]
    scheduled = [entry for plan in plans for entry in plan.scheduled]
    assert sum(len(entry.drafts) > 0 for entry in scheduled) > 100
    assert sum(len(plan.encoder_inputs) for plan in plans) > 100
    assert sum(len(plan.freed_hashes) for plan in plans) > 30
    assert sum(len(plan.encoder_tables) for plan in plans) > 100
    assert sum(len(plan.rewound) for plan in plans) > 3
    assert sum(plan.has_structured_output for plan in plans) > 100
    assert sum(len(finish.pooled) > 0 for finish in finishes) > 20
    assert sum(finish.session_continues for finish in finishes) > 10
    assert hooks.count("load") > 100
    assert hooks.count("abandoned") > 3


def test_grammars_reject_drafts() -> None:
    events = [
        event for seed in range(80) for event in run(Workload.random(seed, ("drafts", "grammar")))
    ]
    assert sum(event.plan.num_invalid_drafts for event in events if event.plan) > 5


def test_a_workload_leaves_the_same_trace_every_time() -> None:
    workload = Workload.random(5, ALL_FEATURES)
    assert workload.operations
    trace = run(workload)
    assert first_difference(trace, run(Workload.random(5, ALL_FEATURES))) is None
    assert first_difference(trace, run(Workload.random(6, ALL_FEATURES))) is not None
    assert first_difference(trace, trace[:-1]) is not None


def test_an_answer_to_another_step_or_other_requests_changes_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(Add("one", range(3)).message(0), now=0.0)
    with pytest.raises(ValueError, match="step 1 is not the oldest"):
        scheduler.update_from_output(Answer(1, {}))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    with pytest.raises(ValueError, match="the answer is for"):
        scheduler.update_from_output(Answer(1, {"two": (5,)}))
    scheduler.update_from_output(Answer(1, {"one": (5,)}))
    assert [delivery.token for delivery in scheduler.take_outputs().deliveries] == [5]


def test_a_pool_that_cannot_hold_the_longest_request_is_rejected() -> None:
    with pytest.raises(ConfigError, match="raise num_blocks"):
        TextbookScheduler(
            SchedulerConfig(max_model_len=17), CacheConfig(block_size=4), num_blocks=5
        )
