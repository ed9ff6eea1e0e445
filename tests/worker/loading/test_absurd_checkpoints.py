"""Sizes in config.json that no machine can hold: they are compared with the files before anything
is allocated."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from longshore.protocol.errors import ConfigError
from longshore.worker.config import WorkerConfig
from longshore.worker.errors import BrokenCheckpoint
from longshore.worker.models.families import read_model_config
from longshore.worker.process import device as worker_device
from longshore.worker.process.device import check_memory, fits_in_memory
from longshore.worker.process.host_resources import HostMemory
from longshore.worker.worker import Worker

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def folder(checkpoint: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the checkpoint that the test may damage."""
    return Path(shutil.copytree(checkpoint[0], tmp_path / "model"))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(folder: Path) -> Worker:
    return Worker(WorkerConfig(model=str(folder), num_blocks=40, show_progress=False))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 4 * 10**6, "head_dim": 16},
        {"vocab_size": 10**12},
        {"intermediate_size": 10**12},
        {"head_dim": 10**10},
    ],
    ids=str,
)
def test_a_width_that_the_file_does_not_have_is_rejected_before_anything_is_allocated(
    folder: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    edit(folder, **changes)
    with pytest.raises(BrokenCheckpoint, match=r"has shape .*, but config\.json implies .*0000"):
        load(folder)
    assert not any("loaded" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("num_layers", "error"),
    [
        (3, r"config\.json declares 3 layers, but the checkpoint has 2"),
        (16_384, r"config\.json declares 16,384 layers, but the checkpoint has 2"),
        (10**9, "num_hidden_layers=1000000000 must be a number of at most 16,384"),
    ],
)
def test_more_layers_than_the_file_has_are_rejected_without_enumerating_them(
    folder: Path, num_layers: int, error: str
) -> None:
    edit(folder, num_hidden_layers=num_layers)
    with pytest.raises(BrokenCheckpoint, match=error):
        read_model_config(folder)


def test_without_weights_the_number_of_layers_is_limited_too(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    edit(folder, num_hidden_layers=3)
    assert read_model_config(folder).num_layers == 3
    edit(folder, num_hidden_layers=10**9)
    with pytest.raises(BrokenCheckpoint, match="at most 16,384"):
        read_model_config(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["x" * 10_000]},
        {"vocab_size": "x" * 10_000},
        {"quantization_config": "x" * 10_000},
        {"hidden_act": "x" * 10_000},
        {"layer_types": ["x" * 10_000] * 2},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "x" * 10_000: 9}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_long_values_are_not_repeated_in_errors(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder, **changes)
    with pytest.raises(ConfigError, match="xxx") as caught:
        load(folder)
    assert str(caught.value).count("x") < 250


@pytest.mark.parametrize("limit", ["control group limit", None])
def test_a_model_larger_than_memory_is_rejected_and_the_limit_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None
) -> None:
    memory = HostMemory(1 << 20, 1 << 10, None if limit is None else 1 << 10, limit)
    monkeypatch.setattr(worker_device, "host_memory", lambda: memory)
    named = "this machine has 1.00 KiB" if limit is None else "the control group limit is 1.00 KiB"
    with pytest.raises(ConfigError, match=f"The model needs .* KiB on cpu, but {named}"):
        load(folder)


def test_memory_that_is_large_enough_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_device, "host_memory", lambda: HostMemory(GIB, GIB, None))
    check_memory("The model", GIB, CPU)
    with pytest.raises(ConfigError):
        check_memory("The model", GIB + 1, CPU)


@pytest.mark.parametrize("sizes", [(10**9, 10**9), (10**12, 10**12)])
def test_an_allocation_that_fails_on_a_cpu_names_what_and_the_limit(sizes: tuple[int, int]) -> None:
    with (
        pytest.raises(ConfigError, match=r"The table cannot be allocated on cpu: .*\(.* is|has "),
        fits_in_memory("The table", CPU),
    ):
        torch.empty(sizes)


def test_other_errors_are_no_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="shape"), fits_in_memory("The table", CPU):
        torch.zeros(3).view(2, 2)
