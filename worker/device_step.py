"""The device's part of one step: everything between its numbers and its sampled tokens.

Runs on the compute queue, where the operations of a step are in order with those of the steps
around it. Nothing here waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from longshore.worker.attention.backend import AttentionBackend
from longshore.worker.attention.metadata import AttentionMetadata, DecodeSegment, PrefillChunk
from longshore.worker.block_table import TableUpload
from longshore.worker.kv_cache import KVCache
from longshore.worker.models.llama import Llama
from longshore.worker.sampler import count_non_finite, sample
from longshore.worker.step_inputs import StepInputs
from longshore.worker.token_table import TokenTable


@dataclass(frozen=True)
class DeviceState:
    """What lives on the device from start to end; only the compute queue touches the tensors.

    block_table: (max_num_seqs, max_blocks) int32.
    """

    model: Llama
    cache: KVCache
    attention: AttentionBackend
    tokens: TokenTable
    block_table: Tensor


@dataclass(frozen=True)
class DeviceStep:
    """One step, ready to run.

    started:  (row, token ids on the host) of rows that were added.
    uploads:  changes of the block tables.
    """

    state: DeviceState
    inputs: StepInputs
    segments: Sequence[DecodeSegment]
    chunks: Sequence[PrefillChunk]
    uploads: Sequence[TableUpload]
    started: Sequence[tuple[int, Tensor]]

    def run(self) -> None:
        """Compute, sample, and start copying the answer into the step's staging set."""
        state, inputs = self.state, self.inputs
        for row, known_ids in self.started:
            state.tokens.start_row(row, known_ids)
        for upload in self.uploads:
            upload.run()
        ints, reals = inputs.to_device(state.cache.buffer.device)
        cleared_blocks = ints[inputs.cleared_blocks]
        if len(cleared_blocks):
            state.cache.clear(cleared_blocks)
        if len(ints[inputs.token_index]):
            self._compute(ints, reals)

    def _compute(self, ints: Tensor, reals: Tensor) -> None:
        state, inputs = self.state, self.inputs
        attention = state.attention.begin_step(
            AttentionMetadata(
                slot_mapping=ints[inputs.slots],
                block_table=state.block_table,
                decode_rows=ints[inputs.decode_rows],
                decode_lens=ints[inputs.decode_lens],
                decode_segments=self.segments,
                prefill_chunks=self.chunks,
            )
        )
        token_ids = state.tokens.gather(ints[inputs.token_index])
        hidden = state.model.forward(token_ids, ints[inputs.positions], attention)
        if len(inputs.sampled_rows):
            self._sample(hidden.index_select(0, ints[inputs.last_tokens]), ints, reals)

    def _sample(self, hidden: Tensor, ints: Tensor, reals: Tensor) -> None:
        state, inputs = self.state, self.inputs
        logits = state.model.logits(hidden)
        whole, cut = inputs.whole_draws, inputs.cut_draws
        sampled = sample(
            logits,
            None if whole is None else whole.on_device(ints, reals),
            None if cut is None else cut.on_device(ints, reals),
        )
        state.tokens.scatter(ints[inputs.destinations], sampled)
        inputs.receive(sampled, count_non_finite(logits))
