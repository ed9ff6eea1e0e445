"""Where the states of a step's sequences are stored: the only code that knows it for the layers
that are computed in torch. A kernel for single tokens finds the pages itself, on the device.

The null block is zeros, which is the state before the first token of a sequence.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longshore.worker.attention.metadata import AttentionMetadata, PrefillChunk
from longshore.worker.attention.state_pieces import upload
from longshore.worker.kv_cache.state_pages import StatePages

ALL = slice(None)


class StepPages:
    """Reads and writes the states of a step's sequences, the decodes, then `chunks`, and what the
    step keeps of the chunks' states. A sequence has one state, which the step replaces."""

    def __init__(
        self, view: StatePages, metadata: AttentionMetadata, chunks: Sequence[PrefillChunk]
    ) -> None:
        self._view = view
        lines = [(chunk.row, chunk.start) for chunk in chunks]
        of_chunks = upload(np.array(lines, np.int64).reshape(-1, 2), view.device)
        of_decodes = torch.stack((metadata.decode_rows, metadata.decode_lens - 1), dim=1)
        rows, starts = torch.cat((of_decodes, of_chunks)).unbind(1)
        self._written = metadata.block_table[rows].long()
        self._read = self._written * (starts > 0)[:, None]
        kept = [state.block_ids for chunk in chunks for state in chunk.kept_states]
        if kept:
            self._kept = upload(np.stack(kept).astype(np.int64), view.device)

    def read(self, tensor: int, layer: int, seqs: slice = ALL, heads: slice = ALL) -> Tensor:
        """A copy of the states before the step: (num_seqs, *shape).

        tensor: index in the shapes of the group's spec. layer: index in the group. seqs: of these
        sequences. heads: a part of the first dimension of the shape of the first tensor.
        """
        return self._view.read(tensor, layer, self._read[seqs], heads)

    def write(
        self, tensor: int, layer: int, states: Tensor, seqs: slice = ALL, heads: slice = ALL
    ) -> None:
        """Store the states after the step; arguments as in `read`."""
        self._view.write(tensor, layer, self._written[seqs], states, heads)

    def keep(self, tensor: int, layer: int, states: Tensor) -> None:
        """Store the states to keep, (n, *shape), in order of the chunks."""
        self._view.write(tensor, layer, self._kept, states)
