"""A flood of warnings: some are logged, the others are counted."""

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.protocol.logs.limits import LogLimit


class Collecting(logging.Handler):
    """Keeps the messages that were logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def num_suppressed(messages: list[str]) -> int:
    return sum(int(text.split()[1]) for text in messages if text.startswith("suppressed"))


@given(st.lists(st.floats(0.0, 0.4), max_size=200), st.integers(1, 5))
def test_no_second_has_more_than_the_limit_and_every_warning_is_logged_or_counted(
    gaps_s: list[float], limit: int
) -> None:
    logger, handler = logging.Logger("flood"), Collecting()
    logger.addHandler(handler)
    now_s = 0.0
    warnings = LogLimit(logger, max_per_second=limit, clock=lambda: now_s)
    written_at: list[float] = []
    for gap_s in gaps_s:
        now_s += gap_s
        before = handler.messages.count("bad")
        warnings.warning("bad")
        written_at += [now_s] * (handler.messages.count("bad") - before)
    warnings.log_suppressed()
    assert len(written_at) + num_suppressed(handler.messages) == len(gaps_s)
    for at_s in written_at:  # a second overlaps two windows at most
        assert len([s for s in written_at if at_s <= s < at_s + 1.0]) <= 2 * limit


async def test_the_count_is_logged_although_the_flood_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    warnings = LogLimit(logging.getLogger("flood"), max_per_second=2, clock=lambda: now_s)
    warnings.warning("bad")
    now_s = 0.99  # so that the second is soon over
    for _ in range(5):
        warnings.warning("bad")
    assert caplog.messages == ["bad", "bad"]
    while len(caplog.messages) < 3:
        await asyncio.sleep(0)
    assert caplog.messages[2].startswith("suppressed 4 similar warnings")
