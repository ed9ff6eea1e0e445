"""Repetition, presence and frequency penalties, counted on the device.

Only the device may know the newest token of a row, so tokens are counted there. The counts are
computed from the token table in every step, so preemption and rewinds have no state to correct.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.penalties import penalise
from longshore.worker.step.token_table import TokenTable
from longshore.worker.step.upload import Upload

MAX_COUNTED_ELEMENTS: Final = 1 << 24
"""Counters or tokens that are in memory at once; limits temporaries to a few hundred MiB."""


@dataclass(frozen=True)
class Penalties:
    """Rows with a penalty. Tensors are (n,), on the device.

    samples:    int64, indices among the sampling rows.
    rows:       int64, rows of the token table.
    num_prompt, num_tokens: int64, prompt tokens, and prompt and output tokens.
    repetition, presence, frequency: float32, see SamplingParams.
    longest:    the largest of num_tokens, on the host.
    """

    samples: Tensor
    rows: Tensor
    num_prompt: Tensor
    num_tokens: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    longest: int

    def apply(self, logits: Tensor, tokens: TokenTable) -> None:
        """logits: (num_sampled, vocab_size) float32, changed in place."""
        step = max(1, MAX_COUNTED_ELEMENTS // max(logits.shape[1], self.longest))
        for start in range(0, len(self.samples), step):
            self._apply_part(slice(start, start + step), logits, tokens)

    def _apply_part(self, part: slice, logits: Tensor, tokens: TokenTable) -> None:
        if uses_triton(logits):
            penalise(
                logits,
                tokens.ids,
                samples=self.samples[part],
                rows=self.rows[part],
                num_prompt=self.num_prompt[part],
                num_tokens=self.num_tokens[part],
                repetition=self.repetition[part],
                presence=self.presence[part],
                frequency=self.frequency[part],
                longest=self.longest,
            )
            return
        vocab_size = logits.shape[1]
        ids = tokens.ids[:, : self.longest].index_select(0, self.rows[part]).long()
        positions = torch.arange(self.longest, device=logits.device)
        is_known = positions < self.num_tokens[part].unsqueeze(1)
        is_output = is_known & (positions >= self.num_prompt[part].unsqueeze(1))
        # Only logits of tokens that occur change. Padding repeats the row's first token.
        ids = torch.where(is_known, ids, ids[:, :1])
        counts = torch.zeros((len(ids), vocab_size), dtype=torch.int32, device=logits.device)
        num_outputs = counts.scatter_add_(1, ids, is_output.int()).gather(1, ids)
        index = (self.samples[part].unsqueeze(1) * vocab_size + ids).view(-1)
        penalised = logits.view(-1).index_select(0, index).view_as(ids)
        repetition = self.repetition[part].unsqueeze(1)
        penalised = torch.where(penalised > 0, penalised / repetition, penalised * repetition)
        penalised -= self.frequency[part].unsqueeze(1) * num_outputs
        penalised -= self.presence[part].unsqueeze(1) * (num_outputs > 0)
        # A token that occurs twice is written twice, with the same value.
        logits.view(-1).index_copy_(0, index, penalised.view(-1))


@dataclass(frozen=True)
class PenaltySlices:
    """Slices of a step's packed penalties, in the order of the fields of `Penalties`."""

    ints: tuple[slice, slice, slice, slice]
    reals: tuple[slice, slice, slice]
    longest: int

    def on_device(self, ints: Tensor, reals: Tensor) -> Penalties:
        samples, rows, num_prompt, num_tokens = (ints[span] for span in self.ints)
        repetition, presence, frequency = (reals[span] for span in self.reals)
        return Penalties(
            samples,
            rows,
            num_prompt,
            num_tokens,
            repetition,
            presence,
            frequency,
            self.longest,
        )


def pack_penalties(
    *,
    samples: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    num_prompt: npt.NDArray[np.int64],
    num_tokens: npt.NDArray[np.int64],
    repetition: npt.NDArray[np.float64],
    presence: npt.NDArray[np.float64],
    frequency: npt.NDArray[np.float64],
    upload: Upload,
) -> PenaltySlices:
    """Pack the penalties of n rows, n at least 1. Arrays are (n,); see `Penalties`."""
    return PenaltySlices(
        (upload.ints(samples), upload.ints(rows), upload.ints(num_prompt), upload.ints(num_tokens)),
        (upload.reals(repetition), upload.reals(presence), upload.reals(frequency)),
        int(num_tokens.max()),
    )
