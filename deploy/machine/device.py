"""The device that the setting `auto` stands for."""

import importlib.metadata
from pathlib import Path


def resolve_device(device: str) -> str:
    """Resolve `auto`: `cuda` if the driver is loaded and the installed torch is not a CPU build.

    Does not import torch; only the worker does.
    """
    if device != "auto":
        return device
    has_driver = Path("/dev/nvidiactl").exists()
    return "cuda" if has_driver and not _torch_version().endswith("+cpu") else "cpu"


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
