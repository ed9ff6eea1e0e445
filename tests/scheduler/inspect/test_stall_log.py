"""When a stall is logged, and with what."""

import logging

import pytest

from longshore.scheduler.inspect.stall_log import STALL_S, StallLog
from tests.harness.driver import Driver
from tests.harness.tokens import prompt_of


def test_a_stall_is_logged_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver()
    driver.add("r", prompt_of(4), max_tokens=4)
    stalls = StallLog(driver.scheduler)
    now = driver.now
    assert driver.plan() is not None  # and it is not answered
    for seconds, num_warnings in (
        (STALL_S / 2, 0),
        (STALL_S, 1),
        (1.5 * STALL_S, 1),
        (2 * STALL_S, 2),
    ):
        stalls.check(now + seconds, "engine-0.1")
        warnings = [each for each in caplog.records if "no request has advanced" in each.message]
        assert len(warnings) == num_warnings
        assert all(each.levelno == logging.WARNING for each in warnings)
