"""When a stall is logged, and with what."""

import logging

import pytest

from longshore.scheduler.inspect.stall_log import STALL_S, StallLog
from tests.harness.driver import Driver
from tests.harness.tokens import prompt_of


def test_a_stall_is_logged_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver()
    driver.add("r", prompt_of(4), max_tokens=4)
    assert driver.plan() is not None  # and it is not answered
    stalls, begins_s = StallLog(driver.scheduler), driver.now + STALL_S
    for after_s, num_warnings in ((-5, 0), (1, 1), (5, 1), (STALL_S + 1, 2)):
        stalls.check(begins_s + after_s, "engine-0.1")
        warnings = [each for each in caplog.records if "no request has advanced" in each.message]
        assert len(warnings) == num_warnings
        assert all(each.levelno == logging.WARNING for each in warnings)
