"""One step of the recurrence of Mamba 2 (Dao and Gu, 2024) for sequences with one new token, over
states in pages: a launch for the convolution, and one for the states. See
`worker/kernels/state_step.py`.

Where a program finds its part of a state follows from the block table and the lengths in device
memory, so the launches can be part of a graph. A part is overwritten in place, so each tile has at
least one element per thread: of two threads with the same element, one could read it after the
other has written it.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator

STATE_ROWS = 16
"""Rows of a head's state that a program updates. Small, so that one sequence also fills a GPU."""

CHANNELS = 256
"""Channels of the convolution that a program computes."""


@triton.jit
def line_of(table_ptr, rows_ptr, seq, table_stride):
    """The pages of a sequence's state."""
    return table_ptr + tl.load(rows_ptr + seq) * table_stride


@triton.jit
def places_of(
    line, elements, mask, first_unit, block_stride, UNIT: tl.constexpr, PAGE_UNITS: tl.constexpr
):
    """Where elements of a tensor of the state are in the pool, int64. elements: offsets in the
    tensor, whose first unit is `first_unit`. UNIT: elements of a unit."""
    units = first_unit + elements // UNIT
    pages = tl.load(line + units // PAGE_UNITS, mask=mask, other=0).to(tl.int64)
    return pages * block_stride + (units % PAGE_UNITS * UNIT + elements % UNIT)


@triton.jit
def tile_places(
    line,
    starts,
    columns,
    is_row,
    is_column,
    first_unit,
    block_stride,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE_UNITS: tl.constexpr,
):
    """Where the elements of a tile are in the pool, (rows, columns) int64. starts: offsets in the
    tensor of the rows, which have SIZE elements."""
    if UNIT % SIZE == 0:  # a row is in one unit
        places = places_of(line, starts, is_row, first_unit, block_stride, UNIT, PAGE_UNITS)
        return places[:, None] + columns[None, :]
    else:
        elements = starts[:, None] + columns[None, :]
        mask = is_row[:, None] & is_column[None, :]
        return places_of(line, elements, mask, first_unit, block_stride, UNIT, PAGE_UNITS)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    small = tl.exp(-tl.abs(x))
    # A sum with 1 would lose the digits of a small term.
    log = tl.where(small < 1e-3, small * (1.0 - 0.5 * small), tl.log(1.0 + small))
    return tl.maximum(x, 0.0) + log


@triton.jit(do_not_specialize=["first_unit"])
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
    table_stride,
    block_stride,
    first_unit,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE_UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_channels
    length = tl.load(lens_ptr + seq)
    line = line_of(table_ptr, rows_ptr, seq, table_stride)
    is_read = columns < tl.where(length > 1, num_channels, 0)
    is_written = columns < tl.where(length > 0, num_channels, 0)
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    place = kept_ptr + columns
    # Each element is read before it is replaced by the next one.
    for tap in tl.static_range(WIDTH - 1):
        elements = tap * num_channels + columns
        places = places_of(line, elements, is_written, first_unit, block_stride, UNIT, PAGE_UNITS)
        earlier, place = place, kept_ptr + places
        x = tl.load(place, mask=is_read, other=0.0)
        weight = tl.load(weight_ptr + tap * num_channels + columns, mask=is_column, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
        if tap > 0:
            tl.store(earlier, x, mask=is_written)
    x = tl.load(inputs_ptr + seq * input_stride + columns, mask=is_column, other=0.0)
    weight = tl.load(weight_ptr + (WIDTH - 1) * num_channels + columns, mask=is_column, other=0.0)
    total += x.to(tl.float32) * weight.to(tl.float32)
    if WIDTH > 1:
        tl.store(place, x, mask=is_written)
    dtype = out_ptr.dtype.element_ty
    convolved = total.to(dtype)
    if HAS_SILU:
        convolved = _silu(convolved.to(tl.float32)).to(dtype)
    tl.store(out_ptr + seq * num_channels + columns, convolved, mask=is_column)


@triton.jit(do_not_specialize=["first_unit"])
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
    table_stride,
    block_stride,
    first_unit,
    HEADS_PER_GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE_UNITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    is_row, is_column = rows < HEAD_DIM, columns < STATE_SIZE
    length = tl.load(lens_ptr + seq)
    line = line_of(table_ptr, rows_ptr, seq, table_stride)
    token = convolved_ptr + seq * num_channels
    width = num_heads * HEAD_DIM
    x = tl.load(token + head * HEAD_DIM + rows, mask=is_row, other=0.0).to(tl.float32)
    maps = token + width + (head // HEADS_PER_GROUP) * STATE_SIZE + columns
    b = tl.load(maps, mask=is_column, other=0.0).to(tl.float32)
    c = tl.load(maps + NUM_GROUPS * STATE_SIZE, mask=is_column, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + seq * dt_stride + head).to(tl.float32) + tl.load(dt_bias_ptr + head)
    dt = softplus(dt)

    has_state = rows < tl.where(length > 0, HEAD_DIM, 0)
    starts = (head * HEAD_DIM + rows) * STATE_SIZE
    places = states_ptr + tile_places(
        line, starts, columns, has_state, is_column, first_unit, block_stride,
        STATE_SIZE, UNIT, PAGE_UNITS,
    )  # fmt: skip
    is_read = (rows < tl.where(length > 1, HEAD_DIM, 0))[:, None] & is_column[None, :]
    state = tl.load(places, mask=is_read, other=0.0)
    state = state * tl.exp(dt * tl.load(decay_ptr + head)) + (dt * x)[:, None] * b[None, :]
    tl.store(places, state, mask=has_state[:, None] & is_column[None, :])
    out = tl.sum(state * c[None, :], axis=1) + tl.load(skip_ptr + head) * x
    tl.store(out_ptr + seq * width + head * HEAD_DIM + rows, out, mask=is_row)


def convolve(
    inputs: Tensor,
    buffer: Tensor,
    first_unit: int,
    unit_bytes: int,
    page_units: int,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    *,
    has_silu: bool = True,
) -> Tensor:
    """Launch the convolution of at least one token: like `inputs`, contiguous. has_silu: whether
    silu follows; without it, the result is float32. first_unit: of the layer's kept inputs. Other
    arguments as in `state_step`."""
    num_seqs, num_channels = inputs.shape
    dtype = inputs.dtype if has_silu else torch.float32
    convolved = torch.empty((num_seqs, num_channels), dtype=dtype, device=inputs.device)
    kept_inputs = buffer.view(inputs.dtype)
    _convolve[(num_seqs, triton.cdiv(num_channels, CHANNELS))](
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
        block_table.stride(0),
        kept_inputs.stride(0),
        first_unit,
        WIDTH=len(conv_weight),
        HAS_BIAS=conv_bias is not None,
        HAS_SILU=has_silu,
        UNIT=unit_bytes // inputs.itemsize,
        PAGE_UNITS=page_units,
        BLOCK=CHANNELS,
        num_warps=2,
    )
    return convolved


def _fake_convolved(inputs: Tensor, *rest: object) -> Tensor:
    return torch.empty(inputs.shape, dtype=torch.float32, device=inputs.device)


@operator(
    "conv_step(Tensor inputs, Tensor(a!) buffer, int first_unit, int unit_bytes, int page_units, "
    "Tensor block_table, Tensor rows, Tensor lens, Tensor weight, Tensor? bias) -> Tensor",
    fake=_fake_convolved,
)
def conv_step(
    inputs: Tensor,
    buffer: Tensor,
    first_unit: int,
    unit_bytes: int,
    page_units: int,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """See `worker/kernels/conv_step.py`. first_unit: of the layer's kept inputs. buffer, unit_bytes
    and page_units: of StatePages."""
    if len(inputs) == 0:
        return _fake_convolved(inputs)
    return convolve(
        inputs,
        buffer,
        first_unit,
        unit_bytes,
        page_units,
        block_table,
        rows,
        lens,
        weight,
        bias,
        has_silu=False,
    )


def _fake(
    inputs: Tensor, dt: Tensor, buffer: Tensor, shape: Sequence[int], *rest: object
) -> Tensor:
    size = (len(inputs), shape[0] * shape[1])
    return torch.empty(size, dtype=torch.float32, device=inputs.device)


@operator(
    "state_step(Tensor inputs, Tensor dt, Tensor(a!) buffer, int[] shape, int[] first_units, "
    "int unit_bytes, int page_units, Tensor block_table, Tensor rows, Tensor lens, "
    "Tensor conv_weight, Tensor? conv_bias, Tensor decay, Tensor skip, Tensor dt_bias, "
    "int num_groups) -> Tensor",
    fake=_fake,
    launches=2,
)
def state_step(
    inputs: Tensor,
    dt: Tensor,
    buffer: Tensor,
    shape: Sequence[int],
    first_units: Sequence[int],
    unit_bytes: int,
    page_units: int,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    decay: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    num_groups: int,
) -> Tensor:
    """See the wrapper. shape: (num_heads, head_dim, state_size). buffer, unit_bytes, page_units: of
    StatePages; first_units: of the layer's tensors."""
    out = _fake(inputs, dt, buffer, shape)
    num_seqs, num_channels = inputs.shape
    num_heads, head_dim, state_size = shape
    if num_seqs == 0:
        return out
    first_state, first_input = first_units
    sequences = (block_table, rows, lens)
    convolved = convolve(
        inputs, buffer, first_input, unit_bytes, page_units, *sequences, conv_weight, conv_bias
    )
    states = buffer.view(torch.float32)
    _update[(num_seqs, num_heads, triton.cdiv(head_dim, STATE_ROWS))](
        convolved,
        dt,
        states,
        decay,
        skip,
        dt_bias,
        *sequences,
        out,
        num_heads,
        num_channels,
        dt.stride(0),
        block_table.stride(0),
        states.stride(0),
        first_state,
        HEADS_PER_GROUP=num_heads // num_groups,
        NUM_GROUPS=num_groups,
        HEAD_DIM=head_dim,
        STATE_SIZE=state_size,
        UNIT=unit_bytes // states.itemsize,
        PAGE_UNITS=page_units,
        ROWS=STATE_ROWS,
        COLUMNS=max(8, triton.next_power_of_2(state_size)),
        num_warps=4,
    )
    return out
