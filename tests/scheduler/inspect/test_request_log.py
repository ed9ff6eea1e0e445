"""The scheduler's log of its requests."""

import logging
from typing import Any

import pytest

from longshore.protocol.logs.limits import MAX_PER_SECOND
from longshore.protocol.outputs import RequestEvent
from tests.harness.driver import Driver
from tests.harness.tokens import prompt_of

NAME = "longshore.scheduler.inspect.request_log"


def lines_of(caplog: pytest.LogCaptureFixture, request_id: str) -> list[tuple[str, dict[str, Any]]]:
    """(message, fields) of the records about a request."""
    records = [record for record in caplog.records if record.name == NAME]
    about = [(record.getMessage(), vars(record)["fields"]) for record in records]
    return [line for line in about if line[1].get("request_id") == request_id]


def test_debug_lines_cover_the_life_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, NAME)
    driver = Driver()
    driver.add("r", prompt_of(5), max_tokens=3)
    driver.run()
    (arrived, how), (admitted, where), (ended, what) = lines_of(caplog, "r")
    assert arrived == "a request has arrived"
    assert (how["prompt_tokens"], how["max_tokens"]) == (5, 3)
    assert admitted == "admitted"
    assert (where["step_id"], where["row"]) == (1, 0)
    assert ended == "ended"
    assert (what["finish_reason"], what["output_tokens"]) == ("LENGTH_CAPPED", 3)


def test_a_preemption_is_logged_with_the_step_that_gets_its_blocks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, NAME)
    driver = Driver(num_blocks=9, max_model_len=32)
    driver.add("old", prompt_of(14, 0), max_tokens=14)
    driver.add("young", prompt_of(14, 40), max_tokens=14)
    driver.run()
    said = lines_of(caplog, "young")
    assert [text.split(":")[0] for text, _ in said] == [
        "a request has arrived",
        "admitted",
        "preempted",
        "admitted",
        "ended",
    ]
    steps = [about["step_id"] for _, about in said[1:]]
    assert steps == sorted(steps)
    assert said[2][1]["preemptions"] == said[-1][1]["preemptions"] == 1


def test_rejected_and_failed_requests_are_warnings_with_id_and_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Driver()
    driver.add("long", prompt_of(64))
    driver.add("bad", prompt_of(5), max_tokens=30)
    driver.plan()
    driver.answer(nan_rows=[driver.requests["bad"].row])
    (rejected, why) = lines_of(caplog, "long")[0]
    assert "the prompt has 64 tokens" in rejected
    assert why["finish_reason"] == "IGNORED"
    (nans, where), (failed, how) = lines_of(caplog, "bad")
    assert (nans, where["step_id"]) == ("logits are not finite", 1)
    assert "not finite" in failed
    assert how["finish_reason"] == "ERROR"
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_without_debug_a_good_request_leaves_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    driver = Driver()
    driver.add("r", prompt_of(5), max_tokens=3)
    driver.run()
    assert caplog.messages == []


def test_warnings_about_a_flood_of_bad_requests_are_limited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Driver()
    for number in range(300):
        driver.add(f"long {number}", prompt_of(64))
    assert len(driver.finished) == 300
    at_s = [record.created for record in caplog.records]
    within_a_second = [sum(start <= other < start + 1 for other in at_s) for start in at_s]
    assert max(within_a_second) <= 2 * MAX_PER_SECOND + 2  # the end of one second, and the next


def test_a_flood_of_bad_requests_does_not_hide_engine_failures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Driver()
    driver.add("good", prompt_of(5), max_tokens=30)
    driver.plan()
    for number in range(300):
        driver.add(f"long {number}", prompt_of(64))
    driver.answer(nan_rows=[driver.requests["good"].row])
    assert len(lines_of(caplog, "good")) == 2


def test_an_end_is_logged_with_the_step_that_caused_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Driver(max_steps_in_flight=2)
    driver.add("bad", prompt_of(5), max_tokens=30)
    driver.plan()
    driver.plan()
    driver.answer(nan_rows=[driver.requests["bad"].row])
    assert [about["step_id"] for _, about in lines_of(caplog, "bad")] == [1, 1]


def test_waiting_time_starts_again_with_a_preemption(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, NAME)
    driver = Driver(num_blocks=9, max_model_len=32)
    driver.add("old", prompt_of(14, 0), max_tokens=14)
    driver.add("young", prompt_of(14, 40), max_tokens=14)
    driver.run()
    first, second = [
        at_s for what, at_s in driver.requests["young"].events if what is RequestEvent.SCHEDULED
    ]
    (left,) = [
        at_s for what, at_s in driver.requests["young"].events if what is RequestEvent.PREEMPTED
    ]
    waited_ms = [
        about["waited_ms"] for text, about in lines_of(caplog, "young") if text == "admitted"
    ]
    assert first < left < second
    assert waited_ms[1] == pytest.approx((second - left) * 1e3)
