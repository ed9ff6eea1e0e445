"""Rows with cross attention: their encoder inputs and the number of encoder tokens.

A request's item is encoded in the step that starts its row, again after each preemption, directly
into the row's cross-attention blocks. These blocks are allocated when the row starts and freed with
the row: they do not grow, and a rewind does not free them.
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
from longshore.worker.transfer.encoder import StepOutputs

_NO_TOKENS: Final = np.empty(0, np.int64)
_UNLIMITED: Final = np.iinfo(np.int64).max
_SAMPLE: Final = np.dtype("<f4")
_LOUDEST: Final = float(1 << 31)
"""Samples are clipped to this magnitude. Audio lies within -1 and 1, or within this if it has kept
an integer scale. Squares of much larger samples overflow, which makes the whole spectrogram NaN."""


class CrossBlockTable(BlockTable):
    """Blocks of the encoder's tokens, which are independent of the row's own positions."""

    def truncate_row(self, row: int, num_tokens: int) -> None:
        """A rewind does not affect the encoder's tokens."""

    def capacity(self) -> Int64Array:
        return np.full(len(self.num_blocks), _UNLIMITED)

    def step_slots(
        self, rows: Int64Array, places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    ) -> Int64Array:
        """A step's own tokens write nothing here."""
        return _NO_TOKENS

    def holds(self, row: int) -> int:
        """The number of encoder tokens that the row's blocks hold."""
        return int(self.num_blocks[row]) * self.block_size


@dataclass(frozen=True)
class EncoderInput:
    """samples: (max_audio_samples,) float32, on the host (pinned for CUDA).
    num_tokens: encoder tokens that the row attends to.
    outputs: of the encoder connector, which may have the output of the samples."""

    row: int
    num_tokens: int
    samples: Tensor
    outputs: StepOutputs | None = None


class EncoderRows:
    """Encoder inputs and lengths of all rows. Without an encoder there are none, and a plan with
    encoder inputs is rejected.

    lens: (max_num_seqs,) encoder tokens that each row attends to. Rows that have not started have
          the maximum, all in the null block, for the warm-up.
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
        """tables: block tables of all groups. max_tokens: maximum tokens that the encoder produces;
        0 if there is no encoder."""
        self._tables = [table for table in tables if isinstance(table, CrossBlockTable)]
        self._max_tokens = max_tokens
        self._max_samples = max_samples
        self._pin_memory = pin_memory
        self.lens = np.full(max_num_seqs, max_tokens, np.int64)

    def lens_of(self, token_rows: Int64Array) -> Int64Array:
        """(num_tokens,) encoder tokens that each token of a step attends to; empty without an
        encoder."""
        return self.lens[token_rows] if self._max_tokens else _NO_TOKENS

    def take(
        self, plan: SchedulerOutput, num_scheduled: IntArray, outputs: StepOutputs | None = None
    ) -> list[EncoderInput]:
        """The encoder inputs of `plan`, which the tables have applied. num_scheduled:
        (max_num_seqs,). outputs: see EncoderInput.

        Raises PlanMismatch unless the plan encodes one item of every row that it starts.
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
            self._input(
                plan.step, row, index, starts[row].multimodal, int(num_scheduled[row]), outputs
            )
            for row, index in plan.encoder_inputs
        ]

    def silence(self, row: int) -> EncoderInput | None:
        """Input for the warm-up; None without an encoder."""
        if not self._max_tokens:
            return None
        samples = torch.zeros(self._max_samples, pin_memory=self._pin_memory)
        return EncoderInput(row, self._max_tokens, samples)

    def _input(
        self,
        step: int,
        row: int,
        index: int,
        items: Sequence[MultimodalFeature],
        count: int,
        outputs: StepOutputs | None,
    ) -> EncoderInput:
        if not 0 <= index < len(items):
            raise PlanMismatch(
                f"step {step} encodes item {index} of row {row}, whose request has {len(items)}"
            )
        if not count:
            raise PlanMismatch(f"step {step} encodes an item of row {row}, which computes nothing")
        num_tokens = items[index].num_tokens
        capacity = min(self._max_tokens, *(table.holds(row) for table in self._tables))
        if not 0 < num_tokens <= capacity:
            raise PlanMismatch(
                f"step {step} encodes {num_tokens} tokens for row {row}; its blocks and the "
                f"encoder, which produces {self._max_tokens}, allow 1 to {capacity}"
            )
        self.lens[row] = num_tokens
        return EncoderInput(row, num_tokens, self._samples(items[index]), outputs)

    def _samples(self, item: MultimodalFeature) -> Tensor:
        """The item's samples in new memory, so that the message can be freed. A bad item must not
        stop the engine: NaN and missing samples become silence, extra samples are dropped, and loud
        ones are clipped."""
        given = item.data[: 4 * min(self._max_samples, len(item.data) // 4)].view(_SAMPLE)
        samples = np.zeros(self._max_samples, np.float32)
        np.copyto(samples[: len(given)], given, where=np.isfinite(given))
        samples.clip(-_LOUDEST, _LOUDEST, out=samples)
        tensor = torch.from_numpy(samples)
        return tensor.pin_memory() if self._pin_memory else tensor
