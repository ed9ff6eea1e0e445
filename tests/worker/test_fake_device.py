"""The fake device raises for what a real one would reject or make the host wait for, and for
nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longshore.worker.config import WorkerConfig
from longshore.worker.kernels.rms_norm import rms_norm
from longshore.worker.layers.rms_norm import RMSNorm
from longshore.worker.worker import Worker
from tests.models import make_tiny_config
from tests.worker.fake_device import CUDA, FakeDevice, MixedDevices, WaitsForDevice, fake_device
from tests.worker.plans import Entry, Planner


def zeros(*shape: int, **settings: Any) -> Tensor:
    return torch.zeros(shape, device=CUDA, **settings)


HOST = torch.zeros(3)
PINNED = {"pin_memory": True}

WAITS: dict[str, Callable[[], object]] = {
    "item": lambda: zeros(1).item(),
    "tolist": lambda: zeros(2).tolist(),
    "bool": lambda: bool(zeros(1)),
    "int": lambda: int(zeros(1)),
    "equal": lambda: torch.equal(zeros(2), zeros(2)),
    "cpu": lambda: zeros(2).cpu(),
    "numpy": lambda: zeros(2).cpu().numpy(),
    "nonzero": lambda: zeros(2).nonzero(),
    "unique": lambda: zeros(2).unique(),
    "reading by a mask": lambda: zeros(2)[zeros(2) > 0],
    "writing by a mask": lambda: zeros(2).index_put_((zeros(2) > 0,), zeros(2)),
    "repeat_interleave": lambda: zeros(2).repeat_interleave(zeros(2, dtype=torch.int64)),
    "indexing by a list": lambda: zeros(3)[[0, 2]],
    "writing a number to an element": lambda: zeros(3).__setitem__(0, 1.0),
    "torch.tensor": lambda: torch.tensor([1, 2], device=CUDA),
    "new_tensor": lambda: zeros(1).new_tensor([1, 2]),
    "as_tensor": lambda: torch.as_tensor(np.zeros(2), device=CUDA),
    "to the device": lambda: torch.zeros(2, **PINNED).to(CUDA),
    "to the device, not pinned": lambda: torch.zeros(2).to(CUDA, non_blocking=True),
    "into the device": lambda: zeros(2).copy_(torch.zeros(2, **PINNED)),
    "into the device, not pinned": lambda: zeros(2).copy_(torch.zeros(2), non_blocking=True),
    "into the host": lambda: torch.zeros(2, **PINNED).copy_(zeros(2)),
    "into the host, not pinned": lambda: torch.zeros(2).copy_(zeros(2), non_blocking=True),
    "synchronize": lambda: torch.cuda.synchronize(),
}
MIXES: dict[str, Callable[[], object]] = {
    "sum": lambda: zeros(3) + HOST,
    "in place": lambda: zeros(3).add_(HOST),
    "out": lambda: torch.add(zeros(3), zeros(3), out=torch.zeros(3)),
    "product": lambda: zeros(2, 3) @ HOST,
    "linear": lambda: torch.nn.functional.linear(zeros(2, 3), torch.zeros(5, 3)),
    "index": lambda: zeros(3)[torch.zeros(2, dtype=torch.int64)],
    "index_select": lambda: torch.zeros(3).index_select(0, zeros(2, dtype=torch.int64)),
    "cat": lambda: torch.cat((zeros(3), HOST)),
    "a Triton operator": lambda: rms_norm(zeros(2, 3), HOST, 1e-5),
}
FINE: dict[str, Callable[[], object]] = {
    "pinned, to the device": lambda: torch.zeros(4, **PINNED)[1:].to(CUDA, non_blocking=True),
    "pinned later": lambda: torch.from_numpy(np.ones(3)).pin_memory().to(CUDA, non_blocking=True),
    "into pinned memory": lambda: torch.zeros(4, **PINNED)[:2].copy_(zeros(2), non_blocking=True),
    "nothing": lambda: torch.zeros(0).to(CUDA, non_blocking=True),
    "numbers": lambda: (zeros(3) + 1).mul_(2.0).clamp_(min=0).masked_fill_(zeros(3) > 0, 1.0),
    "a number from the host": lambda: zeros(3) + torch.tensor(2.0),
    "a number by a mask": lambda: zeros(3).__setitem__(zeros(3) > 0, 1.0),
    "an index": lambda: zeros(3)[zeros(2, dtype=torch.int64)],
    "a new tensor": lambda: zeros(3).new_empty(2).copy_(torch.arange(2, device=CUDA)),
    "another dtype": lambda: zeros(3).double().to(torch.bfloat16),
}


@pytest.mark.parametrize("case", WAITS)
def test_what_makes_the_host_wait_raises(case: str, device: FakeDevice) -> None:
    with pytest.raises(WaitsForDevice):
        WAITS[case]()


@pytest.mark.parametrize("case", MIXES)
def test_tensors_of_host_and_device_together_raise(case: str, device: FakeDevice) -> None:
    with pytest.raises(MixedDevices):
        MIXES[case]()


@pytest.mark.parametrize("case", FINE)
def test_what_a_device_does_by_itself_is_done(case: str, device: FakeDevice) -> None:
    FINE[case]()


def test_a_captured_step_takes_nothing_from_the_host(device: FakeDevice) -> None:
    staged = torch.zeros(2, pin_memory=True)
    with device.capturing(), pytest.raises(WaitsForDevice, match="captured in a graph"):
        staged.to(CUDA, non_blocking=True)


def test_where_the_host_may_wait_the_device_answers_with_zeros(device: FakeDevice) -> None:
    with device.waiting():
        assert zeros(2, dtype=torch.int64).tolist() == [0, 0]
        assert zeros(1).cpu().numpy() == 0.0
        assert torch.equal(zeros(2), zeros(2))
    with pytest.raises(WaitsForDevice):
        zeros(1).item()


def test_kernels_copies_and_memory_are_counted(device: FakeDevice) -> None:
    x, weight = zeros(4, 8, dtype=torch.bfloat16), zeros(8, dtype=torch.bfloat16)
    staged = torch.zeros(4, pin_memory=True)
    with device.counting() as counts:
        rms_norm(x, weight, 1e-5)  # an operator of one launch, 64 bytes
        x.view(2, 16)[:1].unsqueeze(0)
        x.add_(1).mul_(2)
        torch.empty_like(x)
        wide = x.float()  # 128 bytes
        wide = wide.float()
        del wide
        staged.to(CUDA, non_blocking=True)
        staged.add_(1)
    assert (counts.num_kernels, counts.num_copies, counts.peak_bytes) == (4, 1, 128)


PLANTED: dict[str, tuple[Callable[[Tensor], object], type[Exception]]] = {
    "a wait": (lambda x: x.sum().item(), WaitsForDevice),
    "mixed devices": (lambda x: x + torch.zeros(x.shape), MixedDevices),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_fault_that_is_planted_in_a_layer_ends_the_step(
    planted: str, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_config("Llama", tmp_path)
    settings = {"device": "cuda", "load_format": "dummy", "num_blocks": 40, "max_num_seqs": 2}
    runner = Worker(WorkerConfig(model=str(tmp_path), enforce_eager=True, **settings)).start()
    plans = Planner(num_blocks=40, block_size=16, max_num_seqs=2)
    runner.execute(plans.plan({0: 3}, added=[Entry(0, [5, 6, 7])]))
    fault, error = PLANTED[planted]
    norm = RMSNorm.__call__

    def faulty(self: RMSNorm, x: Tensor, *rest: Any) -> Any:
        fault(x)
        return norm(self, x, *rest)

    monkeypatch.setattr(RMSNorm, "__call__", faulty)
    with pytest.raises(error):
        runner.execute(plans.plan())


def test_tensors_of_the_host_are_real(device: FakeDevice) -> None:
    assert (HOST + torch.ones(3)).tolist() == [1.0] * 3


def test_torch_has_no_device_after_the_block() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a device of its own")
    with fake_device():
        zeros(1)
    with pytest.raises(AssertionError, match="not compiled with CUDA"):
        zeros(1)
