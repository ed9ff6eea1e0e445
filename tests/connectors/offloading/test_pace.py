"""When a tier that was too slow is read again."""

import pytest

from longshore.connectors.offloading.pace import LATE_IN_A_ROW, MAX_RETRY_S, RETRY_S, Pace


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def end(pace: Pace, *are_late: bool) -> None:
    for is_late in are_late:
        assert pace.may_begin()
        pace.ended(is_late=is_late)


def test_one_late_read_is_a_hiccup() -> None:
    pace = Pace("reads", Clock())
    end(pace, True, False, True, False)
    assert pace.may_begin()


def test_a_tier_that_is_too_slow_is_tried_more_and_more_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    pace = Pace("reads", clock)
    end(pace, *[True] * LATE_IN_A_ROW)
    waits_s = []
    for _ in range(8):
        since_s = clock.now_s
        assert not pace.may_begin()
        while not pace.may_begin():
            clock.now_s += 1.0
        assert not pace.may_begin(), "one read finds out"
        waits_s.append(clock.now_s - since_s)
        pace.ended(is_late=True)
    assert waits_s == [RETRY_S * 2**index for index in range(6)] + [MAX_RETRY_S] * 2
    assert len(caplog.records) == 1


def test_a_tier_that_has_become_fast_enough_is_used_again() -> None:
    clock = Clock()
    pace = Pace("reads", clock)
    end(pace, *[True] * LATE_IN_A_ROW)
    clock.now_s += RETRY_S
    end(pace, True)
    clock.now_s += 2 * RETRY_S
    end(pace, False, True)
    end(pace, True)
    assert not pace.may_begin()
    clock.now_s += RETRY_S
    assert pace.may_begin(), "it is soon tried again, as at first"
