"""The bookkeeping of the CUDA compute queue, with fake events and streams that need no device."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from longshore.worker.queues.compute_queue import Completion, CudaComputeQueue


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


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaComputeQueue]:
    FakeEvent.failing, FakeEvent.pending, FakeEvent.count = set(), set(), 0
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    queue = CudaComputeQueue(torch.device("cuda"))
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


def test_the_gap_before_an_operation_is_known_if_it_was_submitted_in_time(
    queue: CudaComputeQueue,
) -> None:
    FakeEvent.pending = {3}  # the end of the second operation
    completions = [queue.submit(lambda: None) for _ in range(3)]
    assert all(completion.wait(10) for completion in completions)
    assert [completion.gap_s for completion in completions] == [None, None, pytest.approx(1e-3)]
