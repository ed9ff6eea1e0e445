"""The scales of an fp8 KV cache, which calibration tools write into a checkpoint."""

import logging
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

from longshore.worker.errors import BrokenCheckpoint
from longshore.worker.kv_cache.fp8 import KVScales
from longshore.worker.loading.loader import find_tensors, open_safetensors

logger = logging.getLogger(__name__)

_SCALE: Final = re.compile(
    r"(?:model\.)?(?P<layer>layers\.\d+)\.self_attn\.(?:k_proj\.(?=k)|v_proj\.(?=v))?(?P<of>[kv])_scale"
)
_SMALLEST: Final = 2.0**-126  # smallest normal float32


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of a checkpoint is a scale for keys or values in fp8."""
    return _SCALE.fullmatch(name) is not None


def read_kv_scales(model_dir: Path, layers: Collection[str]) -> dict[str, KVScales]:
    """The scales of each layer in `layers`, such as `model.layers.0`; missing scales are 1.

    The tensors are `model.layers.N.self_attn.k_scale` and `v_scale`, or `k_proj.k_scale` and
    `v_proj.v_scale` in the same place, with one number each. Bare checkpoints have no `model.`
    prefix. Raises BrokenCheckpoint for an invalid scale.
    """
    found: dict[tuple[str, str], float] = {}
    for path, names in find_tensors(model_dir).items():
        with open_safetensors(path) as file:
            for name in sorted(names):
                match = _SCALE.fullmatch(name)
                if match is None or (layer := f"model.{match['layer']}") not in layers:
                    continue
                scale = file.get_tensor(name)
                if scale.numel() != 1 or not _SMALLEST <= scale.float().item() < math.inf:
                    raise BrokenCheckpoint(
                        f"{path}: {name} is {scale.tolist()}, but a KV cache scale must be one "
                        "positive number. Calibrate it again, or remove it to use the default, 1."
                    )
                if found.setdefault((layer, match["of"]), scale.item()) != scale.item():
                    raise BrokenCheckpoint(
                        f"{path}: {name} differs from the same scale under its other name. Remove "
                        "one of them."
                    )
    logger.info("KV cache: %d of %d scales come from the checkpoint", len(found), 2 * len(layers))
    return {
        layer: KVScales(found.get((layer, "k"), 1.0), found.get((layer, "v"), 1.0))
        for layer in layers
    }
