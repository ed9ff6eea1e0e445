"""The most likely token of each line of logits."""

import torch
from torch import Tensor

from longshore.worker.kernels.native import ARGMAX, DTYPES, kernels_for, num_threads


def argmax(logits: Tensor) -> Tensor:
    """logits: (n, vocab_size) float32, a line's elements adjacent -> (n,) int64, the lowest index
    among a line's largest values. A line with NaN gets an index that means nothing.

    Raises ValueError for another shape or dtype.
    """
    if (
        logits.dim() != 2
        or logits.dtype != torch.float32
        or logits.shape[1] == 0
        or logits.stride(1) != 1
    ):
        raise ValueError(
            f"logits {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()} must be "
            "torch.float32 (n, vocab_size), contiguous within each line"
        )
    kernels = kernels_for(logits)
    if kernels is None:
        return reference(logits)
    num_rows, size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64)
    kernels.argmax[DTYPES[logits.dtype]](
        ARGMAX.pack(
            logits.data_ptr(),
            out.data_ptr(),
            num_rows,
            size,
            logits.stride(0),
            num_threads(num_rows * size * logits.element_size()),
        )
    )
    return out


def reference(logits: Tensor) -> Tensor:
    """The same in plain torch."""
    return logits.argmax(dim=-1)
