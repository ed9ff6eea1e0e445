"""The interpreter and the device of scripts/gpu_check and scripts/profile_gpu."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent


def use_environment() -> None:
    """Restart with .venv's interpreter if this one has no torch."""
    python = ROOT / ".venv/bin/python"
    is_elsewhere = Path(sys.executable) != python and python.exists()
    if importlib.util.find_spec("torch") is None and is_elsewhere:
        os.execv(python, [str(python), *sys.argv])


def has_device() -> bool:
    import torch

    return torch.cuda.is_available()
