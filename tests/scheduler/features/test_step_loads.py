"""Loads within a step on several ranks: its output waits until all of them have reported."""

from collections.abc import Sequence

import msgspec
import pytest

from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import ModelRunnerOutput, TransferReport
from tests.harness.connector import has_stored
from tests.harness.driver import Driver
from tests.harness.shared_drivers import connected
from tests.harness.tokens import prompt_of

NUM_RANKS = 3


def in_step(*request_ids: str, num_ranks: int = NUM_RANKS, in_flight: int = 2) -> Driver:
    """A connector that has two blocks of these requests, and loads them within the step."""
    stored: dict[str, int | None] = dict.fromkeys(request_ids, 8)
    return connected(
        rules={"match": has_stored(stored, is_async=False)},
        num_ranks=num_ranks,
        max_steps_in_flight=in_flight,
    )


def report(
    driver: Driver, rank: int, step: int, failed: Sequence[int] = (), *, epoch: int = 1
) -> None:
    """A rank that does not sample says that its loads of the step have ended."""
    message = TransferReport(epoch, rank, step, failed_block_ids=int32_array(list(failed)))
    driver.scheduler.update_from_transfers(message, driver.now)
    driver.collect()


def answer(driver: Driver, failed: Sequence[int] = ()) -> None:
    """The sampling rank answers the oldest plan."""
    output = driver.take_output()
    assert isinstance(output, ModelRunnerOutput)
    if failed:
        output = msgspec.structs.replace(output, failed_block_ids=int32_array(list(failed)))
    driver.scheduler.update_from_output(output, driver.now)
    driver.collect()


def num_bad_reports(driver: Driver) -> int:
    return driver.scheduler.make_stats().num_bad_messages


@pytest.mark.req("CON-11")
@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_the_output_of_a_step_that_loads_waits_for_all_ranks(order: tuple[int, int]) -> None:
    driver = in_step("r")
    key = driver.add("r", prompt_of(10))
    driver.plan()
    answer(driver)
    for rank in order:
        assert driver.received[key] == []
        assert driver.scheduler.num_steps_in_flight == 1
        report(driver, rank, step=1)
    assert len(driver.received[key]) == 1
    assert driver.scheduler.num_steps_in_flight == 0
    assert num_bad_reports(driver) == 0


@pytest.mark.req("CON-11")
def test_reports_may_come_before_the_output() -> None:
    driver = in_step("r")
    key = driver.add("r", prompt_of(10))
    driver.plan()
    for rank in (2, 1):
        report(driver, rank, step=1)
    assert driver.received[key] == []
    answer(driver)
    assert len(driver.received[key]) == 1


def test_a_step_without_loads_waits_for_no_rank() -> None:
    driver = in_step()
    key = driver.add("r", prompt_of(10))
    driver.plan()
    answer(driver)
    assert len(driver.received[key]) == 1


def test_an_engine_with_one_rank_waits_for_no_report() -> None:
    driver = in_step("r", num_ranks=1)
    key = driver.add("r", prompt_of(10))
    driver.plan()
    answer(driver)
    assert len(driver.received[key]) == 1


@pytest.mark.req("CON-11")
def test_later_outputs_wait_behind_one_that_waits() -> None:
    driver = in_step("loads")
    loads = driver.add("loads", prompt_of(10))
    driver.plan()
    plain = driver.add("plain", prompt_of(6, 40))
    driver.plan()
    for _ in range(2):
        answer(driver)
    assert driver.scheduler.num_steps_in_flight == 2
    assert driver.received[loads] == driver.received[plain] == []
    report(driver, 1, step=1)
    report(driver, 2, step=1)
    assert driver.scheduler.num_steps_in_flight == 0
    assert len(driver.received[loads]) == 2
    assert len(driver.received[plain]) == 1


@pytest.mark.req("CON-11")
def test_two_steps_in_flight_are_reported_in_any_order() -> None:
    driver = in_step("a", "b")
    first = driver.add("a", prompt_of(10))
    driver.plan()
    second = driver.add("b", prompt_of(10, 40))
    driver.plan()
    report(driver, 2, step=2)
    report(driver, 1, step=2)
    answer(driver)
    report(driver, 1, step=1)
    answer(driver)
    assert driver.scheduler.num_steps_in_flight == 2, "rank 2 still loads in step 1"
    report(driver, 2, step=1)
    assert driver.scheduler.num_steps_in_flight == 0
    assert (len(driver.received[first]), len(driver.received[second])) == (2, 1)
    assert num_bad_reports(driver) == 0


@pytest.mark.parametrize(
    ("rank", "step", "epoch"),
    [(1, 1, 1), (1, 2, 1), (1, 7, 1), (-1, 1, 1), (NUM_RANKS, 1, 1), (2, 1, 9)],
    ids=["twice", "plain step", "unknown step", "below", "above", "other epoch"],
)
def test_a_wrong_report_is_counted_and_changes_nothing(rank: int, step: int, epoch: int) -> None:
    driver = in_step("r")
    key = driver.add("r", prompt_of(10))
    driver.plan()
    driver.plan()  # step 2 loads nothing
    report(driver, 1, step=1)
    answer(driver)
    report(driver, rank, step, failed=driver.table("r")[:1], epoch=epoch)
    assert num_bad_reports(driver) == 1
    assert driver.received[key] == []
    report(driver, 2, step=1)
    assert len(driver.received[key]) == 1
    assert driver.scheduler.make_stats().num_rewinds == 0


@pytest.mark.req("MET-05", "MET-06")
@pytest.mark.parametrize("failing", [(0,), (1,), (2,), (0, 1, 2)])
def test_blocks_that_failed_on_any_rank_are_computed_again(failing: Sequence[int]) -> None:
    driver = in_step("r", in_flight=1)
    key = driver.add("r", prompt_of(10))
    driver.plan()
    second_block = driver.table("r")[1:2]
    driver.invalid_ids.add("r")
    for rank in (1, 2):
        report(driver, rank, step=1, failed=second_block if rank in failing else ())
    answer(driver, failed=second_block if 0 in failing else ())
    assert driver.received[key] == [], "the token was computed from a block that was not loaded"
    assert driver.scheduler.make_stats().num_rewinds == 1
    plan = driver.plan()
    assert plan is not None
    assert plan.num_scheduled_tokens == 6  # all after the first block
    driver.answer()
    driver.run()
    driver.check_complete(key)
    driver.check_idle()


@pytest.mark.req("MET-05")
def test_different_blocks_that_failed_on_different_ranks_are_all_computed_again() -> None:
    driver = in_step("r", in_flight=1)
    key = driver.add("r", prompt_of(10))
    driver.plan()
    table = driver.table("r")
    driver.invalid_ids.add("r")
    report(driver, 1, step=1, failed=table[1:2])
    answer(driver)
    report(driver, 2, step=1, failed=table[:1])
    plan = driver.plan()
    assert plan is not None
    assert plan.num_scheduled_tokens == 10
    output = driver.adversary.outputs[-1]
    assert output.failed_block_ids.tolist() == sorted(table[:2])
    driver.answer()
    driver.run()
    driver.check_complete(key)


def test_a_new_epoch_waits_for_no_report_of_the_old_one() -> None:
    driver = in_step("r")
    key = driver.add("r", prompt_of(10))
    driver.plan()
    answer(driver)
    driver.restart_workers()
    report(driver, 1, step=1)
    report(driver, 2, step=1)
    assert driver.received[key] == []
    assert num_bad_reports(driver) == 2
    driver.run()
    driver.check_complete(key)
