"""Sequences through a Mamba 2 layer, token by token: convolution, state and output."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels.native import MAMBA_STEP
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.state_sequences import (
    PIECE_TOKENS,
    StateSequences,
    native_kernels,
    placement,
    run,
)
from longshore.worker.kv_cache.state_pages import StatePages


class StateWeights(NamedTuple):
    """The weights of one layer.

    conv_weight: (conv_width, channels) float32, oldest token first; conv_bias: (channels,) float32.
    decay, skip, dt_bias: (num_heads,) float32; decay is negative.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    decay: Tensor
    skip: Tensor
    dt_bias: Tensor


def state_step(
    inputs: Tensor,
    dt: Tensor,
    pages: StatePages,
    layer: int,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    weights: StateWeights,
    *,
    num_groups: int,
) -> Tensor:
    """Advance each sequence by one token, its state in place. No two sequences share a page.

    inputs:      (n, channels): x, B and C before the convolution, concatenated.
    dt:          (n, num_heads), before bias and softplus; both contiguous within a token.
    pages:       of states (num_heads, head_dim, state_size) float32, and kept inputs (conv_width -
                 1, channels) in the dtype of `inputs`. layer: index among the layers of the group.
    block_table: (max_num_seqs, max_blocks) int32, at least as wide as a state has pages.
    rows, lens:  (n,) int64, the line of the table and the number of tokens of each sequence. A
                 sequence of 1 token has no state before it, whatever is in its pages. One of 0
                 tokens reads and writes no page.
    Returns (n, num_heads * head_dim) float32.
    """
    if uses_triton(inputs):
        from longshore.worker.kernels.gpu import state_step as gpu

        placed = placement(pages, layer, inputs.dtype)
        out: Tensor = gpu.state_step(
            inputs, dt, *placed, block_table, rows, lens, *weights, num_groups
        )
        return out
    if native_kernels(pages) is not None:
        sequences = StateSequences.of_single_tokens(block_table, rows, lens)
        return state_sequences(inputs, dt, pages, layer, sequences, weights, num_groups=num_groups)
    return reference(
        inputs, dt, pages, layer, block_table, rows, lens, weights, num_groups=num_groups
    )


def state_sequences(
    inputs: Tensor,
    dt: Tensor,
    pages: StatePages,
    layer: int,
    sequences: StateSequences,
    weights: StateWeights,
    *,
    num_groups: int,
) -> Tensor:
    """Advance each sequence by its tokens, one after the other, its state in place. Arguments and
    result are those of `state_step`, for all tokens of the step. Needs `native_kernels`."""
    num_heads, head_dim, state_size = pages.spec.shapes[0]
    assert num_heads % num_groups == 0
    assert dt.stride(1) == 1
    assert inputs.dtype == dt.dtype
    of_heads = (weights.decay, weights.skip, weights.dt_bias)
    return run(
        "mamba_step",
        MAMBA_STEP.pack(
            *(each.data_ptr() for each in (dt, *of_heads)),
            *(num_heads, num_groups, head_dim, state_size, dt.stride(0)),
        ),
        inputs,
        pages,
        layer,
        sequences,
        weights.conv_weight,
        weights.conv_bias,
        scratch_floats=2 * head_dim
        + PIECE_TOKENS * (2 * state_size + head_dim + 2)
        + head_dim * state_size,
    )


def reference(
    inputs: Tensor,
    dt: Tensor,
    pages: StatePages,
    layer: int,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    weights: StateWeights,
    *,
    num_groups: int,
) -> Tensor:
    """Compute the same in plain torch, one sequence at a time, in the dtype of the states."""
    (num_heads, head_dim, state_size), dtype = pages.spec.shapes[0], pages.dtypes[0]
    out = inputs.new_zeros(len(inputs), num_heads * head_dim, dtype=dtype)
    for index, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        table = block_table[row : row + 1].long()
        state, kept = read_state(pages, layer, table, length)
        window = torch.cat((kept, inputs[index : index + 1]))
        convolved = (window.to(dtype) * weights.conv_weight).sum(0)
        if weights.conv_bias is not None:
            convolved += weights.conv_bias
        convolved = F.silu(convolved.to(inputs.dtype)).to(dtype)
        maps = num_groups * state_size
        x, b, c = convolved.split((num_heads * head_dim, maps, maps))
        x = x.view(num_heads, head_dim)
        b, c = (
            each.view(num_groups, state_size).repeat_interleave(num_heads // num_groups, 0)
            for each in (b, c)
        )
        steps = F.softplus(dt[index].to(dtype) + weights.dt_bias)
        state = state * (steps * weights.decay).exp()[:, None, None]
        state = state + (steps[:, None] * x)[:, :, None] * b[:, None, :]
        out[index] = ((state * c[:, None, :]).sum(2) + weights.skip[:, None] * x).flatten()
        if length > 0:
            write_state(pages, layer, table, state, window[1:])
    return out


def read_state(pages: StatePages, layer: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The state and the kept inputs of a sequence of `length` tokens before its last one. table:
    (1, num_pages) int64."""
    state, kept = (pages.read(tensor, layer, table)[0] for tensor in range(2))
    return (state, kept) if length > 1 else (torch.zeros_like(state), torch.zeros_like(kept))


def write_state(pages: StatePages, layer: int, table: Tensor, *state: Tensor) -> None:
    """Store the state and the kept inputs of a sequence."""
    for tensor, values in enumerate(state):
        pages.write(tensor, layer, table, values.unsqueeze(0))
