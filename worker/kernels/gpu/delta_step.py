"""One step of the gated delta rule (Yang, Kautz and Hatamizadeh, 2024) for sequences with one new
token, over paged states: a launch for the convolution, and one for the states. See
`worker/kernels/delta_step.py`.

Which blocks a program reads and writes follows from the block table and the lengths in device
memory, so the launches can be part of a graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.gpu.state_step import blocks_of, convolve, softplus
from longshore.worker.kernels.operators import operator

STATE_COLUMNS = 32
"""Columns of a head's state that a program updates: each is a recurrence of its own."""


@triton.jit
def _update(
    convolved_ptr,
    dt_ptr,
    beta_ptr,
    states_ptr,
    decay_ptr,
    dt_bias_ptr,
    table_ptr,
    rows_ptr,
    lens_ptr,
    out_ptr,
    num_heads,
    num_channels,
    dt_stride,
    beta_stride,
    states_block_stride,
    table_stride,
    eps,
    scale,
    HEADS_PER_KEY: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < KEY_DIM, columns < VALUE_DIM
    read, written, length = blocks_of(table_ptr, rows_ptr, lens_ptr, seq, table_stride, BLOCK_SIZE)
    token = convolved_ptr + seq * num_channels
    queries = token + (head // HEADS_PER_KEY) * KEY_DIM + rows
    q = tl.load(queries, mask=is_row, other=0.0).to(tl.float32)
    k = tl.load(queries + NUM_KEY_HEADS * KEY_DIM, mask=is_row, other=0.0).to(tl.float32)
    values = token + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns
    v = tl.load(values, mask=is_column, other=0.0).to(tl.float32)
    q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + eps) * scale)
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + eps)
    dt = tl.load(dt_ptr + seq * dt_stride + head).to(tl.float32) + tl.load(dt_bias_ptr + head)
    beta = tl.load(beta_ptr + seq * beta_stride + head).to(tl.float32)
    beta = 1.0 / (1.0 + tl.exp(-beta))

    places = head * (KEY_DIM * VALUE_DIM) + rows[:, None] * VALUE_DIM + columns[None, :]
    is_read = is_row[:, None] & (columns < tl.where(length > 1, VALUE_DIM, 0))[None, :]
    is_written = is_row[:, None] & (columns < tl.where(length > 0, VALUE_DIM, 0))[None, :]
    state = tl.load(states_ptr + read * states_block_stride + places, mask=is_read, other=0.0)
    state = state * tl.exp(softplus(dt) * tl.load(decay_ptr + head))
    delta = beta * (v - tl.sum(state * k[:, None], axis=0))
    state = state + k[:, None] * delta[None, :]
    tl.store(states_ptr + written * states_block_stride + places, state, mask=is_written)
    out = tl.sum(state * q[:, None], axis=0)
    tl.store(out_ptr + (seq * num_heads + head) * VALUE_DIM + columns, out, mask=is_column)


def _fake(inputs: Tensor, dt: Tensor, beta: Tensor, states: Tensor, *rest: object) -> Tensor:
    size = states.shape[1] * states.shape[3]
    return torch.empty((len(inputs), size), dtype=torch.float32, device=inputs.device)


@operator(
    "delta_step(Tensor inputs, Tensor dt, Tensor beta, Tensor(a!) states, Tensor(b!) kept_inputs, "
    "Tensor block_table, Tensor rows, Tensor lens, Tensor conv_weight, Tensor decay, "
    "Tensor dt_bias, int num_key_heads, int block_size, float eps) -> Tensor",
    fake=_fake,
    launches=2,
)
def delta_step(
    inputs: Tensor,
    dt: Tensor,
    beta: Tensor,
    states: Tensor,
    kept_inputs: Tensor,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    conv_weight: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    block_size: int,
    eps: float,
) -> Tensor:
    """See the wrapper."""
    out = _fake(inputs, dt, beta, states)
    num_seqs, num_channels = inputs.shape
    num_heads, key_dim, value_dim = states.shape[1:]
    if num_seqs == 0:
        return out
    convolved = convolve(
        inputs, kept_inputs, conv_weight, None, block_table, rows, lens, block_size
    )
    columns = min(STATE_COLUMNS, triton.next_power_of_2(value_dim))
    _update[(num_seqs, num_heads, triton.cdiv(value_dim, columns))](
        convolved,
        dt,
        beta,
        states,
        decay,
        dt_bias,
        block_table,
        rows,
        lens,
        out,
        num_heads,
        num_channels,
        dt.stride(0),
        beta.stride(0),
        states.stride(0),
        block_table.stride(0),
        eps,
        key_dim**-0.5,
        HEADS_PER_KEY=num_heads // num_key_heads,
        NUM_KEY_HEADS=num_key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        ROWS=triton.next_power_of_2(key_dim),
        COLUMNS=columns,
        num_warps=4,
    )
    return out
