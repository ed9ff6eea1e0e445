"""Which request is preempted when blocks are short, and what returns to the budget."""

import pytest

from longshore.scheduler.request import RequestStatus
from tests.harness.driver import Driver
from tests.harness.shared_drivers import in_admission_order, pressed
from tests.harness.tokens import expected_output, prompt_of


@pytest.mark.req("PRE-01")
def test_victims_are_preempted_until_the_request_fits() -> None:
    driver = pressed(enable_prefix_caching=False)
    driver.add("old", prompt_of(12, 0), max_tokens=12)
    driver.add("b", prompt_of(8, 30), max_tokens=12)
    driver.add("c", prompt_of(8, 60), max_tokens=12)
    driver.step()
    assert driver.running == ["old", "b", "c"]
    driver.step()  # old needs its fourth block, b and c their third: one is free
    assert driver.running == ["old", "b"]
    assert driver.scheduled == {"old": 1, "b": 1}
    driver.run()
    assert [driver.received[0, handle] for handle in range(3)] == [
        expected_output(name, 12) for name in ("old", "b", "c")
    ]


@pytest.mark.req("PRE-01")
def test_one_request_may_need_the_blocks_of_several_victims() -> None:
    driver = pressed(long_prefill_token_threshold=20, enable_prefix_caching=False)
    driver.add("old", prompt_of(28, 0), max_tokens=2)
    for index, name in enumerate("bcd"):
        driver.add(name, prompt_of(4, 40 + 15 * index), max_tokens=2)
    driver.step()  # five blocks and one for each of the others
    assert driver.running == ["old", "b", "c", "d"]
    plan = driver.plan()  # old needs two more, which leaves none for b
    assert plan is not None
    assert plan.preempted_rows.tolist() == [3, 2, 1]
    assert driver.scheduled == {"old": 8}
    driver.answer()
    driver.run()
    assert len(driver.finished) == 4


@pytest.mark.req("PRE-01")
def test_a_request_that_is_its_own_victim_stops_trying_in_this_step() -> None:
    driver = pressed(enable_prefix_caching=False)
    driver.add("old", prompt_of(15, 0), max_tokens=8)
    driver.add("young", prompt_of(16, 40), max_tokens=8)
    driver.step()
    driver.step()  # old fits its fourth block; young needs a fifth and none is free
    assert driver.running == ["old"]
    assert driver.scheduled == {"old": 1}
    assert driver.plans[-1].preempted_rows.tolist() == [1]
    assert driver.requests["young"].status is RequestStatus.PREEMPTED


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_everything_that_a_victim_took_earlier_in_the_step_is_taken_back(
    steps_in_flight: int,
) -> None:
    driver = pressed("priority", enable_prefix_caching=False, max_steps_in_flight=steps_in_flight)
    in_admission_order(driver, [("victim", 6, 9), ("keeps", 9, 1), ("urgent", 8, 0)])
    tables = {name: driver.table(name) for name in ("keeps", "urgent")}
    assert driver.num_free_blocks == 1
    # The victim stands first and takes the last free block; urgent, the last, needs one too.
    plan = driver.plan()
    assert plan is not None
    assert plan.preempted_rows.tolist() == [0]
    assert driver.scheduled == {"keeps": 1, "urgent": 1}
    assert plan.num_scheduled_tokens == 2
    assert [blocks.rows.tolist() for blocks in plan.appended] == [[2]]
    assert driver.table("keeps") == tables["keeps"]
    assert driver.table("urgent")[:-1] == tables["urgent"]
    assert driver.requests["victim"].status is RequestStatus.PREEMPTED
    assert driver.num_free_blocks == 2
    driver.run()
    assert sorted(len(tokens) for tokens in driver.received.values()) == [16, 16, 16]


def test_tokens_that_a_victim_had_taken_are_there_for_the_others() -> None:
    driver = Driver(
        num_blocks=10,
        max_model_len=32,
        policy="priority",
        enable_prefix_caching=False,
        max_num_batched_tokens=9,
        long_prefill_token_threshold=4,
    )
    in_admission_order(driver, [("victim", 24, 9), ("urgent", 28, 0)])
    driver.add("last", prompt_of(12, 60), max_tokens=1, priority=1)
    while not driver.requests["victim"].num_preemptions:
        assert driver.running == ["victim", "urgent", "last"][: len(driver.running)]
        before = dict(driver.scheduled)
        driver.step()
    assert before == {"victim": 4, "urgent": 4, "last": 1}
    assert driver.scheduled == {"urgent": 4, "last": 4}
    driver.run()


def test_no_request_is_admitted_in_a_step_that_preempted() -> None:
    driver = pressed(enable_prefix_caching=False)
    driver.add("old", prompt_of(15, 0), max_tokens=8)
    driver.add("young", prompt_of(16, 40), max_tokens=8)
    driver.step()
    driver.add("tiny", prompt_of(1, 80), max_tokens=1)
    plan = driver.plan()
    assert plan is not None
    assert (plan.preempted_rows.tolist(), plan.added) == ([1], ())
    assert driver.num_free_blocks == 4  # the victim and the tiny one would both have their blocks
    driver.answer()
    driver.step()
    assert driver.running == ["old"]  # young, in front again, needs five
    driver.run()


def test_preemption_frees_everything_and_puts_the_request_back_in_front() -> None:
    driver = pressed(enable_prefix_caching=False)
    driver.add("old", prompt_of(15, 0), max_tokens=8)
    driver.add("young", prompt_of(16, 40), max_tokens=8)
    driver.step()
    driver.add("new", prompt_of(1, 80))
    assert driver.num_free_blocks == 0
    driver.step()
    young = driver.requests["young"]
    assert (young.status, young.row, young.num_preemptions) == (RequestStatus.PREEMPTED, -1, 1)
    assert driver.num_free_blocks == 4
    assert driver.scheduler.waiting.peek() is young


@pytest.mark.req("PRE-05")
def test_a_preempted_request_finds_most_of_its_prefix_again() -> None:
    driver = pressed()
    driver.add("old", prompt_of(15, 0), max_tokens=2)
    driver.add("young", prompt_of(16, 40), max_tokens=8)
    driver.run()
    resumed = next(start for plan in driver.plans for start in plan.added if start.resumed)
    assert resumed.num_computed_tokens == 16  # of 17; old took none of its blocks
    stats = driver.scheduler.make_stats()
    assert (stats.num_preempted_queried_tokens, stats.num_preempted_hit_tokens) == (17, 16)


@pytest.mark.req("PRE-05")
def test_blocks_that_another_request_shares_survive_a_preemption() -> None:
    driver = pressed()
    driver.add("old", prompt_of(13, 0), max_tokens=12)
    driver.step()
    driver.add("young", [*prompt_of(12, 0), 77, 78], max_tokens=12)
    driver.step()
    shared = driver.table("old")[:3]
    assert driver.table("young")[:3] == shared
    while not driver.requests["young"].num_preemptions:
        driver.step()
    assert driver.table("old")[:3] == shared
    pool = driver.scheduler.kv_cache.pool
    assert [pool.references()[block_id] for block_id in shared] == [1, 1, 1]
    driver.run()
