"""Sequences through a gated DeltaNet layer, token by token: convolution, state and output."""

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels.native import DELTA_STEP
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.state_sequences import (
    PIECE_TOKENS,
    StateSequences,
    native_kernels,
    placement,
    run,
)
from longshore.worker.kernels.state_step import read_state, write_state
from longshore.worker.kv_cache.state_pages import StatePages

NORM_EPS: Final = 1e-6
"""Added to the squared length of queries and keys before they are divided by it."""


class DeltaWeights(NamedTuple):
    """The weights of one layer.

    conv_weight: (conv_width, channels) float32, oldest token first.
    decay, dt_bias: (num_heads,) float32; decay is negative.
    """

    conv_weight: Tensor
    decay: Tensor
    dt_bias: Tensor


def delta_step(
    inputs: Tensor,
    dt: Tensor,
    beta: Tensor,
    pages: StatePages,
    layer: int,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    weights: DeltaWeights,
    *,
    num_key_heads: int,
) -> Tensor:
    """Advance each sequence by one token, as `state_step` does for Mamba 2; layer, table, rows and
    lens are as there.

    inputs:   (n, channels): queries, keys and values before the convolution, concatenated. Value
              heads with one key head are adjacent.
    dt, beta: (n, num_heads), before bias and softplus, and before the sigmoid; all contiguous
              within a token. num_heads: number of value heads.
    pages:    of states (num_heads, key_dim, value_dim) float32, and kept inputs (conv_width - 1,
              channels) in the dtype of `inputs`.
    Returns (n, num_heads * value_dim) float32.
    """
    if uses_triton(inputs):
        from longshore.worker.kernels.gpu import delta_step as gpu

        placed = placement(pages, layer, inputs.dtype)
        of_seqs = (block_table, rows, lens)
        out: Tensor = gpu.delta_step(
            inputs, dt, beta, *placed, *of_seqs, *weights, num_key_heads, NORM_EPS
        )
        return out
    if native_kernels(pages) is not None:
        sequences = StateSequences.of_single_tokens(block_table, rows, lens)
        return delta_sequences(
            inputs, dt, beta, pages, layer, sequences, weights, num_key_heads=num_key_heads
        )
    return reference(
        inputs,
        dt,
        beta,
        pages,
        layer,
        block_table,
        rows,
        lens,
        weights,
        num_key_heads=num_key_heads,
    )


def delta_sequences(
    inputs: Tensor,
    dt: Tensor,
    beta: Tensor,
    pages: StatePages,
    layer: int,
    sequences: StateSequences,
    weights: DeltaWeights,
    *,
    num_key_heads: int,
) -> Tensor:
    """Advance each sequence by its tokens, one after the other, its state in place. Arguments and
    result are those of `delta_step`, for all tokens of the step. Needs `native_kernels`."""
    num_heads, key_dim, value_dim = pages.spec.shapes[0]
    assert num_heads % num_key_heads == 0
    assert dt.stride(1) == beta.stride(1) == 1
    assert inputs.dtype == dt.dtype == beta.dtype
    return run(
        "delta_step",
        DELTA_STEP.pack(
            *(each.data_ptr() for each in (dt, beta, weights.decay, weights.dt_bias)),
            *(num_heads, num_key_heads, key_dim, value_dim, dt.stride(0), beta.stride(0)),
            NORM_EPS,
        ),
        inputs,
        pages,
        layer,
        sequences,
        weights.conv_weight,
        None,
        scratch_floats=2 * key_dim
        + PIECE_TOKENS * (2 * key_dim + value_dim + 3)
        + key_dim * value_dim,
    )


def reference(
    inputs: Tensor,
    dt: Tensor,
    beta: Tensor,
    pages: StatePages,
    layer: int,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    weights: DeltaWeights,
    *,
    num_key_heads: int,
) -> Tensor:
    """Compute the same in plain torch, one sequence at a time, in the dtype of the states."""
    (num_heads, key_dim, value_dim), dtype = pages.spec.shapes[0], pages.dtypes[0]
    out = inputs.new_zeros(len(inputs), num_heads, value_dim, dtype=dtype)
    for index, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        table = block_table[row : row + 1].long()
        state, kept = read_state(pages, layer, table, length)
        window = torch.cat((kept, inputs[index : index + 1]))
        convolved = (window.to(dtype) * weights.conv_weight).sum(0)
        convolved = F.silu(convolved.to(inputs.dtype)).to(dtype)
        width = num_key_heads * key_dim
        q, k, v = convolved.split((width, width, num_heads * value_dim))
        q, k = (
            normalise(x.view(num_key_heads, key_dim)).repeat_interleave(
                num_heads // num_key_heads, 0
            )
            for x in (q, k)
        )
        log_decay = F.softplus(dt[index].to(dtype) + weights.dt_bias) * weights.decay
        state = state * log_decay.exp()[:, None, None]
        predicted = (state * k.unsqueeze(2)).sum(1)
        gate = beta[index].to(dtype).sigmoid()[:, None]
        delta = gate * (v.view(num_heads, value_dim) - predicted)
        state = state + k.unsqueeze(2) * delta.unsqueeze(1)
        out[index] = (state * q.unsqueeze(2)).sum(1) * key_dim**-0.5
        if length > 0:
            write_state(pages, layer, table, state, window[1:])
    return out.flatten(1)


def normalise(heads: Tensor) -> Tensor:
    """Queries or keys of length 1. heads: (..., key_dim)."""
    return heads * heads.square().sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_()
