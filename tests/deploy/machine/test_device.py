"""Devices that a worker could not use are rejected before it starts."""

from pathlib import Path

import pytest

from longshore.deploy.machine import device
from longshore.protocol.errors import ConfigError


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the driver's device would be."""
    monkeypatch.setattr(device, "DRIVERS", (tmp_path / "nvidiactl",))
    return tmp_path / "nvidiactl"


def has_torch(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(device, "_torch_version", lambda: version)


def test_a_gpu_needs_a_cuda_build_of_torch(monkeypatch: pytest.MonkeyPatch, driver: Path) -> None:
    driver.touch()
    has_torch(monkeypatch, "2.13.0+cpu")
    with pytest.raises(ConfigError, match=r"torch 2\.13\.0\+cpu is a CPU build.*--device cpu"):
        device.require_device("cuda:1")
    device.require_device("cpu")


def test_a_gpu_needs_a_driver(monkeypatch: pytest.MonkeyPatch, driver: Path) -> None:
    has_torch(monkeypatch, "2.13.0")
    with pytest.raises(ConfigError, match=r"no driver is loaded \(.*nvidiactl is missing\)"):
        device.require_device("cuda")
    driver.touch()
    device.require_device("cuda")
