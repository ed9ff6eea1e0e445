"""Checkpoints that several worker tests load; each is made once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import make_tiny_llama
from tests.worker.fake_device import FakeDevice, fake_device


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """One thread, because cores are shared and sums over one thread have a fixed order."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test draws the same tensors in every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny GQA Llama: its folder, and the transformers model."""
    path = tmp_path_factory.mktemp("tiny-llama")
    return path, make_tiny_llama(path)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    """A CUDA device that checks what it is asked to do."""
    if torch.cuda.is_available():
        pytest.skip("torch would use the GPU of this machine")
    with fake_device() as device:
        yield device
