"""The bookkeeping of the CUDA compute queue, with fake events and streams that need no device."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import ErrorType

from longshore.worker.errors import RankLost
from longshore.worker.queues.compute_queue import Completion, CudaComputeQueue
from longshore.worker.ranks.parallel import Parallel


class FakeEvent:
    """`synchronize` fails if the test wants it to. `pending`: have not happened yet when asked."""

    failing: set[int] = set()  # noqa: RUF012  # shared by all, on purpose
    pending: set[int] = set()  # noqa: RUF012
    count = 0

    def __init__(self, **_: Any) -> None:
        self.number = FakeEvent.count
        FakeEvent.count += 1

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        if self.number in FakeEvent.failing:
            raise RuntimeError("an illegal memory access was encountered")

    def query(self) -> bool:
        return self.number not in FakeEvent.pending

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1.0


class TimedOutGroup:
    """A process group of NCCL. `error`: what its watchdog has found."""

    def __init__(self) -> None:
        self.error = ErrorType.SUCCESS

    def _get_backend(self, device: torch.device) -> "TimedOutGroup":
        return self

    def get_error(self) -> ErrorType:
        return self.error


@pytest.fixture
def group() -> TimedOutGroup:
    return TimedOutGroup()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch, group: TimedOutGroup) -> Iterator[CudaComputeQueue]:
    FakeEvent.failing, FakeEvent.pending, FakeEvent.count = set(), set(), 0
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    device = torch.device("cuda")
    parallel = Parallel(shard=1, num_shards=2, shard_group=group)  # type: ignore[arg-type]
    queue = CudaComputeQueue(device, partial(parallel.check, device))
    yield queue
    queue.close()


def fail() -> None:
    raise RuntimeError("out of memory")


def test_launch_failure_is_not_forgotten_when_an_earlier_operation_ends(
    queue: CudaComputeQueue,
) -> None:
    launched: list[Completion] = []
    # While the first operation is reported, the second one's launch fails.
    first = queue.submit(lambda: None, lambda _: launched.append(queue.submit(fail)))
    assert first.wait(10)
    assert first.error is None
    assert launched[0].wait(10)
    assert "out of memory" in str(launched[0].error)
    after = queue.submit(lambda: None)
    assert after.wait(10)
    assert "out of memory" in str(after.error)


def test_operation_before_a_failed_launch_keeps_its_result(queue: CudaComputeQueue) -> None:
    completions = [queue.submit(lambda: None), queue.submit(fail), queue.submit(lambda: None)]
    assert all(completion.wait(10) for completion in completions)
    assert [completion.error is None for completion in completions] == [True, False, False]
    assert completions[0].elapsed_s == pytest.approx(1e-3)


def test_operation_after_one_that_failed_on_the_device_fails_too(queue: CudaComputeQueue) -> None:
    FakeEvent.failing = {1}  # the end of the first operation
    completions = [queue.submit(lambda: None) for _ in range(3)]
    assert all(completion.wait(10) for completion in completions)
    assert all("illegal memory access" in str(completion.error) for completion in completions)


def test_operations_of_a_process_group_that_has_timed_out_fail(
    queue: CudaComputeQueue, group: TimedOutGroup
) -> None:
    def lose_the_other_rank() -> None:
        group.error = ErrorType.TIMEOUT  # the communicator is aborted, so the launched work ends

    before = queue.submit(lambda: None)
    assert before.wait(10)
    failed = [queue.submit(lose_the_other_rank), queue.submit(lambda: None)]
    assert all(completion.wait(10) for completion in failed)
    assert before.error is None
    assert all(isinstance(completion.error, RankLost) for completion in failed)
    assert "rank 1 has lost the other ranks of its engine (NCCL: TIMEOUT)" in str(failed[0].error)


def test_the_gap_before_an_operation_is_known_if_it_was_submitted_in_time(
    queue: CudaComputeQueue,
) -> None:
    FakeEvent.pending = {3}  # the end of the second operation
    completions = [queue.submit(lambda: None) for _ in range(3)]
    assert all(completion.wait(10) for completion in completions)
    assert [completion.gap_s for completion in completions] == [None, None, pytest.approx(1e-3)]
