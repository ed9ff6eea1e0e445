"""The compute queue of a CPU: order, asynchrony, and failures."""

import threading
import time

import pytest
import torch

from longshore.worker.queues.compute_queue import (
    Completion,
    CpuComputeQueue,
    open_compute_queue,
)
from longshore.worker.step.staging import StagingRing


def test_operations_and_their_hooks_run_in_order_of_submission() -> None:
    queue = CpuComputeQueue()
    seen: list[str] = []
    for index in range(5):
        queue.submit(
            lambda index=index: seen.append(f"run {index}"),  # type: ignore[misc]
            lambda _, index=index: seen.append(f"done {index}"),  # type: ignore[misc]
        )
    queue.close()
    assert seen == [text for index in range(5) for text in (f"run {index}", f"done {index}")]


def test_an_operation_is_done_only_after_its_hook() -> None:
    queue = CpuComputeQueue()
    gate, states = threading.Event(), []
    completion: Completion

    def hook(done: Completion) -> None:
        gate.wait()
        states.append(done.is_done())

    completion = queue.submit(lambda: None, hook)
    assert not completion.wait(0.02)
    gate.set()
    assert completion.wait(10)
    assert states == [False]
    queue.close()


def test_a_failure_reaches_its_own_and_all_later_operations_which_do_not_run() -> None:
    queue = CpuComputeQueue()
    ran: list[int] = []
    errors: list[Exception | None] = []

    def fail() -> None:
        raise ArithmeticError("lost a bit")

    queue.submit(lambda: ran.append(1), lambda done: errors.append(done.error))
    queue.submit(fail, lambda done: errors.append(done.error))
    last = queue.submit(lambda: ran.append(2), lambda done: errors.append(done.error))
    assert last.wait(10)
    assert ran == [1]
    assert errors[0] is None
    assert errors[1] is errors[2] is last.error
    assert isinstance(last.error, ArithmeticError)
    queue.close()


def test_closing_finishes_what_was_submitted() -> None:
    queue = open_compute_queue(torch.device("cpu"))
    gate, ran = threading.Event(), []
    queue.submit(gate.wait)
    completion = queue.submit(lambda: ran.append(1))
    threading.Timer(0.02, gate.set).start()
    queue.close()
    assert completion.is_done()
    assert ran == [1]


def test_operations_run_without_autograd() -> None:
    queue = CpuComputeQueue()
    modes: list[bool] = []
    queue.submit(lambda: modes.append(torch.is_inference_mode_enabled())).wait()
    assert modes == [True]
    queue.close()


def test_the_time_of_an_operation_leaves_out_the_wait_before_it() -> None:
    waited_until: list[float] = []

    def wait() -> None:
        threading.Event().wait(0.5)
        waited_until.append(time.perf_counter())

    queue = CpuComputeQueue(before_each=wait)
    completion = queue.submit(lambda: None)
    completion.wait()
    assert completion.elapsed_s < time.perf_counter() - waited_until[0]
    queue.close()


def test_a_ring_hands_out_each_set_once_before_it_waits() -> None:
    ring = StagingRing({"values": ((4,), torch.int64)}, pin_memory=False, depth=2)
    fences = [Completion(), Completion()]
    sets = []
    for fence in fences:
        staging = ring.acquire()
        staging.arrays["values"][:] = len(sets)
        staging.guard(fence)
        sets.append(staging)
    assert sets[0].tensors["values"].tolist() == [0, 0, 0, 0]
    assert sets[1].tensors["values"].tolist() == [1, 1, 1, 1]
    taken = threading.Event()
    third: list[object] = []

    def take() -> None:
        third.append(ring.acquire())
        taken.set()

    threading.Thread(target=take, daemon=True).start()
    assert not taken.wait(0.05), "the oldest set is still guarded"
    fences[0].finish()
    assert taken.wait(10)
    assert third == [sets[0]]


@pytest.mark.gpu
def test_the_cuda_queue_keeps_order_and_reports_time() -> None:
    queue = open_compute_queue(torch.device("cuda", 0))
    values = torch.zeros(1 << 20, device="cuda")
    host = torch.zeros(1 << 20, pin_memory=True)
    for _ in range(100):
        queue.submit(lambda: values.add_(1))
    seen: list[float] = []
    last = queue.submit(
        lambda: host.copy_(values, non_blocking=True), lambda _: seen.append(float(host.sum()))
    )
    assert last.wait(60)
    assert seen == [100.0 * (1 << 20)]
    assert last.elapsed_s > 0
    queue.close()


def test_a_failing_callback_ends_the_queue_and_completes_all_operations() -> None:
    def listener(completion: Completion) -> None:
        raise RuntimeError("nobody listens")

    queue = CpuComputeQueue()
    assert queue.submit(lambda: None, listener).wait(10)
    ran: list[int] = []
    after = queue.submit(lambda: ran.append(1))
    assert after.wait(10)
    assert "nobody listens" in str(after.error)
    assert ran == []
    queue.close()


def test_the_log_of_a_failure_names_the_step(caplog: pytest.LogCaptureFixture) -> None:
    queue = CpuComputeQueue()
    queue.submit(lambda: 1 / 0, step_id=41)
    queue.close()
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert vars(record)["fields"] == {"step_id": 41}


def test_the_gap_before_an_operation_is_known_if_it_was_submitted_in_time() -> None:
    queue = CpuComputeQueue()
    released = threading.Event()
    first = queue.submit(lambda: released.wait(10))
    ahead = queue.submit(lambda: time.sleep(0.01))
    released.set()
    assert ahead.wait(10)
    late = queue.submit(lambda: None)
    assert late.wait(10)
    assert (first.gap_s, late.gap_s) == (None, None)
    assert ahead.gap_s is not None
    assert 0 <= ahead.gap_s < 5
    queue.close()
