"""Two steps in flight: generations, late tokens, hashes, and rows without an order."""

from typing import Any

import pytest

from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.protocol.outputs import FinishReason, ModelRunnerOutput
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.request import RequestStatus
from longshore.scheduler.scheduler import Scheduler
from longshore.scheduler.step.output_validator import InvalidOutput
from tests.harness.driver import Driver
from tests.harness.kv_groups import kv_cache_config
from tests.harness.shared_drivers import in_admission_order, pressed
from tests.harness.tokens import EOS, expected_output, prompt_of

ASYNC = {"max_steps_in_flight": 2}


# Asynchronous steps


def test_two_plans_are_made_before_the_first_answer_and_no_third() -> None:
    driver = Driver(**ASYNC)
    driver.add("r", prompt_of(5))
    assert driver.plan() is not None
    assert driver.plan() is not None
    assert driver.plan() is None
    assert driver.scheduler.num_steps_in_flight == 2
    driver.answer()
    assert driver.plan() is not None


def test_a_steady_decode_keeps_two_steps_in_flight() -> None:
    driver = Driver(**ASYNC)
    driver.add("r", prompt_of(5), max_tokens=40)
    driver.steps(5)
    driver.scheduler.make_stats()
    driver.steps(20)
    assert driver.scheduler.make_stats().steps_in_flight == 2.0


@pytest.mark.req("SPD-06")
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_no_step_is_planned_beyond_the_last_token(max_tokens: int) -> None:
    driver = Driver(**ASYNC)
    key = driver.add("r", prompt_of(5), max_tokens=max_tokens)
    driver.plan()
    running, row, was_skipped = driver.scheduler.running, 0, False
    while driver.requests["r"].row == row:
        placeholders, computed = int(running.num_placeholders[row]), int(running.num_computed[row])
        must_skip = placeholders > 0 and computed + 2 - placeholders >= 5 + max_tokens
        assert (driver.plan() is None) == must_skip
        was_skipped |= must_skip
        driver.answer()
    assert was_skipped
    driver.run()
    assert driver.received[key] == expected_output("r", max_tokens)
    assert sum(plan.num_scheduled_tokens for plan in driver.plans) == 5 + max_tokens - 1


def test_tokens_are_the_same_with_one_and_with_two_steps_in_flight() -> None:
    results = []
    for in_flight in (1, 2):
        driver = pressed(max_steps_in_flight=in_flight)
        for index, length in enumerate((9, 14, 3, 11)):
            driver.add(f"r{index}", prompt_of(length, 20 * index), max_tokens=10)
        driver.run()
        results.append(dict(driver.received))
        assert driver.num_free_blocks == 8
    assert results[0] == results[1]


@pytest.mark.req("SPD-07")
def test_tokens_of_an_aborted_request_are_dropped_and_counted() -> None:
    driver = Driver(**ASYNC)
    key = driver.add("r", prompt_of(5))
    driver.plan()
    driver.plan()
    driver.abort(key)
    driver.answer()
    driver.answer()
    assert driver.received[key] == []
    assert driver.scheduler.make_stats().num_stale_tokens == 2
    driver.run()


def preempt_in_flight(**settings: Any) -> tuple[Driver, tuple[int, int]]:
    """A driver in which `young` was just preempted with one token unanswered."""
    driver = pressed(enable_prefix_caching=False, **(ASYNC | settings))
    driver.add("old", prompt_of(15, 0), max_tokens=10)
    young = driver.add("young", prompt_of(15, 40), max_tokens=settings.pop("young_tokens", 10))
    driver.plan()
    driver.plan()
    driver.answer()
    driver.plan()
    assert driver.requests["young"].status is RequestStatus.PREEMPTED
    assert driver.received[young] == expected_output("young", 1)
    return driver, young


@pytest.mark.req("SPD-07")
def test_a_token_sampled_before_the_preemption_is_delivered_and_not_sampled_again() -> None:
    driver, young = preempt_in_flight()
    driver.answer()
    assert driver.received[young] == expected_output("young", 2)
    request = driver.requests["young"]
    assert (request.num_tokens, request.row) == (17, -1)
    driver.run()
    assert driver.received[young] == expected_output("young", 10)
    resumed = next(start for plan in driver.plans for start in plan.added if start.resumed)
    assert resumed.output_token_ids.tolist() == expected_output("young", 2)


