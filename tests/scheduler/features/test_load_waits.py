"""How long requests wait for a connector: as long as computing the tokens would take."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from longshore.connectors.base import AskLater, Match, Matched, RequestView
from longshore.protocol.outputs import FinishReason
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.features.load_waits import ASSUMED_TOKEN_S, LoadWaits
from longshore.scheduler.features.swap_cost import PrefillRate
from longshore.scheduler.step.running import RunningTable
from tests.harness.connector import has_leading
from tests.harness.driver import Driver
from tests.harness.tokens import prompt_of
from tests.scheduler.features.test_connector_rules import background, connected, settle

TOKENS_PER_S = 500


def measure(rate: PrefillRate, tokens_per_s: float) -> None:
    """By a step that is so large that what is assumed counts no more."""
    rate.planned(0, 10**6, 1, now=0.0)
    rate.answered(0, now=10**6 / tokens_per_s)


def waits(is_measured: bool = True, min_wait_s: float = 0.0, **settings: Any) -> LoadWaits:
    rate = PrefillRate()
    if is_measured:
        measure(rate, TOKENS_PER_S)
    config = SchedulerConfig(max_model_len=100_000, **({"min_load_wait_s": 1.0} | settings))
    return LoadWaits(config, RunningTable(4, 16), rate, min_wait_s)


def test_a_wait_is_as_long_as_computing_these_tokens_and_those_before_them() -> None:
    each = waits()
    assert each.limit_s(5000, 0) == pytest.approx(10)
    assert each.limit_s(5000, 2500) == pytest.approx(15)
    each.running.num_tokens[1] = 700
    each.running.num_computed[1] = 200
    assert each.limit_s(5000, 2500) == pytest.approx(16)


def test_a_wait_has_a_minimum_and_a_maximum() -> None:
    assert waits().limit_s(16, 0) == 1
    assert waits(min_wait_s=5.0).limit_s(16, 0) == 5
    assert waits().limit_s(90_000, 0) == 60
    assert waits(min_load_wait_s=1e9).limit_s(16, 0) == 60
    assert waits(min_load_wait_s=5.0, load_timeout_s=2.0).limit_s(16, 0) == 2


def test_a_rate_that_is_not_measured_yet_is_assumed_to_be_low() -> None:
    assert waits(is_measured=False).limit_s(5000, 0) == 5000 * ASSUMED_TOKEN_S


def test_a_request_that_may_not_compute_waits_up_to_the_timeout() -> None:
    each = waits(load_failure_policy="fail", load_timeout_s=7.0)
    assert each.limit_s(16, 0) == 7
    assert each.connector_limit_s(7) == math.inf


def test_a_load_that_takes_longer_than_computing_is_not_waited_for() -> None:
    driver = background(12, min_load_wait_s=4.0)
    key = driver.add("r", prompt_of(13), max_tokens=8)
    driver.plan()
    (load,) = driver.adversary.loads_begun
    began = driver.now
    while not driver.adversary.abandoned:
        driver.step()
    assert driver.now - began == 4.0
    assert driver.scheduler.make_stats().num_late_loads == 1
    assert driver.scheduler.make_stats().num_quarantined_blocks == 4
    driver.step()
    assert not load.targets & set(driver.workers.tables[0][0])
    driver.ranks.write("r", 0)  # late: it is not used
    driver.run_until_idle()
    driver.check_complete(key)
    driver.ranks.end_load("r")
    settle(driver)


def test_a_load_that_is_slower_than_the_measured_rate_is_not_waited_for() -> None:
    """12 tokens take 3.7 s, and twice as much with the load before it; a step takes a second."""
    driver = connected(min_load_wait_s=0.0)
    assert driver.scheduler._attached.prefill_rate is not None
    measure(driver.scheduler._attached.prefill_rate, 13 / 4)
    driver.adversary.match = has_leading(12, is_async=True)
    keys = [driver.add(name, prompt_of(13, 30 * n)) for n, name in enumerate("ab", 1)]
    driver.plan()
    began, expired_s = driver.now, {}
    for _ in range(12):
        driver.step()
        for name in driver.adversary.abandoned[len(expired_s) :]:
            expired_s[name] = driver.now - began
    assert expired_s == {"a": 4.0, "b": 8.0}
    settle(driver)
    driver.check_complete(*keys)


def asks_later(seen: list[float], num_known: int = 0) -> Callable[[RequestView, int], Match]:
    """A connector that never knows everything; seen: how long it was told that requests wait."""

    def match(request: RequestView, num_computed_tokens: int) -> Match:
        seen.append(request.max_wait_s)
        if request.max_wait_s or not num_known:
            return AskLater()
        return Matched(num_known - num_computed_tokens, is_async=True)

    return match


@pytest.mark.parametrize("other_runs", [False, True])
def test_a_lookup_that_is_not_answered_in_time_is_a_miss(other_runs: bool) -> None:
    seen: list[float] = []
    driver = connected(min_load_wait_s=4.0)
    if other_runs:
        driver.add("other", prompt_of(5, 70), max_tokens=20)
        driver.step()
    driver.adversary.match = asks_later(seen)
    key = driver.add("r", prompt_of(13))
    for _ in range(12):
        driver.step()
    assert seen[0] == 4.0
    assert seen[-1] == 0.0
    assert sorted(seen, reverse=True) == seen
    driver.run_until_idle()
    driver.check_complete(key)
    assert driver.scheduler.make_stats().num_late_loads == 1
    settle(driver)


def test_what_is_known_when_the_time_is_over_is_loaded() -> None:
    driver = connected(min_load_wait_s=4.0)
    driver.adversary.match = asks_later([], num_known=8)
    key = driver.add("r", prompt_of(13))
    while not driver.adversary.loads_begun:
        driver.step()
    settle(driver)
    driver.check_complete(key)
    assert driver.scheduler.make_stats().num_late_loads == 1


def test_a_later_lookup_of_the_same_request_waits_anew() -> None:
    """It was preempted while it ran."""
    seen: list[float] = []
    driver = connected(min_load_wait_s=4.0)
    driver.adversary.match = asks_later(seen)
    driver.add("r", prompt_of(13), max_tokens=20)
    while not driver.workers.request_ids:
        driver.step()
    seen.clear()
    driver.restart_workers()
    driver.step()
    assert seen[0] == 4.0
    while driver.scheduler.has_unfinished_requests():
        driver.step()
    settle(driver)


def test_a_request_that_may_not_compute_fails_only_after_the_timeout() -> None:
    driver = background(12, min_load_wait_s=2.0, load_timeout_s=9.0, load_failure_policy="fail")
    key = driver.add("r", prompt_of(13))
    driver.plan()
    began = driver.now
    while key not in driver.finished:
        driver.step()
    assert driver.now - began == 9.0
    assert driver.reason(key) is FinishReason.ERROR
    settle(driver)


def test_a_connector_learns_how_long_its_load_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver: Driver = background(12, min_load_wait_s=4.0)
    told: list[float] = []
    hook = driver.adversary.update_state_after_alloc

    def note(request: RequestView, *arguments: Any) -> None:
        told.append(request.max_wait_s)
        hook(request, *arguments)

    monkeypatch.setattr(driver.adversary, "update_state_after_alloc", note)
    key = driver.add("r", prompt_of(13))
    settle(driver)
    driver.check_complete(key)
    assert told == [pytest.approx(3.2)]
