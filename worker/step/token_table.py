"""The token ids of every row on the device, so that no step waits for the host to pass them on.

The prompt is written when a row starts. Each sampled token is written by the step that samples it
and read by the next step.
"""

import numpy as np
import torch
from torch import Tensor

from longshore.protocol.plan import RowStart


class TokenTable:
    """ids: (max_num_seqs, width) int32; the last column is for a token sampled at max_model_len."""

    def __init__(self, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        self.width = max_model_len + 1
        self.ids = torch.zeros((max_num_seqs, self.width), dtype=torch.int32, device=device)

    def gather(self, index: Tensor) -> Tensor:
        """index: (n,) int64, row * width + position -> (n,) int32 ids."""
        return self.ids.view(-1).index_select(0, index)

    def scatter(self, index: Tensor, token_ids: Tensor) -> None:
        """Write token_ids, (n,) int32, to `index` as in `gather`."""
        self.ids.view(-1).index_copy_(0, index, token_ids)

    def start_row(self, row: int, known_ids: Tensor) -> None:
        """Write a row's prompt and earlier outputs: (n,) int32, on the host (pinned for CUDA)."""
        self.ids[row, : len(known_ids)].copy_(known_ids, non_blocking=True)


def known_token_ids(start: RowStart, *, pin_memory: bool) -> Tensor:
    """Prompt and outputs of a started row, copied out of the message.

    Pinned memory comes from torch's caching allocator, which reuses it only after the copy.
    """
    ids = torch.from_numpy(np.concatenate((start.prompt_token_ids, start.output_token_ids)))
    return ids.pin_memory() if pin_memory else ids
