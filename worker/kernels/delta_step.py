"""Sequences through a gated DeltaNet layer, token by token: convolution, state and output."""

import threading
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.protocol.arrays import Int32Array
from longshore.worker.kernels.native import (
    DELTA_STEP,
    DTYPES,
    Native,
    empty,
    native,
    num_threads,
)
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.state_step import placement, read_state, write_state
from longshore.worker.kv_cache.state_pages import StatePages

NORM_EPS: Final = 1e-6
"""Added to the squared length of queries and keys before they are divided by it."""

PIECE_TOKENS: Final = 32
"""As in native/delta_step.h."""


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
        sequences = (block_table, rows, lens)
        out: Tensor = gpu.delta_step(
            inputs, dt, beta, *placed, *sequences, *weights, num_key_heads, NORM_EPS
        )
        return out
    if native_kernels(pages) is not None:
        lines = torch.stack((rows, torch.arange(len(rows)), torch.ones_like(rows), lens), dim=1)
        of_step = DeltaSequences(block_table, lines)
        return delta_sequences(
            inputs, dt, beta, pages, layer, of_step, weights, num_key_heads=num_key_heads
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


class DeltaSequences:
    """The sequences of a step, for `delta_sequences`.

    block_table: as that of `delta_step`.
    sequences:   (n, 4) int64, on the CPU: line of the table, first token in the step, number of its
                 tokens in the step, and of all of its tokens.
    stops:       for each sequence, the numbers of its tokens in the step, ascending, after which
                 its state is also written to the pages given there, (num_pages,) int32.
    """

    def __init__(
        self,
        block_table: Tensor,
        sequences: Tensor,
        stops: Sequence[Sequence[tuple[int, Int32Array]]] = (),
    ) -> None:
        self.block_table, self.sequences = block_table, sequences.contiguous()
        of_all = list(chain.from_iterable(stops))
        counts = [len(of_one) for of_one in stops] or [0] * len(sequences)
        self.first_stops = torch.tensor([0, *accumulate(counts)])
        self.stops = torch.tensor([stop for stop, _ in of_all], dtype=torch.int64)
        tables = np.array([pages for _, pages in of_all], np.int32)
        self.stop_tables = torch.from_numpy(np.atleast_2d(tables))


def delta_sequences(
    inputs: Tensor,
    dt: Tensor,
    beta: Tensor,
    pages: StatePages,
    layer: int,
    of_step: DeltaSequences,
    weights: DeltaWeights,
    *,
    num_key_heads: int,
) -> Tensor:
    """Advance each sequence by its tokens, one after the other, its state in place. Arguments and
    result are those of `delta_step`, for all tokens of the step. Needs `native_kernels`."""
    kernels = native_kernels(pages)
    assert kernels is not None
    (num_heads, key_dim, value_dim), (num_kept, num_channels) = pages.spec.shapes
    assert num_heads % num_key_heads == 0
    assert inputs.stride(1) == dt.stride(1) == beta.stride(1) == of_step.block_table.stride(1) == 1
    assert inputs.dtype == dt.dtype == beta.dtype
    states = placement(pages, layer, inputs.dtype)
    out = empty((len(inputs), num_heads * value_dim), torch.float32)
    num_in_team = num_threads(len(inputs) * num_heads * key_dim * value_dim * 4)
    scratch_floats = 2 * key_dim + PIECE_TOKENS * (2 * key_dim + value_dim + 3)
    scratch_floats += key_dim * value_dim + num_kept * max(key_dim, value_dim)
    scratch_floats += scratch_floats % 2  # it begins with pointers
    scratch = _scratch(num_in_team * scratch_floats)
    kernels.run(
        "delta_step",
        inputs.dtype,
        DELTA_STEP.pack(
            *(each.data_ptr() for each in (inputs, dt, beta, states.buffer)),
            *(each.data_ptr() for each in (of_step.block_table, of_step.stop_tables)),
            *(each.data_ptr() for each in (of_step.sequences, of_step.stops, of_step.first_stops)),
            *(each.data_ptr() for each in (*weights, out, scratch)),
            *(len(of_step.sequences), num_channels, num_heads, num_key_heads),
            *(key_dim, value_dim, num_kept + 1),
            *(each.stride(0) for each in (inputs, dt, beta, of_step.block_table)),
            of_step.stop_tables.shape[1],
            *(states.buffer.stride(0), states.unit_bytes, states.page_units, *states.first_units),
            scratch_floats,
            NORM_EPS,
            num_in_team,
        ),
    )
    return out


class _Scratch(threading.local):
    """Memory that a thread keeps from call to call: new pages would cost more than the kernel."""

    memory = torch.empty(0)


_of_thread = _Scratch()


def _scratch(num_floats: int) -> Tensor:
    if len(_of_thread.memory) < num_floats:
        _of_thread.memory = torch.empty(num_floats)
    return _of_thread.memory


def native_kernels(pages: StatePages) -> Native | None:
    """The compiled kernels, if they have one for these states."""
    is_supported = pages.dtypes[0] == torch.float32 and pages.dtypes[1] in DTYPES
    return native() if is_supported and pages.device.type == "cpu" else None


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
