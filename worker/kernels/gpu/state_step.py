"""One step of the recurrence of Mamba 2 (Dao and Gu, 2024) for sequences with one new token, over
paged states: a launch for the convolution, and one for the states. See
`worker/kernels/state_step.py`.

Which blocks a program reads and writes follows from the block table and the lengths in device
memory, so the launches can be part of a graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator

STATE_ROWS = 16
"""Rows of a head's state that a program updates. Small, so that one sequence also fills a GPU."""


@triton.jit
def blocks_of(table_ptr, rows_ptr, lens_ptr, seq, table_stride, BLOCK_SIZE: tl.constexpr):
    """The block of the state before the token, that of the state after it, and the length. There is
    a state before the token if the length exceeds 1, and one after it if the length is not 0."""
    length = tl.load(lens_ptr + seq)
    line = table_ptr + tl.load(rows_ptr + seq) * table_stride
    read = tl.load(line + tl.maximum(length - 2, 0) // BLOCK_SIZE).to(tl.int64)
    written = tl.load(line + tl.maximum(length - 1, 0) // BLOCK_SIZE).to(tl.int64)
    return read, written, length


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    small = tl.exp(-tl.abs(x))
    # A sum with 1 would lose the digits of a small term.
    log = tl.where(small < 1e-3, small * (1.0 - 0.5 * small), tl.log(1.0 + small))
    return tl.maximum(x, 0.0) + log


@triton.jit
def _convolve(
    inputs_ptr,
    kept_ptr,
    weight_ptr,
    bias_ptr,
    table_ptr,
    rows_ptr,
    lens_ptr,
    out_ptr,
    num_channels,
    input_stride,
    kept_block_stride,
    table_stride,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_channels
    read, written, length = blocks_of(table_ptr, rows_ptr, lens_ptr, seq, table_stride, BLOCK_SIZE)
    is_read = columns < tl.where(length > 1, num_channels, 0)
    is_written = columns < tl.where(length > 0, num_channels, 0)
    before = kept_ptr + read * kept_block_stride + columns
    after = kept_ptr + written * kept_block_stride + columns
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    # If `before` is `after`, each element is read before it is replaced by the next one.
    for tap in tl.static_range(WIDTH - 1):
        x = tl.load(before + tap * num_channels, mask=is_read, other=0.0)
        weight = tl.load(weight_ptr + tap * num_channels + columns, mask=is_column, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
        if tap > 0:
            tl.store(after + (tap - 1) * num_channels, x, mask=is_written)
    x = tl.load(inputs_ptr + seq * input_stride + columns, mask=is_column, other=0.0)
    weight = tl.load(weight_ptr + (WIDTH - 1) * num_channels + columns, mask=is_column, other=0.0)
    total += x.to(tl.float32) * weight.to(tl.float32)
    if WIDTH > 1:
        tl.store(after + (WIDTH - 2) * num_channels, x, mask=is_written)
    dtype = out_ptr.dtype.element_ty
    convolved = _silu(total.to(dtype).to(tl.float32))
    tl.store(out_ptr + seq * num_channels + columns, convolved.to(dtype), mask=is_column)


@triton.jit
def _update(
    convolved_ptr,
    dt_ptr,
    states_ptr,
    decay_ptr,
    skip_ptr,
    dt_bias_ptr,
    table_ptr,
    rows_ptr,
    lens_ptr,
    out_ptr,
    num_heads,
    num_channels,
    dt_stride,
    states_block_stride,
    table_stride,
    HEADS_PER_GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    is_row, is_column = rows < HEAD_DIM, columns < STATE_SIZE
    read, written, length = blocks_of(table_ptr, rows_ptr, lens_ptr, seq, table_stride, BLOCK_SIZE)
    token = convolved_ptr + seq * num_channels
    width = num_heads * HEAD_DIM
    x = tl.load(token + head * HEAD_DIM + rows, mask=is_row, other=0.0).to(tl.float32)
    maps = token + width + (head // HEADS_PER_GROUP) * STATE_SIZE + columns
    b = tl.load(maps, mask=is_column, other=0.0).to(tl.float32)
    c = tl.load(maps + NUM_GROUPS * STATE_SIZE, mask=is_column, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + seq * dt_stride + head).to(tl.float32) + tl.load(dt_bias_ptr + head)
    dt = softplus(dt)

    places = head * (HEAD_DIM * STATE_SIZE) + rows[:, None] * STATE_SIZE + columns[None, :]
    is_read = (rows < tl.where(length > 1, HEAD_DIM, 0))[:, None] & is_column[None, :]
    is_written = (rows < tl.where(length > 0, HEAD_DIM, 0))[:, None] & is_column[None, :]
    state = tl.load(states_ptr + read * states_block_stride + places, mask=is_read, other=0.0)
    state = state * tl.exp(dt * tl.load(decay_ptr + head)) + (dt * x)[:, None] * b[None, :]
    tl.store(states_ptr + written * states_block_stride + places, state, mask=is_written)
    out = tl.sum(state * c[None, :], axis=1) + tl.load(skip_ptr + head) * x
    tl.store(out_ptr + seq * width + head * HEAD_DIM + rows, out, mask=is_row)


def convolve(
    inputs: Tensor,
    kept_inputs: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    block_size: int,
) -> Tensor:
    """Launch the convolution of at least one token, followed by silu: like `inputs`, contiguous.
    Arguments as in the wrapper."""
    num_seqs, num_channels = inputs.shape
    convolved = torch.empty((num_seqs, num_channels), dtype=inputs.dtype, device=inputs.device)
    block = min(256, triton.next_power_of_2(num_channels))
    _convolve[(num_seqs, triton.cdiv(num_channels, block))](
        inputs,
        kept_inputs,
        conv_weight,
        conv_bias,
        block_table,
        rows,
        lens,
        convolved,
        num_channels,
        inputs.stride(0),
        kept_inputs.stride(0),
        block_table.stride(0),
        WIDTH=len(conv_weight),
        BLOCK_SIZE=block_size,
        HAS_BIAS=conv_bias is not None,
        BLOCK=block,
        num_warps=2,
    )
    return convolved


def _fake(inputs: Tensor, dt: Tensor, states: Tensor, *rest: object) -> Tensor:
    size = states.shape[1] * states.shape[2]
    return torch.empty((len(inputs), size), dtype=torch.float32, device=inputs.device)


@operator(
    "state_step(Tensor inputs, Tensor dt, Tensor(a!) states, Tensor(b!) kept_inputs, "
    "Tensor block_table, Tensor rows, Tensor lens, Tensor conv_weight, Tensor? conv_bias, "
    "Tensor decay, Tensor skip, Tensor dt_bias, int num_groups, int block_size) -> Tensor",
    fake=_fake,
    launches=2,
)
def state_step(
    inputs: Tensor,
    dt: Tensor,
    states: Tensor,
    kept_inputs: Tensor,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    decay: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    num_groups: int,
    block_size: int,
) -> Tensor:
    """See the wrapper."""
    out = _fake(inputs, dt, states)
    num_seqs, num_channels = inputs.shape
    num_heads, head_dim, state_size = states.shape[1:]
    if num_seqs == 0:
        return out
    convolved = convolve(
        inputs, kept_inputs, conv_weight, conv_bias, block_table, rows, lens, block_size
    )
    _update[(num_seqs, num_heads, triton.cdiv(head_dim, STATE_ROWS))](
        convolved,
        dt,
        states,
        decay,
        skip,
        dt_bias,
        block_table,
        rows,
        lens,
        out,
        num_heads,
        num_channels,
        dt.stride(0),
        states.stride(0),
        block_table.stride(0),
        HEADS_PER_GROUP=num_heads // num_groups,
        NUM_GROUPS=num_groups,
        HEAD_DIM=head_dim,
        STATE_SIZE=state_size,
        BLOCK_SIZE=block_size,
        ROWS=STATE_ROWS,
        COLUMNS=triton.next_power_of_2(state_size),
        num_warps=4,
    )
    return out
