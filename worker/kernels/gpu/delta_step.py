"""One step of the gated delta rule (Yang, Kautz and Hatamizadeh, 2024) for sequences with one new
token, over states in pages: a launch for the convolution, and one for the states. See
`worker/kernels/delta_step.py`, and `state_step` for how a program finds its part of a state.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.gpu.state_step import convolve, line_of, softplus, tile_places
from longshore.worker.kernels.operators import operator

STATE_COLUMNS = 32
"""Columns of a head's state that a program updates: each is a recurrence of its own."""


@triton.jit(do_not_specialize=["first_unit"])
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
    table_stride,
    block_stride,
    first_unit,
    eps,
    scale,
    HEADS_PER_KEY: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE_UNITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < KEY_DIM, columns < VALUE_DIM
    length = tl.load(lens_ptr + seq)
    line = line_of(table_ptr, rows_ptr, seq, table_stride)
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

    has_state = rows < tl.where(length > 0, KEY_DIM, 0)
    starts = (head * KEY_DIM + rows) * VALUE_DIM
    places = states_ptr + tile_places(
        line, starts, columns, has_state, is_column, first_unit, block_stride,
        VALUE_DIM, UNIT, PAGE_UNITS,
    )  # fmt: skip
    is_read = (rows < tl.where(length > 1, KEY_DIM, 0))[:, None] & is_column[None, :]
    state = tl.load(places, mask=is_read, other=0.0)
    state = state * tl.exp(softplus(dt) * tl.load(decay_ptr + head))
    delta = beta * (v - tl.sum(state * k[:, None], axis=0))
    state = state + k[:, None] * delta[None, :]
    tl.store(places, state, mask=has_state[:, None] & is_column[None, :])
    out = tl.sum(state * q[:, None], axis=0)
    tl.store(out_ptr + (seq * num_heads + head) * VALUE_DIM + columns, out, mask=is_column)


def _fake(
    inputs: Tensor,
    dt: Tensor,
    beta: Tensor,
    buffer: Tensor,
    shape: Sequence[int],
    *rest: object,
) -> Tensor:
    size = (len(inputs), shape[0] * shape[2])
    return torch.empty(size, dtype=torch.float32, device=inputs.device)


@operator(
    "delta_step(Tensor inputs, Tensor dt, Tensor beta, Tensor(a!) buffer, int[] shape, "
    "int[] first_units, int unit_bytes, int page_units, Tensor block_table, Tensor rows, "
    "Tensor lens, Tensor conv_weight, Tensor decay, Tensor dt_bias, int num_key_heads, float eps) "
    "-> Tensor",
    fake=_fake,
    launches=2,
)
def delta_step(
    inputs: Tensor,
    dt: Tensor,
    beta: Tensor,
    buffer: Tensor,
    shape: Sequence[int],
    first_units: Sequence[int],
    unit_bytes: int,
    page_units: int,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    conv_weight: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    eps: float,
) -> Tensor:
    """See the wrapper. shape: (num_heads, key_dim, value_dim). buffer, unit_bytes, page_units: of
    StatePages; first_units: of the layer's tensors."""
    out = _fake(inputs, dt, beta, buffer, shape)
    num_seqs, num_channels = inputs.shape
    num_heads, key_dim, value_dim = shape
    if num_seqs == 0:
        return out
    first_state, first_input = first_units
    sequences = (block_table, rows, lens)
    convolved = convolve(
        inputs, buffer, first_input, unit_bytes, page_units, *sequences, conv_weight, None
    )
    states = buffer.view(torch.float32)
    _update[(num_seqs, num_heads, triton.cdiv(value_dim, STATE_COLUMNS))](
        convolved,
        dt,
        beta,
        states,
        decay,
        dt_bias,
        *sequences,
        out,
        num_heads,
        num_channels,
        dt.stride(0),
        beta.stride(0),
        block_table.stride(0),
        states.stride(0),
        first_state,
        eps,
        key_dim**-0.5,
        HEADS_PER_KEY=num_heads // num_key_heads,
        NUM_KEY_HEADS=num_key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        UNIT=unit_bytes // states.itemsize,
        PAGE_UNITS=page_units,
        ROWS=max(4, triton.next_power_of_2(key_dim)),
        COLUMNS=STATE_COLUMNS,
        num_warps=4,
    )
    return out
