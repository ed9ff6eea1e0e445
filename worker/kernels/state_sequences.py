"""Sequences through layers with states, token by token, in the compiled CPU kernels."""

import threading
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longshore.protocol.arrays import Int32Array
from longshore.worker.kernels.native import (
    DTYPES,
    STATE_STEP,
    Native,
    empty,
    native,
    num_threads,
)
from longshore.worker.kv_cache.state_pages import StatePages

PIECE_TOKENS: Final = 32
"""As in native/state_sequences.h."""


class Placement(NamedTuple):
    """A layer's states in the pool, as the kernels take it. shape: of the first tensor.
    first_units: of each tensor."""

    buffer: Tensor
    shape: tuple[int, ...]
    first_units: list[int]
    unit_bytes: int
    page_units: int


def placement(pages: StatePages, layer: int, dtype: torch.dtype) -> Placement:
    """dtype: of the layer's inputs."""
    assert pages.dtypes == (torch.float32, dtype)
    begin = layer * pages.layer_units
    return Placement(
        pages.buffer,
        pages.spec.shapes[0],
        [begin + first for first in pages.first_units],
        pages.spec.unit_bytes,
        pages.page_units,
    )


class StateSequences:
    """The sequences of a step.

    block_table: (max_num_seqs, max_blocks) int32: a line has the pages of a sequence's state.
    sequences:   (n, 4) int64: line of the table, first token in the step, number of its tokens in
                 the step, and of all of its tokens. One of 0 tokens has 1 in the step, and reads
                 and writes no page.
    stops:       for each sequence, the numbers of its tokens in the step, ascending, after which
                 its state is also written to the pages given there, (num_pages,) int32.
    """

    def __init__(
        self,
        block_table: Tensor,
        sequences: Tensor,
        stops: Sequence[Sequence[tuple[int, Int32Array]]] = (),
    ) -> None:
        assert block_table.stride(1) == 1
        self.block_table, self.lines = block_table, sequences.contiguous()
        of_all = list(chain.from_iterable(stops))
        counts = [len(of_one) for of_one in stops] or [0] * len(sequences)
        self.first_stops = torch.tensor([0, *accumulate(counts)])
        self.stops = torch.tensor([stop for stop, _ in of_all], dtype=torch.int64)
        tables = np.array([pages for _, pages in of_all], np.int32)
        self.stop_tables = torch.from_numpy(np.atleast_2d(tables))

    @classmethod
    def of_single_tokens(cls, block_table: Tensor, rows: Tensor, lens: Tensor) -> "StateSequences":
        """One token of each sequence; rows, lens: (n,) int64."""
        tokens = torch.arange(len(rows))
        return cls(block_table, torch.stack((rows, tokens, torch.ones_like(rows), lens), dim=1))


def native_kernels(pages: StatePages) -> Native | None:
    """The compiled kernels, if they have one for these states: float32, and kept inputs in a dtype
    of the kernels."""
    is_supported = pages.dtypes[0] == torch.float32 and pages.dtypes[1] in DTYPES
    return native() if is_supported and pages.device.type == "cpu" else None


def run(
    kernel: str,
    of_layer: bytes,
    inputs: Tensor,
    pages: StatePages,
    layer: int,
    sequences: StateSequences,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    *,
    scratch_floats: int,
) -> Tensor:
    """Run a kernel for all tokens of a step, (n, channels). of_layer: its arguments after StateStep
    of native/calls.h. scratch_floats: of a thread, without those for kept inputs.

    Returns (n, width of all heads) float32.
    """
    kernels = native_kernels(pages)
    assert kernels is not None
    assert inputs.stride(1) == 1
    (num_heads, *head), (num_kept, num_channels) = pages.spec.shapes
    width = num_heads * head[_OUTPUTS[kernel]]
    placed = placement(pages, layer, inputs.dtype)
    out = empty((len(inputs), width), torch.float32)
    threads = num_threads(len(inputs) * 4 * num_heads * head[0] * head[1])
    scratch_floats += num_kept * max(head)
    scratch_floats += scratch_floats % 2  # it begins with pointers
    scratch = _scratch(threads * scratch_floats)
    step = STATE_STEP.pack(
        *(each.data_ptr() for each in (inputs, placed.buffer, sequences.block_table)),
        *(each.data_ptr() for each in (sequences.stop_tables, sequences.lines, sequences.stops)),
        *(sequences.first_stops.data_ptr(), conv_weight.data_ptr()),
        0 if conv_bias is None else conv_bias.data_ptr(),
        *(out.data_ptr(), scratch.data_ptr()),
        *(len(sequences.lines), num_channels, num_kept + 1),
        *(inputs.stride(0), sequences.block_table.stride(0), sequences.stop_tables.shape[1]),
        *(placed.buffer.stride(0), placed.unit_bytes, placed.page_units, *placed.first_units),
        *(scratch_floats, threads),
    )
    kernels.run(kernel, inputs.dtype, step + of_layer)
    return out


_OUTPUTS: Final = {"delta_step": 1, "mamba_step": 0}
"""Which dimension of a head's state its outputs have."""


class _Scratch(threading.local):
    """Memory that a thread keeps from call to call: new pages would cost more than the kernel."""

    memory = torch.empty(0)


_of_thread = _Scratch()


def _scratch(num_floats: int) -> Tensor:
    if len(_of_thread.memory) < num_floats:
        _of_thread.memory = torch.empty(num_floats)
    return _of_thread.memory