def test_a_preempted_request_is_not_admitted_before_its_last_token_has_come() -> None:
    driver = pressed(enable_prefix_caching=False)
    # Two steps in flight fill up before this can matter; the rule must not depend on that.
    object.__setattr__(driver.config, "max_steps_in_flight", 4)
    old = driver.add("old", prompt_of(15, 0), max_tokens=10)
    young = driver.add("young", prompt_of(15, 40), max_tokens=10)
    for _ in range(3):
        driver.plan()
    assert driver.requests["young"].status is RequestStatus.PREEMPTED
    driver.abort(old)  # all blocks are free; only two tokens are missing
    for num_received in (0, 1):
        plan = driver.plan()
        assert plan is None or plan.added == ()
        assert len(driver.received[young]) == num_received
        driver.answer()
    plan = driver.plan()
    assert plan is not None
    assert plan.added[0].output_token_ids.tolist() == expected_output("young", 2)
    driver.run()
    assert driver.received[young] == expected_output("young", 10)


def test_a_late_token_may_end_a_preempted_request() -> None:
    driver = pressed(
        enable_prefix_caching=False,
        sample=lambda name, position: EOS if (name, position) == ("young", 1) else 50,
        **ASYNC,
    )
    driver.add("old", prompt_of(15, 0), max_tokens=10)
    young = driver.add("young", prompt_of(15, 40), max_tokens=10)
    driver.plan()
    driver.plan()
    driver.answer()
    driver.plan()
    assert driver.requests["young"].status is RequestStatus.PREEMPTED
    driver.answer()
    assert driver.received[young] == [50, EOS]
    assert driver.reason(young) is FinishReason.STOPPED
    assert driver.scheduler.get_request_counts() == (1, 0)
    driver.run()


@pytest.mark.req("SPD-07")
def test_a_preempted_request_that_is_aborted_gets_no_late_token() -> None:
    driver, young = preempt_in_flight()
    driver.abort(young)
    driver.answer()
    assert driver.received[young] == expected_output("young", 1)
    assert driver.scheduler.make_stats().num_stale_tokens == 1
    driver.run()


# Ownership and order


def test_a_token_never_reaches_the_next_occupant_of_a_row() -> None:
    driver = Driver(max_num_seqs=1, **ASYNC)
    first = driver.add("first", prompt_of(5, 0))
    second = driver.add("second", prompt_of(5, 40), max_tokens=3)
    driver.plan()
    driver.abort(first)
    driver.plan()  # the second request takes row 0 while the answer for the first is out
    assert driver.plans[-1].finished_rows.tolist() == [0]
    assert [start.row for start in driver.plans[-1].added] == [0]
    assert [start.generation for start in driver.plans[-1].added] == [2]
    driver.answer()
    assert driver.received == {}
    driver.run()
    assert driver.received == {second: expected_output("second", 3)}
    assert driver.reason(first) is FinishReason.ABORTED


def test_an_answer_of_another_epoch_is_dropped_and_counted() -> None:
    driver = Driver()
    key = driver.add("r", prompt_of(5))
    driver.plan()
    driver.scheduler.update_from_output(
        ModelRunnerOutput(2, 1, sampled_tokens=int32_array([9])), driver.now
    )
    driver.collect()
    assert driver.received[key] == []
    assert driver.scheduler.make_stats().num_stale_tokens == 1
    driver.run()
    assert driver.received[key] == expected_output("r", 8)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ModelRunnerOutput(1, 2, int32_array([9])), "answered step 2, but step 1 was due"),
        (ModelRunnerOutput(1, 1), "1 rows sample 1 tokens, but the output has 0"),
        (
            ModelRunnerOutput(1, 1, int32_array([9, 9])),
            "1 rows sample 1 tokens, but the output has 2",
        ),
        (ModelRunnerOutput(1, 1, int32_array([100])), r"sampled token id is outside 0\.\.99"),
        (ModelRunnerOutput(1, 1, int32_array([-1])), r"sampled token id is outside 0\.\.99"),
        (ModelRunnerOutput(1, 1, int32_array([9]), nan_rows=int32_array([3])), "does not sample"),
        (ModelRunnerOutput(1, 1, int32_array([9]), nan_rows=int32_array([0])), "num_nans must be"),
        (ModelRunnerOutput(1, 1, int32_array([9]), num_nans=int32_array([1])), "num_nans must be"),
        (
            ModelRunnerOutput(
                1, 1, int32_array([9]), draft_rows=int32_array([0]), draft_tokens=int32_array([100])
            ),
            r"drafts must be token ids in 0\.\.99",
        ),
    ],
)
def test_an_answer_that_fits_no_plan_raises_and_changes_nothing(
    answer: ModelRunnerOutput, message: str
) -> None:
    driver = Driver()
    key = driver.add("r", prompt_of(5))
    driver.plan()
    with pytest.raises(InvalidOutput, match=message):
        driver.scheduler.update_from_output(answer, driver.now)
    driver.run()
    assert driver.received[key] == expected_output("r", 8)


def test_an_answer_to_nothing_raises() -> None:
    with pytest.raises(InvalidOutput, match="answered step 1, but none was due"):
        Driver().scheduler.update_from_output(ModelRunnerOutput(1, 1), 0.0)


