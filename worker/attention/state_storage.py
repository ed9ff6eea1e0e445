"""Where the states of a step's sequences are stored: the only code that knows it for the layers
that are computed in torch. A kernel for single tokens finds the blocks itself, on the device.

A block holds the state after a token. The null block is zeros, which is the state before the first
token of a sequence.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longshore.worker.attention.metadata import AttentionMetadata, PrefillChunk
from longshore.worker.attention.state_pieces import upload
from longshore.worker.kv_cache.buffer import PagedStates

ALL = slice(None)


class StepStates:
    """Reads and writes the stored states of a step's sequences: the decodes, then `chunks`."""

    def __init__(
        self, view: PagedStates, metadata: AttentionMetadata, chunks: Sequence[PrefillChunk]
    ) -> None:
        self._tensors = view.states
        self._read, self._written = _blocks(metadata, chunks, view.block_size)

    def read(self, tensor: int, layer: int, seqs: slice = ALL, heads: slice = ALL) -> Tensor:
        """A copy of the states before the step: (num_seqs, *shape).

        tensor: index in the shapes of the group's spec. layer: index in the group. seqs: of these
        sequences. heads: a part of the first dimension of the shape.
        """
        return self._tensors[tensor][:, layer, heads].index_select(0, self._read[seqs])

    def write(
        self, tensor: int, layer: int, states: Tensor, seqs: slice = ALL, heads: slice = ALL
    ) -> None:
        """Store the states after the step; arguments as in `read`. A state that another sequence
        has not read yet may be overwritten."""
        self._tensors[tensor][:, layer, heads].index_copy_(0, self._written[seqs], states)


def _blocks(
    metadata: AttentionMetadata, chunks: Sequence[PrefillChunk], block_size: int
) -> tuple[Tensor, Tensor]:
    """The block of each sequence's last token before the step, or the null block if there is none,
    and the block of its last token in the step: (num_seqs,) int64 each, decodes first."""
    table, lens = metadata.block_table, metadata.decode_lens
    lines = [(c.row, c.seq_len - c.num_tokens, c.seq_len) for c in chunks]
    of_chunks = upload(np.array(lines, np.int64).reshape(-1, 3), table.device)
    of_decodes = torch.stack((metadata.decode_rows, lens - 1, lens), dim=1)
    rows, starts, ends = torch.cat((of_decodes, of_chunks)).unbind(1)

    def block_of(positions: Tensor) -> Tensor:
        columns = positions.div(block_size, rounding_mode="floor")
        return table[rows, columns].long()

    return block_of((starts - 1).clamp_(min=0)) * (starts > 0), block_of(ends - 1)
