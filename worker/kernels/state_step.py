"""One token of each sequence through a Mamba 2 layer: convolution, state and output."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels.operators import uses_triton


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
    states: Tensor,
    kept_inputs: Tensor,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    weights: StateWeights,
    *,
    num_groups: int,
    block_size: int,
) -> Tensor:
    """Advance each sequence by one token, from the state in the block of the token before it to
    that in its own block, which may be the same one. No other sequence may write to a block that
    one reads.

    inputs:      (n, channels): x, B and C before the convolution, concatenated.
    dt:          (n, num_heads), before bias and softplus; both contiguous within a token.
    states:      (num_blocks, num_heads, head_dim, state_size) float32, contiguous in a block.
    kept_inputs: (num_blocks, conv_width - 1, channels), in the dtype of inputs; the same.
    block_table: (max_num_seqs, max_blocks) int32; block_size: tokens that a block covers.
    rows, lens:  (n,) int64, the line of the table and the number of tokens of each sequence. A
                 sequence of 0 tokens reads and writes no block.
    Returns (n, num_heads * head_dim) float32.
    """
    if uses_triton(inputs):
        from longshore.worker.kernels.gpu import state_step as gpu

        out: Tensor = gpu.state_step(
            inputs,
            dt,
            states,
            kept_inputs,
            block_table,
            rows,
            lens,
            *weights,
            num_groups,
            block_size,
        )
        return out
    return reference(
        inputs,
        dt,
        states,
        kept_inputs,
        block_table,
        rows,
        lens,
        weights,
        num_groups=num_groups,
        block_size=block_size,
    )


def reference(
    inputs: Tensor,
    dt: Tensor,
    states: Tensor,
    kept_inputs: Tensor,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    weights: StateWeights,
    *,
    num_groups: int,
    block_size: int,
) -> Tensor:
    """Compute the same in plain torch, one sequence at a time, in the dtype of the states."""
    num_heads, head_dim, state_size = states.shape[1:]
    out = states.new_zeros(len(inputs), num_heads * head_dim)
    for index, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        block_ids = block_table[row].tolist()
        read, written = (block_ids[max(length - n, 0) // block_size] for n in (2, 1))
        kept = kept_inputs[read] if length > 1 else torch.zeros_like(kept_inputs[0])
        state = states[read] if length > 1 else torch.zeros_like(states[0])
        window = torch.cat((kept, inputs[index : index + 1]))
        convolved = (window.to(states.dtype) * weights.conv_weight).sum(0)
        if weights.conv_bias is not None:
            convolved += weights.conv_bias
        convolved = F.silu(convolved.to(inputs.dtype)).to(states.dtype)
        maps = num_groups * state_size
        x, b, c = convolved.split((num_heads * head_dim, maps, maps))
        x = x.view(num_heads, head_dim)
        b, c = (
            each.view(num_groups, state_size).repeat_interleave(num_heads // num_groups, 0)
            for each in (b, c)
        )
        steps = F.softplus(dt[index].to(states.dtype) + weights.dt_bias)
        state = state * (steps * weights.decay).exp()[:, None, None]
        state = state + (steps[:, None] * x)[:, :, None] * b[:, None, :]
        out[index] = ((state * c[:, None, :]).sum(2) + weights.skip[:, None] * x).flatten()
        if length > 0:
            states[written], kept_inputs[written] = state, window[1:]
    return out
