"""The worker half of the offloading connector, as the worker calls it."""

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from longshore.connectors.base import FinishedTransfers, WorkerConnector
from longshore.connectors.offloading import host_handlers
from longshore.connectors.offloading.disk.results import BlockWrite, Outcome
from longshore.connectors.offloading.messages import (
    Commands,
    Ended,
    LoadJob,
    Report,
    StoreJob,
    TierJob,
)
from longshore.connectors.offloading.tier_workers import DiskTierWorker
from longshore.connectors.offloading.tiers import LoadSource, Spill
from longshore.connectors.offloading.worker import OffloadingWorker
from longshore.worker.kv_cache.buffer import KVCache
from longshore.worker.queues.compute_queue import CpuComputeQueue
from longshore.worker.queues.transfer_queues import WorkerQueues
from tests.connectors.offloading.ranks import (
    CPU,
    PATIENCE_S,
    blocks_of,
    cache_of,
    caches_of,
    configs_of,
    delays,
    disk_options,
)
from tests.harness.kv_groups import full


class WorkerHalf:
    """A started worker half. Its steps are empty."""

    def __init__(self, cache: KVCache, **options: Any) -> None:
        (config,) = configs_of([cache], **options)
        self.compute = CpuComputeQueue()
        self.queues = WorkerQueues(CPU, self.compute, lambda: None, delays(1))
        self.connector = OffloadingWorker(config)
        self.connector.register_kv_caches(caches_of(cache), self.queues)
        self.first = self.connector.build_connector_worker_meta()

    def begin(self, **commands: Any) -> None:
        data = msgspec.msgpack.encode(Commands(**commands))
        self.connector.start_load_kv(self.connector.bind_connector_metadata(data))

    def end(self) -> tuple[FinishedTransfers, Report]:
        """What is reported when all jobs have ended."""
        for queue in self.queues._opened:
            assert queue.submit(lambda: None).wait(PATIENCE_S)
        ended = self.connector.get_finished([])
        metadata = self.connector.build_connector_worker_meta()
        return ended, msgspec.msgpack.decode(metadata, type=Report) if metadata else Report()

    def close(self) -> None:
        self.compute.close()
        self.connector.shutdown()
        self.queues.close()


def slots(*each: int) -> bytes:
    return np.array(each, np.int64).tobytes()


def load(request_id: str, block_ids: list[int], *host: int, missing: Sequence[int] = ()) -> LoadJob:
    blocks = blocks_of([0] * len(block_ids), [[each] for each in block_ids])
    return LoadJob(
        request_id, blocks, msgspec.msgpack.encode(LoadSource(slots(*host))), list(missing)
    )


@pytest.fixture
def cache() -> KVCache:
    return cache_of(20, [full()], [1])


@pytest.mark.req("LDS-07", "WRK-07")
def test_every_job_is_reported_once(cache: KVCache) -> None:
    half = WorkerHalf(cache, verify_kv="always")
    noise = random.Random(1).randbytes(cache.buffer[1:4].numel())
    cache.buffer[1:4] = cache.buffer.new_tensor(list(noise)).view(3, -1)
    half.begin(stores=[StoreJob(7, blocks_of([0] * 3, [[1], [2], [3]]), slots(5, 6, 7))])
    assert half.end() == (FinishedTransfers((), [], []), Report([Ended(7)]))
    half.begin(loads=[load("a", [11, 12], 5, 6), load("b", [13], 5), load("c", [], missing=[14])])
    ended, report = half.end()
    assert sorted(ended.received) == ["a", "b", "c"]
    assert sorted(ended.failed_block_ids) == [14]
    assert report == Report()
    assert (cache.buffer[[11, 12, 13]] == cache.buffer[[1, 2, 1]]).all()
    assert half.end() == (FinishedTransfers((), [], []), Report())
    half.close()


@pytest.mark.req("WRK-07", "MET-04")
def test_operations_are_recorded_with_their_bytes_and_seconds(
    cache: KVCache, tmp_path: Path
) -> None:
    half = WorkerHalf(
        cache, verify_kv="always", disk_path=str(tmp_path / "tier"), disk_bytes="1MiB"
    )
    size = cache.groups[0].block_size_bytes
    blocks = blocks_of([0] * 3, [[1], [2], [3]])

    def moved() -> list[tuple[object, ...]]:
        """What was recorded since the last call, without the seconds."""
        operations = half.connector.get_kv_connector_stats()
        assert all(each.seconds > 0 for each in operations)
        everything = [msgspec.structs.astuple(each) for each in operations]
        return [(*each[:4], *each[5:]) for each in everything]

    half.begin(stores=[StoreJob(7, blocks, slots(5, 6, 7))])
    half.end()
    assert moved() == [("GPU", "CPU", 3, 3 * size, 0, 0)]
    assert moved() == [], "every operation is reported once"

    spill = Spill(0, blocks.keys[:2], bytes(2), slots(5, 6), slots(0, 1))
    half.begin(tier_jobs=[TierJob(8, msgspec.msgpack.encode(spill))])
    half.end()
    assert moved() == [("CPU", "DISK", 2, 2 * size, 0, 0)]

    source = LoadSource(slots(9, 6, 7), [(0, 0, 0)])
    half.begin(
        loads=[
            LoadJob(
                "a", blocks_of([0] * 3, [[11], [12], [13]]), msgspec.msgpack.encode(source), []
            ),
            load("b", [14, 15], 5, 4),  # nothing was stored in the second slot
        ]
    )
    half.end()
    assert sorted(moved()) == [
        ("CPU", "GPU", 1, size, 0, 1),
        ("CPU", "GPU", 3, 3 * size, 0, 0),
        ("DISK", "CPU", 1, size, 0, 0),
    ]
    half.close()


