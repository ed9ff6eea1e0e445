"""Random tokens of rows of logits on a GPU, each with its own settings, without a sort. The same in
plain torch is in `worker/sampling/sampler.py`."""

from typing import Final

import torch
from torch import Tensor

FRACTION_BITS: Final = 62
"""`u` and `top_p` are integers: multiples of 2**-62."""

MAX_SPLIT: Final = 4096
"""Tokens of a row that one program reads. With few rows it is half as many, so that there are more
programs."""

FEW_ELEMENTS: Final = 1 << 20
"""Logits that are 256 programs of MAX_SPLIT, two for each multiprocessor of a large GPU."""


def draw_tokens(
    logits: Tensor,
    best: Tensor,
    *,
    rows: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    u: Tensor,
    temperature: Tensor,
    min_p: Tensor,
) -> None:
    """Draw a token for each of n rows, and write it to `best`. Three launches, for any settings.

    logits: (num_rows, vocab_size) float32, contiguous within each line.
    best:   (num_rows,) int64, an index of each line's largest value; overwritten where it is drawn.
            It stays if the line has no token of finite logit.
    The rest is (n,); see `Draws`.

    Weights are rounded down to multiples of 2**-36 of the largest, and their sums are exact. So a
    token depends on its row's logits and settings alone. Raises ValueError for a wrong shape or
    dtype.
    """
    if (
        logits.dim() != 2
        or logits.dtype != torch.float32
        or logits.shape[1] == 0
        or logits.stride(1) != 1
        or best.shape != logits.shape[:1]
        or best.dtype != torch.int64
    ):
        raise ValueError(
            f"logits {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()} must be "
            f"torch.float32 (n, vocab_size), contiguous within each line, and best {best.dtype} "
            f"{tuple(best.shape)} torch.int64 (n,)"
        )
    for dtype, columns in (
        (torch.int64, {"rows": rows, "top_k": top_k, "top_p": top_p, "u": u}),
        (torch.float32, {"temperature": temperature, "min_p": min_p}),
    ):
        for name, column in columns.items():
            if column.dtype != dtype or column.shape != (len(rows),) or column.stride(0) != 1:
                raise ValueError(
                    f"{name} {column.dtype} {tuple(column.shape)} must be {dtype} "
                    f"({len(rows)},), contiguous"
                )
    from longshore.worker.kernels.gpu import draw_tokens as gpu

    split = MAX_SPLIT if len(rows) * logits.shape[1] > FEW_ELEMENTS else MAX_SPLIT // 2
    gpu.draw_tokens(logits, best, rows, top_k, top_p, u, temperature, min_p, split)