@pytest.mark.req("KVM-09")
@pytest.mark.parametrize(
    ("steps_in_flight", "num_drafts"), [(2, 0), (1, 3), (2, 3)], ids=["tokens", "drafts", "both"]
)
def test_a_block_is_cached_only_when_its_tokens_are_verified_and_its_kv_is_planned(
    steps_in_flight: int, num_drafts: int
) -> None:
    driver = Driver(
        max_num_batched_tokens=6,
        max_steps_in_flight=steps_in_flight,
        num_speculative_tokens=num_drafts,
        draft=lambda name, position: [5] * num_drafts,  # no request ever samples it
    )
    driver.add("r", prompt_of(10), max_tokens=14)
    names, running = driver.requests["r"].block_hashes, driver.scheduler.running
    num_unverified = 0
    for _ in range(14):
        driver.plan()
        row = driver.requests["r"].row
        num_tokens, num_computed = int(running.num_tokens[row]), int(running.num_computed[row])
        num_unverified += num_computed // 4 > num_tokens // 4
        pool = driver.scheduler.kv_cache.pool
        cached = [pool.block_hash(block_id) is not None for block_id in driver.table("r")]
        count = sum(cached)
        assert cached[:count] == [True] * count
        assert 4 * count <= min(num_tokens, num_computed)
        assert 4 * (count + 1) > min(num_tokens, num_computed)
        if len(driver.unanswered) == steps_in_flight:
            driver.answer()
    assert len(names) == 5
    assert num_unverified > 0, "unverified tokens have completed a block"


@pytest.mark.req("ERR-13")
def test_blocks_of_a_prompt_that_later_chunks_compute_cannot_be_hit_yet() -> None:
    driver = Driver(max_num_batched_tokens=9, long_prefill_token_threshold=8)
    driver.add("chunked", prompt_of(24), max_tokens=1)
    driver.step()
    driver.add("same", prompt_of(24), max_tokens=1)
    driver.step()  # its second chunk is planned in the same step
    (start,) = driver.plans[-1].added
    assert (start.request_id, start.num_computed_tokens) == ("same", 16)
    driver.run()


def test_requests_of_one_step_share_what_the_step_itself_computes() -> None:
    driver = Driver()
    driver.add("a", prompt_of(12), max_tokens=1)
    driver.add("b", prompt_of(12), max_tokens=1)
    driver.step()
    assert [start.num_computed_tokens for start in driver.plans[0].added] == [0, 8]
    driver.run()


def test_blocks_of_a_request_preempted_in_the_step_that_fills_them_are_not_cached() -> None:
    driver = pressed("priority")
    in_admission_order(driver, [("victim", 6, 9), ("keeps", 10, 1), ("urgent", 11, 0)])
    while not driver.requests["victim"].num_preemptions:
        driver.step()
    driver.run()  # the driver compares all KV that a hit relies on
    assert len(driver.finished) == 3


def test_what_produced_numbers_that_are_not_finite_is_never_hit_again() -> None:
    driver = Driver()
    driver.add("bad", prompt_of(12))
    driver.plan()
    driver.answer(nan_rows=[0])
    driver.add("same", prompt_of(12))
    driver.step()
    assert driver.plans[-1].added[0].num_computed_tokens == 0
    driver.run()


@pytest.mark.parametrize("both_show_it", [False, True])
def test_a_request_that_found_bad_blocks_is_rewound_and_not_failed(both_show_it: bool) -> None:
    """Attention over what is not a number gives none: both rows may show it in one answer."""
    driver = Driver(**ASYNC)
    bad = driver.add("bad", prompt_of(12), max_tokens=6)
    finds = driver.add("finds", [*prompt_of(12), 90, 91], max_tokens=6)
    driver.plan()
    assert driver.plans[-1].added[1].num_computed_tokens == 12
    driver.plan()
    driver.answer(nan_rows=[0, 1] if both_show_it else [0])
    driver.plan()
    assert [rewind.row for rewind in driver.plans[-1].rewound] == [1]
    driver.answer(nan_rows=[1] if both_show_it else [])  # what is void may be anything
    driver.run()
    assert driver.reason(bad) is FinishReason.ERROR
    assert driver.reason(finds) is FinishReason.LENGTH_CAPPED
    assert driver.received[finds] == expected_output("finds", 6)


