"""Whose statistics are kept."""

from longshore.scheduler.inspect.worker_statistics import WorkerStatistics
from tests.scheduler.worker_reports import report


def test_the_latest_report_of_every_rank_is_kept_by_rank() -> None:
    statistics = WorkerStatistics(epoch=3)
    statistics.update(1, report(rank=1))
    statistics.update(0, report(num_steps=4))
    statistics.update(0, report(num_steps=9))
    assert [(stats.rank, stats.num_steps) for stats in statistics.latest()] == [(0, 9), (1, 1)]
    assert statistics.num_dropped == 0


def test_a_report_of_another_epoch_another_rank_or_an_earlier_time_is_dropped_and_counted() -> None:
    statistics = WorkerStatistics(epoch=3)
    kept = report(num_steps=5)
    statistics.update(0, kept)
    for stranger in (report(epoch=2, num_steps=6), report(rank=1), report(num_steps=4)):
        statistics.update(0, stranger)
    assert statistics.latest() == (kept,)
    assert statistics.num_dropped == 3
