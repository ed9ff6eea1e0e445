"""Transfer queues on the host: order, waiting for steps, failures."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from longshore.worker.queues.compute_queue import CpuComputeQueue
from longshore.worker.queues.transfer_queues import HostTransferQueue, WorkerQueues

CPU = torch.device("cpu")


@pytest.fixture
def compute() -> Iterator[CpuComputeQueue]:
    queue = CpuComputeQueue()
    yield queue
    queue.close()


@pytest.fixture
def queue() -> Iterator[HostTransferQueue]:
    queue = HostTransferQueue("transfers")
    yield queue
    queue.close()


@pytest.mark.req("WRK-04")
def test_operations_run_in_order_although_each_is_delayed() -> None:
    delays = iter([0.02, 0.0, 0.01])
    queue = HostTransferQueue("transfers", lambda: time.sleep(next(delays)))
    ran: list[int] = []
    ended: list[int] = []
    for number in range(3):
        queue.submit(
            lambda number=number: ran.append(number),  # type: ignore[misc]
            lambda _, number=number: ended.append(number),  # type: ignore[misc]
        )
    queue.close()
    assert ran == ended == [0, 1, 2]


@pytest.mark.req("WRK-05")
def test_an_operation_waits_for_the_steps_submitted_before_it(
    compute: CpuComputeQueue, queue: HostTransferQueue
) -> None:
    may_compute = threading.Event()
    written = torch.zeros(1)

    def step() -> None:
        assert may_compute.wait(10)
        written.fill_(7)

    compute.submit(step)
    read: list[float] = []
    event = queue.submit(lambda: read.append(float(written)), after=[compute.computed()])
    assert not event.wait(0.05), "it read before the step had written"
    may_compute.set()
    assert event.wait(10)
    assert read == [7.0]


def test_an_idle_compute_queue_keeps_no_operation_waiting(
    compute: CpuComputeQueue, queue: HostTransferQueue
) -> None:
    assert compute.computed().is_done()
    assert queue.submit(lambda: None, after=[compute.computed()]).wait(10)


def test_a_step_can_wait_for_a_transfer(compute: CpuComputeQueue, queue: HostTransferQueue) -> None:
    may_load = threading.Event()
    loaded = torch.zeros(1)

    def load() -> None:
        assert may_load.wait(10)
        loaded.fill_(3)

    event = queue.submit(load)
    seen: list[float] = []

    def step() -> None:
        event.wait_on_queue()
        seen.append(float(loaded))

    completion = compute.submit(step)
    assert not completion.wait(0.05)
    may_load.set()
    assert completion.wait(10)
    assert seen == [3.0]


def test_a_failure_affects_only_its_operation(queue: HostTransferQueue) -> None:
    def fail() -> None:
        raise OSError("the disk is full")

    errors: list[Exception | None] = []
    failed = queue.submit(fail, lambda event: errors.append(event.error))
    after = queue.submit(lambda: None, lambda event: errors.append(event.error))
    assert failed.wait(10)
    assert after.wait(10)
    assert [str(error) for error in errors] == ["the disk is full", "None"]
    assert failed.error is errors[0]


def test_an_operation_after_a_failed_step_fails_without_running(
    compute: CpuComputeQueue, queue: HostTransferQueue
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    compute.submit(fail)
    ran: list[int] = []
    event = queue.submit(lambda: ran.append(1), after=[compute.computed()])
    assert event.wait(10)
    assert "out of memory" in str(event.error)
    assert ran == []


def test_a_callback_that_raises_does_not_end_the_queue(queue: HostTransferQueue) -> None:
    def listener(event: object) -> None:
        raise RuntimeError("nobody listens")

    assert queue.submit(lambda: None, listener).wait(10)
    ran: list[int] = []
    assert queue.submit(lambda: ran.append(1)).wait(10)
    assert ran == [1]


def test_closing_finishes_every_queue(compute: CpuComputeQueue) -> None:
    woken: list[int] = []
    queues = WorkerQueues(CPU, compute, lambda: woken.append(1))
    ran: list[str] = []
    for name in ("loads", "stores"):
        queues.open(name).submit(lambda name=name: ran.append(name))  # type: ignore[misc]
    queues.wake()
    queues.close()
    assert sorted(ran) == ["loads", "stores"]
    assert woken == [1]