@pytest.mark.parametrize("fate", ["abort", "preempt"])
def test_non_finite_logits_uncache_blocks_although_their_request_has_ended(fate: str) -> None:
    driver = pressed(**ASYNC) if fate == "preempt" else Driver(**ASYNC)
    driver.add("old", prompt_of(15, 0), max_tokens=10)
    young = driver.add("young", prompt_of(15, 40), max_tokens=10)
    driver.plan()
    driver.plan()
    driver.answer()
    if fate == "abort":
        driver.abort(young)
    else:
        driver.plan()
        assert driver.requests["young"].status is RequestStatus.PREEMPTED
    driver.answer(nan_rows=[1])
    assert driver.reason(young) is (FinishReason.ABORTED if fate == "abort" else FinishReason.ERROR)
    key = driver.add("same", prompt_of(15, 40), max_tokens=2)
    driver.run()
    assert driver.finished[key].num_cached_tokens == 0


@pytest.mark.req("SCH-03")
def test_order_does_not_follow_row_numbers() -> None:
    driver = Driver(max_num_seqs=3, max_num_batched_tokens=8)
    keys = [driver.add(name, prompt_of(2, 20 * i), max_tokens=20) for i, name in enumerate("abc")]
    driver.step()
    driver.abort(keys[0])
    driver.add("late", prompt_of(20, 60), max_tokens=4)
    driver.step()
    assert driver.requests["late"].row == 0
    assert driver.running == ["b", "c", "late"]
    assert driver.scheduled == {"b": 1, "c": 1, "late": 6}  # cut by age, not by row
    driver.run()


def test_the_victim_is_the_youngest_wherever_its_row_is() -> None:
    driver = pressed(max_num_seqs=3, enable_prefix_caching=False)
    first = driver.add("a", prompt_of(2, 0), max_tokens=1)
    driver.add("b", prompt_of(11, 20), max_tokens=20)
    driver.add("c", prompt_of(10, 40), max_tokens=20)
    driver.step()
    assert first in driver.finished
    driver.add("late", prompt_of(7, 60), max_tokens=20)
    driver.step()
    assert driver.requests["late"].row == 0
    while not driver.scheduler.make_stats().num_preemptions:
        driver.step()
    assert driver.requests["late"].num_preemptions == 1
    driver.run()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_requests_of_the_greatest_length_always_finish_in_the_smallest_pool(
    policy: str, steps_in_flight: int
) -> None:
    driver = pressed(policy, max_steps_in_flight=steps_in_flight, max_num_batched_tokens=8)
    for index in range(4):
        driver.add(f"r{index}", prompt_of(20, 20 * index), max_tokens=None, priority=-index % 3)
    driver.run()
    assert [len(driver.received[0, index]) for index in range(4)] == [12] * 4
    assert driver.num_free_blocks == 8


def test_a_model_length_that_the_empty_pool_cannot_hold_is_rejected_at_start() -> None:
    def start(num_blocks: int, num_groups: int = 1) -> Scheduler:
        kv_cache: KVCacheConfig = kv_cache_config(num_blocks, 4, num_groups)
        return Scheduler(
            SchedulerConfig(max_model_len=30),
            CacheConfig(block_size=4, enable_prefix_caching=False),
            kv_cache=kv_cache,
            hash_seed=b"",
            vocab_size=10,
        )

    start(9)
    with pytest.raises(ConfigError, match=r"num_blocks=8 .*max_model_len=30 tokens needs 9"):
        start(8)
    start(17, num_groups=2)
    with pytest.raises(ConfigError, match="needs 17"):
        start(16, num_groups=2)


def test_a_stop_string_ends_the_request_as_stopped_and_cuts_its_usage() -> None:
    driver = Driver(**ASYNC)
    key = driver.add("r", prompt_of(5), max_tokens=20)
    driver.steps(7)
    delivered = len(driver.received[key])
    assert delivered > 3
    driver.stop_found(key, 3)
    end = driver.finished[key]
    assert (end.reason, end.num_output_tokens) == (FinishReason.STOPPED, 3)
    while driver.unanswered:
        driver.answer()
    assert len(driver.received[key]) == delivered  # what was in flight is dropped
    driver.run()
    assert driver.plans[-1].finished_rows.tolist() == [0]
    driver.stop_found(key, 3)  # has ended already: ignored
    assert driver.num_free_blocks == 39


def test_a_stop_string_may_end_a_request_that_waits_after_preemption() -> None:
    driver, young = preempt_in_flight()
    driver.stop_found(young, 1)
    assert (driver.reason(young), driver.finished[young].num_output_tokens) == (
        FinishReason.STOPPED,
        1,
    )
    driver.run()


def test_an_engine_with_rows_to_drop_keeps_stepping_until_the_workers_know() -> None:
    driver = Driver()
    driver.add("r", prompt_of(5), max_tokens=1)
    driver.step()
    plan = driver.plan()
    assert plan is not None
    assert (plan.num_scheduled_tokens, plan.finished_rows.tolist(), plan.num_rows) == (0, [0], 0)
    driver.answer()
    assert driver.plan() is None
