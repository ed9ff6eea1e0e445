"""How the attention kernels make weights of products of queries and keys."""

from typing import NamedTuple

from torch import Tensor

from longshore.worker.attention.reach import Reach


class Scoring(NamedTuple):
    """scale: factor on scores. reach: the earlier tokens that a token attends to.
    softcap: limit of scores; None: no limit.
    sinks:   (num_heads,) float32 or None: see AttentionStep.
    key_scale, value_scale: factors on keys and values that are stored in fp8.
    """

    scale: float
    reach: Reach = Reach()
    softcap: float | None = None
    sinks: Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0
