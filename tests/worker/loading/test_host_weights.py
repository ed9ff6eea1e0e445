"""Weights that leave the device and come back; here the device is the CPU itself."""

import functools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longshore.worker.config import WorkerConfig
from longshore.worker.layers.matrix_memory import MatrixMemory
from longshore.worker.loading import host_weights
from longshore.worker.loading.host_weights import HostWeights, tensors_of
from longshore.worker.worker import Worker
from tests.models import make_tiny_model
from tests.worker.models.cases import CASES

CPU = torch.device("cpu")
FAMILIES = {case.family: case for case in reversed(CASES)}


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


GLOBAL = torch.ones(3)


def closing_over(tensor: Tensor) -> Any:
    return lambda: (tensor, GLOBAL)


def test_tensors_are_found_wherever_an_object_keeps_them() -> None:
    numbers = [torch.full((2,), float(n)) for n in range(8)]
    root = SimpleNamespace(
        listed=[numbers[0], (numbers[1], {"key": numbers[2]})],
        slotted=Slotted(numbers[3]),
        bound=Slotted(numbers[4]).__repr__,
        partial=functools.partial(print, numbers[5]),
        closure=closing_over(numbers[6]),
        view=numbers[7][:1],
        itself=None,
        logger=logging.getLogger(__name__),
        kind=type(GLOBAL),
    )
    root.itself = root
    found = {float(tensor.view(-1)[0]) for tensor in tensors_of(root)}
    assert found == {0, 1, 2, 3, 4, 5, 6, 7}
    assert not any(tensor is GLOBAL for tensor in tensors_of(root))


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 1000, 7])
def test_storages_are_freed_and_come_back_under_the_same_tensors(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(host_weights, "CHUNK_BYTES", chunk_bytes)
    big = torch.randn(33, 17)
    tensors = [big, big[3:5], big.t(), torch.randn(5).bfloat16(), torch.empty(0), torch.arange(9)]
    before = [tensor.clone() for tensor in tensors]
    asleep = HostWeights(SimpleNamespace(tensors=tensors), CPU)
    assert asleep.num_bytes == 33 * 17 * 4 + 5 * 2 + 9 * 8
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    asleep.restore()
    for tensor, expected in zip(tensors, before, strict=True):
        assert torch.equal(tensor, expected)
    assert tensors[1].data_ptr() == big.data_ptr() + 3 * 17 * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_every_family_leave_and_return_bit_by_bit(
    family: str, tmp_path: Path
) -> None:
    """All memory of the model leaves: nothing that a step could read is left behind."""
    make_tiny_model(family, tmp_path, **FAMILIES[family].settings)
    config = WorkerConfig(
        model=str(tmp_path), num_blocks=200, max_num_seqs=4, max_model_len=64, show_progress=False
    )
    with Worker(config) as worker:
        before = [tensor.clone() for tensor in tensors_of(worker.model)]
        asleep = HostWeights(worker.model, worker._device)
        assert asleep.num_bytes >= worker._weight_bytes
        left = [tensor for tensor in tensors_of(worker.model) if tensor.untyped_storage().nbytes()]
        assert left == []
        asleep.restore()
        after = list(tensors_of(worker.model))
        assert len(after) == len(before)
        for tensor, expected in zip(after, before, strict=True):
            assert torch.equal(tensor, expected)


def test_a_packed_matrix_keeps_no_memory_that_nothing_has_written() -> None:
    """Such memory may be a NaN, which does not equal itself when it has come back."""
    memory = MatrixMemory(4, 8, torch.float32, CPU, read=None)
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        memory.release()
    finally:
        torch.use_deterministic_algorithms(False)
    assert memory.tensor.shape == (4, 8)
    assert not memory.tensor.isnan().any()
