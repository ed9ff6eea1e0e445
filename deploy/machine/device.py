"""The device that the setting `auto` stands for."""

import importlib.metadata
import os
from pathlib import Path
from typing import Final

from longshore.protocol.errors import ConfigError

DRIVERS: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""Devices of GPU drivers: NVIDIA's, that of WSL, and AMD's."""


def resolve_device(device: str) -> str:
    """Resolve `auto`: `cuda` if the driver is loaded and the installed torch is not a CPU build.

    Does not import torch; only the worker does.
    """
    if device != "auto":
        return device
    has_driver = Path("/dev/nvidiactl").exists()
    return "cuda" if has_driver and not _torch_version().endswith("+cpu") else "cpu"


def require_device(device: str) -> None:
    """Raise ConfigError if a worker could not use the device: torch is a CPU build, or there is no
    driver. Does not import torch."""
    if device == "cpu":
        return
    version = _torch_version()
    if version.endswith("+cpu"):
        raise ConfigError(
            f"device={device!r} needs a CUDA build of torch, and torch {version} is a CPU build. "
            "Install torch from an index with CUDA builds, or use --device cpu."
        )
    if not any(path.exists() for path in DRIVERS):
        raise ConfigError(
            f"device={device!r} needs a GPU, and no driver is loaded ({DRIVERS[0]} is missing). "
            "Check nvidia-smi and the container's GPUs (docker: --gpus all), or use --device cpu."
        )


def num_gpus() -> int | None:
    """How many NVIDIA GPUs processes can use; None if that is not known."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip()])
    devices = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    return len(devices) or None


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
