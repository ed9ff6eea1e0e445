"""When a failing server is asked again."""

import pytest

from longshore.connectors.offloading.remote.breaker import BreakerState, CircuitBreaker
from longshore.connectors.offloading.remote.lane import WARN_EVERY_S, RareWarnings
from longshore.connectors.offloading.remote.limits import MAX_ABSENT, AbsentKeys, ByteBudget


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def opened(clock: Clock, threshold: int = 3) -> CircuitBreaker:
    breaker = CircuitBreaker(threshold, 10.0, clock)
    for _ in range(threshold):
        assert breaker.is_closed
        assert not breaker.begins_probe()
        breaker.failed()
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_only_failures_in_a_row_open_the_breaker() -> None:
    breaker = CircuitBreaker(3, 10.0, Clock())
    for _ in range(5):
        assert [breaker.failed(), breaker.failed()] == [False, False]
        assert not breaker.succeeded()
    assert breaker.is_closed
    assert [breaker.failed() for _ in range(4)] == [False, False, True, False]
    assert breaker.num_opened == 1


def test_an_open_breaker_begins_one_probe_after_a_while() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert not breaker.begins_probe()
    clock.now_s += 9.9
    assert not breaker.begins_probe()
    clock.now_s += 0.2
    assert breaker.begins_probe()
    assert breaker.state is BreakerState.PROBING
    assert not breaker.begins_probe(), "the others wait for its result"
    assert not breaker.is_closed
    clock.now_s += 10
    assert breaker.begins_probe(), "a probe that never ends is given up"


def test_a_probe_that_succeeds_closes_the_breaker() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now_s += 11
    assert breaker.begins_probe()
    assert breaker.succeeded()
    assert breaker.is_closed
    assert [breaker.failed() for _ in range(3)] == [False, False, True], "failures count anew"
    assert breaker.num_opened == 2


def test_a_probe_that_fails_leaves_it_open_for_as_long_again() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now_s += 11
    assert breaker.begins_probe()
    assert not breaker.failed(), "it was not closed in between"
    assert not breaker.begins_probe()
    clock.now_s += 9
    assert not breaker.begins_probe()
    clock.now_s += 2
    assert breaker.begins_probe()
    assert breaker.num_opened == 1


def test_an_operation_that_began_earlier_does_not_close_the_breaker() -> None:
    breaker = opened(Clock())
    assert not breaker.succeeded()
    assert not breaker.failed()
    assert breaker.state is BreakerState.OPEN


def test_an_absent_key_is_remembered_for_its_time() -> None:
    clock = Clock()
    absent = AbsentKeys(10.0, clock)
    absent.add(b"a")
    clock.now_s += 6
    absent.add(b"b")
    assert b"a" in absent
    clock.now_s += 6
    assert b"a" not in absent
    assert b"b" in absent
    absent.add(b"c")
    assert len(absent) == 2, "those whose time is over are gone"
    absent.discard(b"b")
    assert b"b" not in absent


def test_absent_keys_do_not_grow_without_limit() -> None:
    absent = AbsentKeys(1e9, Clock())
    for number in range(MAX_ABSENT + 10):
        absent.add(number.to_bytes(4, "big"))
    assert len(absent) == MAX_ABSENT
    assert (9).to_bytes(4, "big") not in absent
    assert (10).to_bytes(4, "big") in absent


def test_an_operation_waits_for_bytes_of_others() -> None:
    budget = ByteBudget(100)
    assert budget.acquire(60, 0)
    assert budget.acquire(40, 0)
    assert not budget.acquire(1, 0)
    budget.release(40)
    assert not budget.acquire(1000, 0)
    budget.release(60)
    assert budget.acquire(1000, 0), "one larger than the limit goes alone"
    assert not budget.acquire(1, 0)


def test_warnings_of_one_kind_are_rare_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    warnings = RareWarnings(clock)
    for number in range(5):
        warnings.warn("a", f"a{number}")
    warnings.warn("b", "b")
    clock.now_s += WARN_EVERY_S
    warnings.warn("a", "again")
    warnings.warn("a", "not this")
    assert caplog.messages == ["a0", "b", "again (4 more of this kind before)"]
