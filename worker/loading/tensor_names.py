"""The tensor names of a checkpoint, read without importing torch."""

import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Final

from longshore.protocol.model_files import exists, open_regular, parse_json, read_json

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
HEAD: Final = "lm_head.weight"
"""The output head, which is outside the decoder."""
CLASSIFIER: Final = "score.weight"
"""The head of a model for sequence classification."""

_MAX_HEADER_BYTES: Final = 100_000_000  # as safetensors itself
_LAYER: Final = re.compile(r"(?:^|\.)layers?\.(\d{1,9})\.")


def is_bare_checkpoint(names: AbstractSet[str]) -> bool:
    """Whether the checkpoint with these tensors is a decoder without its output head (see
    `bare_checkpoint.py`)."""
    return HEAD not in names and any(name.startswith("layers.") for name in names)


def tensor_names(model_dir: Path) -> frozenset[str]:
    """Empty if they cannot be read; the loader reports the error later."""
    names: Any
    try:
        single = model_dir / SINGLE_FILE
        if exists(single):
            with open_regular(single) as file:
                size = int.from_bytes(file.read(8), "little")
                names = parse_json(file.read(min(size, _MAX_HEADER_BYTES)))
        else:
            index: Any = read_json(model_dir / INDEX_FILE)
            names = index["weight_map"]
        return frozenset(name for name in names if isinstance(name, str))
    except (OSError, ValueError, LookupError, TypeError):
        return frozenset()


def num_stored_layers(names: Iterable[str]) -> int:
    """The highest number of a layer in tensor names, plus 1; 0 if none has a number."""
    found = (_LAYER.search(name) for name in names)
    return max((int(match[1]) + 1 for match in found if match is not None), default=0)
