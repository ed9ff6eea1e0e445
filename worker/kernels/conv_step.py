"""One token of each sequence through a short convolution, whose last inputs are all its state."""

from typing import NamedTuple

import torch
from torch import Tensor

from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.state_sequences import placement
from longshore.worker.kv_cache.state_pages import StatePages

KEPT_INPUTS = 1
"""The tensor of the state that is not empty."""


class ConvWeights(NamedTuple):
    """The weights of one layer.

    weight: (conv_width, channels) float32, oldest token first; bias: (channels,) float32 or None.
    """

    weight: Tensor
    bias: Tensor | None


def conv_step(
    inputs: Tensor,
    pages: StatePages,
    layer: int,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    weights: ConvWeights,
) -> Tensor:
    """Advance each sequence by one token, as `state_step` does for Mamba 2; layer, table, rows and
    lens are as there.

    inputs: (n, channels), contiguous within a token.
    pages:  of states (channels, 0) float32, and kept inputs (conv_width - 1, channels) in the dtype
            of `inputs`.
    Returns (n, channels) float32, without an activation.
    """
    if uses_triton(inputs):
        from longshore.worker.kernels.gpu import state_step as gpu

        buffer, _, (_, first_unit), *sizes = placement(pages, layer, inputs.dtype)
        out: Tensor = gpu.conv_step(
            inputs, buffer, first_unit, *sizes, block_table, rows, lens, *weights
        )
        return out
    return reference(inputs, pages, layer, block_table, rows, lens, weights)


def reference(
    inputs: Tensor,
    pages: StatePages,
    layer: int,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    weights: ConvWeights,
) -> Tensor:
    """Compute the same in plain torch, one sequence at a time, in the dtype of the states."""
    out = inputs.new_zeros(inputs.shape, dtype=pages.dtypes[0])
    for index, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        table = block_table[row : row + 1].long()
        kept = pages.read(KEPT_INPUTS, layer, table)[0]
        if length <= 1:
            kept = torch.zeros_like(kept)
        window = torch.cat((kept, inputs[index : index + 1]))
        out[index] = (window.to(out.dtype) * weights.weight).sum(0)
        if weights.bias is not None:
            out[index] += weights.bias
        if length > 0:
            pages.write(KEPT_INPUTS, layer, table, window[1:].unsqueeze(0))
    return out
