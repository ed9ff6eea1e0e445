"""A scheduler that is paused, wholly or for new requests."""

import pytest

from longshore.scheduler.step.planner import PauseState
from tests.harness.driver import Driver
from tests.harness.shared_drivers import pressed
from tests.harness.tokens import expected_output, prompt_of


def with_one_running_and_one_waiting(steps_in_flight: int) -> Driver:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    driver.add("runs", prompt_of(6), max_tokens=20)
    driver.step()
    driver.add("waits", prompt_of(6, 40), max_tokens=3)
    return driver


@pytest.mark.req("SCH-20")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_paused_new_continues_running_requests_and_admits_none(steps_in_flight: int) -> None:
    driver = with_one_running_and_one_waiting(steps_in_flight)
    driver.scheduler.set_pause(PauseState.PAUSED_NEW)
    for _ in range(8):
        driver.step()
        assert driver.scheduled == {"runs": 1}
    assert driver.running == ["runs"]
    driver.scheduler.set_pause(PauseState.UNPAUSED)
    driver.step()
    assert driver.running == ["runs", "waits"]
    driver.run()


@pytest.mark.req("SCH-20")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_paused_all_schedules_nothing_although_outputs_still_arrive(steps_in_flight: int) -> None:
    driver = with_one_running_and_one_waiting(steps_in_flight)
    driver.scheduler.set_pause(PauseState.PAUSED_ALL)
    num_plans = len(driver.plans)
    while driver.unanswered:
        driver.answer()
    for _ in range(5):
        assert driver.plan() is None
    assert len(driver.plans) == num_plans
    assert driver.running == ["runs"]
    driver.scheduler.set_pause(PauseState.UNPAUSED)
    driver.run()
    assert driver.received[0, 0] == expected_output("runs", 20)
    assert driver.received[0, 1] == expected_output("waits", 3)


@pytest.mark.req("SCH-20")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_paused_all_ends_a_steady_decode_for_which_nothing_waits(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    key = driver.add("runs", prompt_of(6), max_tokens=20)
    driver.steps(5)
    driver.scheduler.set_pause(PauseState.PAUSED_ALL)
    while driver.unanswered:
        driver.answer()
    assert driver.plan() is None
    assert driver.running == ["runs"]
    driver.scheduler.set_pause(PauseState.UNPAUSED)
    driver.run()
    assert driver.received[key] == expected_output("runs", 20)


@pytest.mark.req("SCH-20")
def test_workers_learn_of_ends_while_everything_is_paused() -> None:
    driver = with_one_running_and_one_waiting(1)
    driver.scheduler.set_pause(PauseState.PAUSED_ALL)
    driver.abort((0, 0))
    plan = driver.plan()
    assert plan is not None
    assert (plan.finished_rows.tolist(), plan.num_scheduled_tokens) == ([0], 0)


@pytest.mark.req("SCH-20")
def test_a_paused_engine_preempts_no_request() -> None:
    driver = pressed(enable_prefix_caching=False)
    driver.add("old", prompt_of(15, 0), max_tokens=8)
    driver.add("young", prompt_of(16, 40), max_tokens=8)
    driver.step()
    driver.scheduler.set_pause(PauseState.PAUSED_ALL)
    for _ in range(3):
        assert driver.plan() is None
    assert driver.running == ["old", "young"]
    driver.scheduler.set_pause(PauseState.UNPAUSED)
    driver.run()


@pytest.mark.req("SCH-20")
@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_report_says_that_waiting_requests_wait_for_the_paused_engine(state: PauseState) -> None:
    driver = with_one_running_and_one_waiting(1)
    driver.scheduler.set_pause(state)
    report = driver.scheduler.make_report(driver.now, "engine-0.1")
    assert report.pause == state.value
    assert [waiting.request_id for waiting in report.waiting] == ["waits"]
    assert state.value in report.waiting[0].waits_for