def test_an_operation_that_raises_is_recorded_as_failed(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = WorkerHalf(cache)

    def fail(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(host_handlers, "joined", fail)
    half.begin(stores=[StoreJob(7, blocks_of([0] * 2, [[1], [2]]), slots(5, 6))])
    half.end()
    (operation,) = half.connector.get_kv_connector_stats()
    assert (operation.num_blocks, operation.num_bytes, operation.num_failed_blocks) == (0, 0, 2)
    half.close()


@pytest.mark.req("MET-05")
def test_failed_blocks_are_named_to_the_scheduler_and_to_the_connector(cache: KVCache) -> None:
    half = WorkerHalf(cache, verify_kv="always")
    half.begin(stores=[StoreJob(7, blocks_of([0] * 3, [[1], [2], [3]]), slots(5, 6, 7))])
    half.end()
    half.begin(loads=[load("a", [11, 12, 13], 5, 9, 8, missing=[15, 16])])
    ended, report = half.end()
    assert ended == FinishedTransfers((), ["a"], [12, 13, 15, 16])
    assert report == Report(failed_loads=[("a", [1, 2])])
    half.close()


def test_the_null_block_is_never_reported(cache: KVCache) -> None:
    half = WorkerHalf(cache, verify_kv="always", block_size=8)
    blocks = blocks_of([0], [[0, 12]])
    source = msgspec.msgpack.encode(LoadSource(slots(3)))
    half.begin(loads=[LoadJob("a", blocks, source)])
    ended, report = half.end()
    assert ended.failed_block_ids == [12]
    assert report.failed_loads == [("a", [0])]
    half.close()


@pytest.mark.req("TIE-03")
def test_shutdown_ends_all_jobs_and_releases_the_disk(cache: KVCache, tmp_path: Path) -> None:
    blocks = blocks_of([0] * 3, [[1], [2], [3]])
    for number in range(3):
        half = WorkerHalf(cache, **disk_options(tmp_path))
        spill = Spill(0, blocks.keys, blocks.groups, slots(5, 6, 7), slots(0, 1, 2))
        half.begin(
            stores=[StoreJob(1, blocks, slots(5, 6, 7))],
            tier_jobs=[TierJob(2, msgspec.msgpack.encode(spill))],
        )
        half.close()
        ended = half.connector.build_connector_worker_meta()
        report = msgspec.msgpack.decode(ended, type=Report)
        assert sorted(each.job_id for each in report.jobs) == [1, 2], number


def test_a_shutdown_does_not_wait_for_jobs_that_have_not_begun(
    cache: KVCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk has more to write than the supervisor gives time for."""
    monkeypatch.setattr(host_handlers, "FLUSH_TIMEOUT_S", 0.0)
    is_late = threading.Event()
    write = DiskTierWorker.write

    def slow(self: DiskTierWorker, batch: Sequence[BlockWrite]) -> list[Outcome]:
        assert is_late.wait(PATIENCE_S)
        return write(self, batch)

    monkeypatch.setattr(DiskTierWorker, "write", slow)
    monkeypatch.setattr(DiskTierWorker, "interrupt", lambda self: is_late.set())
    half = WorkerHalf(cache, **disk_options(tmp_path))
    blocks = blocks_of([0] * 3, [[1], [2], [3]])
    half.begin(stores=[StoreJob(1, blocks, slots(5, 6, 7))])
    half.end()
    for job_id, disk_slots in ((2, slots(0, 1, 2)), (3, slots(3, 4, 5))):
        spill = Spill(0, blocks.keys, blocks.groups, slots(5, 6, 7), disk_slots)
        half.begin(tier_jobs=[TierJob(job_id, msgspec.msgpack.encode(spill))])
    half.close()
    report = msgspec.msgpack.decode(half.connector.build_connector_worker_meta(), type=Report)
    assert report.jobs[1:] == [Ended(3, [0, 1, 2])], "the first one may have begun"


def test_a_half_that_was_never_started_can_be_shut_down(cache: KVCache) -> None:
    (config,) = configs_of([cache])
    OffloadingWorker(config).shutdown()


@pytest.mark.req("OFF-12")
def test_loads_and_deferred_stores_begin_with_their_plan_and_no_layer_waits(
    cache: KVCache,
) -> None:
    """A store comes with a later plan, when the step that computed its blocks was answered, so
    `wait_for_save` and the hooks of layers have nothing to do."""
    half = WorkerHalf(cache, cpu_bytes_to_use="64K")
    try:
        for hook in ("wait_for_layer_load", "save_kv_layer", "wait_for_load", "wait_for_save"):
            assert getattr(OffloadingWorker, hook) is getattr(WorkerConnector, hook)
        assert not OffloadingWorker.has_layer_hooks
        half.begin(stores=[StoreJob(1, blocks_of([0], [[3]]), slots(2))])
        _, report = half.end()
        assert report.jobs == [Ended(1)]
        half.begin(loads=[load("r", [4], 2)])
        ended, _ = half.end()
        assert list(ended.received) == ["r"]
        assert not half.end()[0].received
    finally:
        half.close()
