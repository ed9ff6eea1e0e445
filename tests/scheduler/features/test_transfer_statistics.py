"""What ranks have moved: their totals and bandwidth, and how they reach the engine's statistics."""

import pytest

from longshore.connectors.base import ConnectorStats, SchedulerConnector
from longshore.protocol.outputs import TransferReport
from longshore.protocol.statistics import TierStats, TransferOperation
from longshore.scheduler.features.transfer_statistics import TransferStatistics
from tests.harness.driver import Driver
from tests.harness.shared_drivers import CONNECTED


def operation(num_bytes: int, seconds: float, *counts: int) -> TransferOperation:
    return TransferOperation("CPU", "GPU", 2, num_bytes, seconds, *counts)


def test_totals_add_up_by_source_and_destination() -> None:
    statistics = TransferStatistics()
    statistics.add(operation(4096, 0.25, 1, 2))
    statistics.add(operation(4097, 0.5, 3, 4))
    statistics.add(TransferOperation("GPU", "CPU", 7, 2**40, 1.0))
    (load, store) = statistics.totals({("CPU", "GPU"): 5})
    assert (load.source, load.destination, load.num_queued_blocks) == ("CPU", "GPU", 5)
    assert (load.num_blocks, load.num_bytes, load.seconds) == (4, 8193, 0.75)
    assert (load.num_failed_blocks, load.num_corrupt_blocks) == (4, 6)
    assert load.operations_by_bytes[:3] == (1, 1, 0)
    assert (store.source, store.num_blocks, store.num_queued_blocks) == ("GPU", 7, 0)
    assert store.operations_by_bytes[-1] == 1
    assert statistics.num_operations == load.num_operations + store.num_operations == 3


def test_queued_blocks_are_shown_before_anything_was_moved() -> None:
    (only,) = TransferStatistics().totals({("CPU", "DISK"): 3})
    assert (only.num_queued_blocks, only.num_operations) == (3, 0)


def test_the_bandwidth_follows_recent_operations() -> None:
    statistics = TransferStatistics()
    assert statistics.bandwidth("CPU", "GPU") is None
    for _ in range(10):
        statistics.add(operation(1000, 1.0))
    assert statistics.bandwidth("CPU", "GPU") == pytest.approx(1000)
    assert statistics.bandwidth("GPU", "CPU") is None
    for _ in range(200):
        statistics.add(operation(9000, 1.0))
    assert statistics.bandwidth("CPU", "GPU") == pytest.approx(9000, rel=0.01)
    statistics.add(TransferOperation("CPU", "GPU", 0, 0, 5.0, 2))
    assert statistics.bandwidth("CPU", "GPU") == pytest.approx(9000, rel=0.01), (
        "a failure is not slow"
    )


class WithTier(SchedulerConnector):
    def get_kv_connector_stats(self) -> ConnectorStats:
        tiers = [
            TierStats("CPU", 3, 9, 4, 1, 10, 20, 30, 40),
            TierStats("DISK", 5, 6),
            TierStats("CPU", 1, 1, 6, 2, 1, 2, 3, 4),
        ]
        return ConnectorStats(tiers, {("GPU", "CPU"): 1})


@pytest.mark.req("MET-04")
def test_reports_of_ranks_reach_the_statistics_of_the_engine() -> None:
    driver = Driver(connector=WithTier(), num_ranks=2, **CONNECTED)
    for rank in range(2):
        report = TransferReport(1, rank, operations=(operation(100, 0.5),))
        driver.scheduler.update_from_transfers(report, 0.0)
    late = TransferReport(0, 1, operations=(operation(100, 0.5),))
    driver.scheduler.update_from_transfers(late, 0.0)
    stats = driver.scheduler.make_stats()
    assert stats.tiers == (
        TierStats("CPU", 4, 10, 10, 3, 11, 22, 33, 44),
        TierStats("DISK", 5, 6),
    )
    (load, store) = stats.transfers
    assert (load.num_bytes, load.seconds) == (200, 1.0)
    assert store.num_queued_blocks == 1
    assert driver.scheduler.num_transfer_operations == 2
