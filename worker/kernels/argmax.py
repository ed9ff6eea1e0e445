"""The most likely token of each line of logits, and its non-finite values, in one pass."""

import torch
from torch import Tensor

from longshore.worker.kernels.native import ARGMAX, kernels_for, num_threads
from longshore.worker.kernels.operators import uses_triton


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits: (n, vocab_size) float32, contiguous within each line.

    Returns (n,) int64, the lowest index among each line's largest values, and (n,) int32, the
    number of its values that are NaN or infinite. The index of a line with NaN is arbitrary.
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
    if uses_triton(logits):
        from longshore.worker.kernels.gpu import argmax as gpu

        found: tuple[Tensor, Tensor] = gpu.argmax(logits)
        return found
    kernels = kernels_for(logits)
    if kernels is None:
        return reference(logits)
    num_rows, size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64)
    num_non_finite = torch.empty(num_rows, dtype=torch.int32)
    kernels.run(
        "argmax",
        logits.dtype,
        ARGMAX.pack(
            logits.data_ptr(),
            out.data_ptr(),
            num_non_finite.data_ptr(),
            num_rows,
            size,
            logits.stride(0),
            num_threads(num_rows * size * logits.element_size()),
        ),
    )
    return out, num_non_finite


def reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the same in plain torch."""
    num_non_finite = logits.isfinite().logical_not_().sum(dim=-1, dtype=torch.int32)
    return logits.argmax(dim=-1), num_non_finite
