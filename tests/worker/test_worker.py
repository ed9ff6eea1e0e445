"""A worker that serves one scheduler after another."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longshore.worker import worker as worker_module
from longshore.worker.config import WorkerConfig
from longshore.worker.loading.host_weights import tensors_of
from longshore.worker.step import device_step
from longshore.worker.step.model_runner import ModelRunner
from longshore.worker.transfer.connector import HookFailed
from longshore.worker.worker import Worker
from tests.worker.plans import Entry, Planner
from tests.worker.recording_connector import RecordingConnector

NUM_BLOCKS = 40


@pytest.fixture(params=[False, True], ids=["plain", "poisoned"])
def worker(request: pytest.FixtureRequest, checkpoint: tuple[Path, Any]) -> Iterator[Worker]:
    config = WorkerConfig(
        model=str(checkpoint[0]),
        num_blocks=NUM_BLOCKS,
        max_num_seqs=8,
        poison_kv=request.param,
        show_progress=False,
    )
    with Worker(config) as worker:
        yield worker


def run(runner: ModelRunner, epoch: int, row: int) -> list[int]:
    """Tokens of a request, which is not finished."""
    plans = Planner(num_blocks=NUM_BLOCKS, block_size=16, epoch=epoch, seed=epoch)
    steps = [plans.plan({row: 30}, added=[Entry(row, range(3, 33))])]
    steps += [plans.plan() for _ in range(20)]
    return [token for step in steps for token in runner.execute(step).sampled_tokens.tolist()]


def test_a_new_epoch_has_the_former_cache_and_warm_up_and_no_former_row(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = worker.start(epoch=1)
    calm = run(runner, 1, row=2)
    monkeypatch.setattr(runner, "warm_up", None)
    monkeypatch.setattr(worker, "make_cache", None)
    for epoch in (2, 3):
        worker.end_epoch()
        again = worker.start(epoch=epoch)
        assert again is runner
        assert run(again, epoch, row=2 if epoch == 2 else 0) == calm


def test_a_new_epoch_has_a_connector_of_its_own(worker: Worker) -> None:
    first, second = RecordingConnector(), RecordingConnector()
    worker.start(epoch=1, connector=first)
    worker.end_epoch()
    assert first.calls[-1].hook == "shutdown"
    worker.start(epoch=2, connector=second)
    assert worker.connector is not None
    assert worker.connector.connector is second
    assert second.kv_caches is not None


def test_an_epoch_whose_transfers_go_on_is_the_last(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something may still write to the blocks, so they are neither used again nor freed."""
    connector = RecordingConnector()
    worker.start(epoch=1, connector=connector)
    calls: list[str] = []

    def shutdown() -> None:
        calls.append("shutdown")
        raise RuntimeError("a read goes on")

    with monkeypatch.context() as patch:
        patch.setattr(connector, "shutdown", shutdown)
        for _ in range(2):
            with pytest.raises(HookFailed, match="a read goes on"):
                worker.end_epoch()
        worker.close()
    assert calls == ["shutdown"]
    assert worker._cache is not None
    worker.connector = None  # for the fixture


def test_a_new_epoch_with_another_number_of_blocks_has_a_cache_of_that_size(
    worker: Worker,
) -> None:
    runner = worker.start(epoch=1)
    calm = run(runner, 1, row=2)
    worker.end_epoch()
    again = worker.start(epoch=2, num_blocks=NUM_BLOCKS - 5)
    assert again is not runner
    plans = Planner(num_blocks=NUM_BLOCKS - 5, block_size=16, epoch=2)
    step = plans.plan({0: 30}, added=[Entry(0, range(3, 33))])
    assert again.execute(step).sampled_tokens.tolist() == calm[:1]


def test_a_worker_that_slept_has_an_empty_cache_and_the_same_tokens(worker: Worker) -> None:
    runner = worker.start(epoch=1)
    calm = run(runner, 1, row=2)
    assert worker._cache is not None
    memory = weakref.ref(worker._cache.buffer.untyped_storage())
    runner_alive = weakref.ref(runner)
    del runner
    worker.sleep()
    gc.collect()
    assert memory() is None
    assert runner_alive() is None
    worker.sleep()
    again = worker.start(epoch=2, num_blocks=NUM_BLOCKS)
    assert run(again, 2, row=2) == calm


def test_weights_of_a_sleeping_worker_are_on_the_host_until_it_starts(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: here the device is the host, too."""
    calm = run(worker.start(epoch=1), 1, row=2)
    monkeypatch.setattr(worker_module, "leave_device", lambda device: True)
    worker.sleep()
    weights = [tensor for tensor in tensors_of(worker.model) if tensor.dim()]
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in weights)
    worker.sleep()
    assert run(worker.start(epoch=2), 2, row=2) == calm


def test_a_worker_whose_transfers_go_on_does_not_sleep(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = RecordingConnector()
    worker.start(epoch=1, connector=connector)

    def shutdown() -> None:
        raise RuntimeError("a read goes on")

    monkeypatch.setattr(connector, "shutdown", shutdown)
    with pytest.raises(HookFailed, match="a read goes on"):
        worker.sleep()
    assert worker._cache is not None
    worker.connector = None  # for the fixture


def test_a_step_without_memory_returns_what_torch_keeps_when_its_tensors_are_gone(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = worker.start(epoch=1)
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def fail(x: torch.Tensor, *_: Any) -> None:
        large = x.clone()
        made.append(weakref.ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def release(device: torch.device) -> None:
        alive.append(made[0]() is not None)

    monkeypatch.setattr(worker.model, "run_layers", fail)
    monkeypatch.setattr(device_step, "release_unused_memory", release)
    plans = Planner(num_blocks=NUM_BLOCKS, block_size=16, epoch=1)
    assert runner.execute(plans.plan({0: 30}, added=[Entry(0, range(3, 33))])).is_out_of_memory
    assert alive == [False]
