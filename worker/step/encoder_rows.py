"""Rows that attend to an encoder's tokens: what each brings, and how many tokens that becomes.

A row's item is encoded in the step in which it takes its row, in every life of a request, straight
into the row's blocks of cross attention. Those come with the start and stay until the row is
dropped: they neither grow nor are they cut by a rewind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longshore.protocol.arrays import Int64Array
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.requests import MultimodalFeature
from longshore.worker.kv_cache.block_table import BlockTable, IntArray

_NO_TOKENS: Final = np.empty(0, np.int64)
_UNLIMITED: Final = np.iinfo(np.int64).max
_SAMPLE: Final = np.dtype("<f4")
_LOUDEST: Final = float(1 << 31)
"""Of a sample. Sound lies within -1 and 1, or within this if it kept the scale of its integers. The
squares of much more are infinite, and the spectrogram then is no number anywhere."""


class CrossBlockTable(BlockTable):
    """Blocks of the encoder's tokens, which do not follow the positions of the row's own."""

    def truncate_row(self, row: int, num_tokens: int) -> None:
        """A rewind takes back none of the encoder's tokens."""

    def capacity(self) -> Int64Array:
        return np.full(len(self.num_blocks), _UNLIMITED)

    def step_slots(
        self, rows: Int64Array, places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    ) -> Int64Array:
        """A step's own tokens leave nothing here."""
        return _NO_TOKENS

    def holds(self, row: int) -> int:
        """Of the encoder's tokens, for how many the row has blocks."""
        return int(self.num_blocks[row]) * self.block_size


@dataclass(frozen=True)
class EncoderInput:
    """samples: (max_audio_samples,) float32, on the host (pinned for CUDA).
    num_tokens: of the encoder's, that the row attends to."""

    row: int
    num_tokens: int
    samples: Tensor


class EncoderRows:
    """Of a model without an encoder: nothing, and a plan that asks for it is refused.

    lens: (max_num_seqs,) tokens of the encoder that each row attends to. Rows that have not begun
          attend to as many as there can be, all in the null block: for warming up.
    """

    def __init__(
        self,
        tables: Sequence[BlockTable],
        *,
        max_num_seqs: int,
        max_tokens: int,
        max_samples: int,
        pin_memory: bool,
    ) -> None:
        """tables: of all groups. max_tokens: that the encoder makes; 0: there is none."""
        self._tables = [table for table in tables if isinstance(table, CrossBlockTable)]
        self._max_tokens = max_tokens
        self._max_samples = max_samples
        self._pin_memory = pin_memory
        self.lens = np.full(max_num_seqs, max_tokens, np.int64)

    def lens_of(self, token_rows: Int64Array) -> Int64Array:
        """(num_tokens,) what each token of a step attends to; empty if there is no encoder."""
        return self.lens[token_rows] if self._max_tokens else _NO_TOKENS

    def take(self, plan: SchedulerOutput, num_scheduled: IntArray) -> list[EncoderInput]:
        """What `plan`, whose rows the tables have, encodes. num_scheduled: (max_num_seqs,).

        Raises PlanMismatch unless that is one item of every row that it starts.
        """
        if not self._max_tokens:
            if plan.encoder_inputs:
                raise PlanMismatch(
                    f"step {plan.step} has encoder_inputs; this worker's model does not support "
                    "multimodal inputs. Switch them off in the scheduler."
                )
            return []
        starts = {start.row: start for start in plan.added}
        rows = [row for row, _ in plan.encoder_inputs]
        if sorted(rows) != sorted(starts):
            raise PlanMismatch(
                f"step {plan.step} encodes an item of rows {sorted(rows)} and starts rows "
                f"{sorted(starts)}; a row's item is encoded once, in the step that starts it"
            )
        return [
            self._input(plan.step, row, index, starts[row].multimodal, int(num_scheduled[row]))
            for row, index in plan.encoder_inputs
        ]

    def silence(self, row: int) -> EncoderInput | None:
        """For warming up; None if there is no encoder."""
        if not self._max_tokens:
            return None
        return EncoderInput(row, self._max_tokens, torch.zeros(self._max_samples))

    def _input(
        self, step: int, row: int, index: int, items: Sequence[MultimodalFeature], count: int
    ) -> EncoderInput:
        if not 0 <= index < len(items):
            raise PlanMismatch(
                f"step {step} encodes item {index} of row {row}, which brings {len(items)}"
            )
        if not count:
            raise PlanMismatch(f"step {step} encodes an item of row {row}, which computes nothing")
        num_tokens = items[index].num_tokens
        room = min(self._max_tokens, *(table.holds(row) for table in self._tables))
        if not 0 < num_tokens <= room:
            raise PlanMismatch(
                f"step {step} encodes {num_tokens} tokens for row {row}; its blocks and the "
                f"encoder's {self._max_tokens} tokens make room for 1 to {room}"
            )
        self.lens[row] = num_tokens
        return EncoderInput(row, num_tokens, self._samples(items[index]))

    def _samples(self, item: MultimodalFeature) -> Tensor:
        """Memory of its own, which the message does not share. What is no number is silence, and so
        is what a short item lacks; a long one is cut, and so is what is louder than any sound. A
        bad item must not end the engine, or its request."""
        given = item.data[: 4 * min(self._max_samples, len(item.data) // 4)].view(_SAMPLE)
        samples = np.zeros(self._max_samples, np.float32)
        np.copyto(samples[: len(given)], given, where=np.isfinite(given))
        samples.clip(-_LOUDEST, _LOUDEST, out=samples)
        tensor = torch.from_numpy(samples)
        return tensor.pin_memory() if self._pin_memory else tensor
