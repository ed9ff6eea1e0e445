"""The tensor names of a checkpoint, read without importing torch."""

import json
from pathlib import Path
from typing import Final

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
HEAD: Final = "lm_head.weight"
"""The output head, which is outside the decoder."""

_MAX_HEADER_BYTES: Final = 100_000_000  # as safetensors itself


def is_bare_checkpoint(model_dir: Path) -> bool:
    """Whether the checkpoint is a decoder without its output head (see `bare_checkpoint.py`)."""
    names = tensor_names(model_dir)
    return HEAD not in names and any(name.startswith("layers.") for name in names)


def tensor_names(model_dir: Path) -> frozenset[str]:
    """Empty if they cannot be read; the loader reports the error later."""
    try:
        single = model_dir / SINGLE_FILE
        if single.exists():
            with single.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                names = json.loads(file.read(min(size, _MAX_HEADER_BYTES)))
        else:
            names = json.loads((model_dir / INDEX_FILE).read_bytes())["weight_map"]
        return frozenset(names)
    except (OSError, ValueError, LookupError, TypeError):
        return frozenset()
