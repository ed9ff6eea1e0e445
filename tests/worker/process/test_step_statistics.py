"""Step statistics of a rank, and when they are due."""

import pytest

from longshore.protocol.statistics import STEP_GAP_BOUNDS, STEP_SECONDS_BOUNDS, STEP_TOKENS_BOUNDS
from longshore.worker.process.step_statistics import REPORT_INTERVAL_S, StepStatistics


def counted(*steps: tuple[float, int]) -> StepStatistics:
    statistics = StepStatistics(epoch=2, rank=1)
    for compute_s, num_tokens in steps:
        statistics.count(compute_s, num_tokens, now_s=5.0)
    return statistics


def test_a_step_is_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    stats = counted((0.01, 8), (0.0101, 9), (1e9, 10**6), (0.0, 0)).take(
        resident_bytes=1, device_bytes=2
    )
    seconds = dict(zip([*STEP_SECONDS_BOUNDS, "more"], stats.steps_by_seconds, strict=True))
    assert (seconds[0.0005], seconds[0.01], seconds[0.025], seconds["more"]) == (1, 1, 1, 1)
    tokens = dict(zip([*STEP_TOKENS_BOUNDS, "more"], stats.steps_by_tokens, strict=True))
    assert (tokens[1], tokens[8], tokens[16], tokens["more"]) == (1, 1, 1, 1)
    assert (stats.epoch, stats.rank, stats.num_steps, stats.num_tokens) == (2, 1, 4, 10**6 + 17)
    assert (stats.resident_bytes, stats.device_bytes) == (1, 2)


def test_gaps_are_those_of_steps_that_were_planned_in_time() -> None:
    statistics = StepStatistics(epoch=1, rank=0)
    for gap_s in (None, 0.0, 0.0001, 0.00011, 5.0):
        statistics.count(0.1, 1, now_s=1.0, gap_s=gap_s)
    stats = statistics.take(resident_bytes=0, device_bytes=0)
    gaps = dict(zip([*STEP_GAP_BOUNDS, "more"], stats.steps_by_gap, strict=True))
    assert (gaps[0.00001], gaps[0.0001], gaps[0.0002], gaps["more"]) == (1, 1, 1, 1)
    assert (sum(stats.steps_by_gap), stats.num_steps) == (4, 5)
    assert stats.gap_s == pytest.approx(5.00021)


def test_sums_continue_across_reports_but_the_longest_step_is_reset() -> None:
    statistics = counted((0.5, 3), (0.25, 1))
    first = statistics.take(resident_bytes=0, device_bytes=0)
    statistics.count(0.125, 1, now_s=6.0)
    second = statistics.take(resident_bytes=0, device_bytes=0)
    assert (first.compute_s, second.compute_s) == (0.75, 0.875)
    assert (first.longest_step_s, second.longest_step_s) == (0.5, 0.125)
    assert (first.num_steps, second.num_steps) == (2, 3)


def test_a_report_is_due_an_interval_after_the_first_unreported_step() -> None:
    statistics = StepStatistics(epoch=1, rank=0)
    assert statistics.due_in_s(0.0) is None
    statistics.count(0.1, 1, now_s=10.0)
    statistics.count(0.1, 1, now_s=10.5)
    assert statistics.due_in_s(10.25) == pytest.approx(REPORT_INTERVAL_S - 0.25)
    assert statistics.due_in_s(99.0) == 0.0
    statistics.take(resident_bytes=0, device_bytes=0)
    assert statistics.due_in_s(99.0) is None
