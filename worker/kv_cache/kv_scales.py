"""The scales of an fp8 KV cache, which calibration tools write into a checkpoint."""

import logging
import math
from collections.abc import Collection
from typing import Final

from longshore.worker.errors import BrokenCheckpoint
from longshore.worker.kv_cache.fp8 import KVScales
from longshore.worker.loading.stored_weights import StoredWeights
from longshore.worker.loading.tensor_names import EMBEDDINGS, kv_scale, layout_of

logger = logging.getLogger(__name__)

_SMALLEST: Final = 2.0**-126  # smallest normal float32


def read_kv_scales(weights: StoredWeights, layers: Collection[str]) -> dict[str, KVScales]:
    """The scales of each layer in `layers`, such as `model.layers.0`; missing scales are 1.

    The tensors are `model.layers.N.self_attn.k_scale` and `v_scale`, or `k_proj.k_scale` and
    `v_proj.v_scale` in the same place, with one number each, in any layout of a checkpoint. Raises
    BrokenCheckpoint for an invalid scale.
    """
    found: dict[tuple[str, str], float] = {}
    layout = layout_of(weights.tensors.keys(), [EMBEDDINGS])
    with weights.reader() as read:
        for name in sorted(weights.tensors):
            scale_of = kv_scale(layout.own_name(name) or "")
            if scale_of is None or scale_of[0] not in layers:
                continue
            path, scale = weights.tensors[name].path, read(name, ())
            if scale.numel() != 1 or not _SMALLEST <= scale.float().item() < math.inf:
                raise BrokenCheckpoint(
                    f"{path}: {name} is {scale.tolist()}, but a KV cache scale must be one "
                    "positive number. Calibrate it again, or remove it to use the default, 1."
                )
            if found.setdefault(scale_of, scale.item()) != scale.item():
                raise BrokenCheckpoint(
                    f"{path}: {name} differs from the same scale under its other name. Remove "
                    "one of them."
                )
    logger.info("KV cache: %d of %d scales come from the checkpoint", len(found), 2 * len(layers))
    return {
        layer: KVScales(found.get((layer, "k"), 1.0), found.get((layer, "v"), 1.0))
        for layer in layers
    }
