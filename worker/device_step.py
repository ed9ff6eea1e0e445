"""The device's part of one step: everything between its numbers and its sampled tokens.

Runs on the compute queue, where the operations of a step are in order with those of the steps
around it. Nothing here waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionBackend
from longshore.worker.attention.metadata import AttentionMetadata, DecodeSegment, PrefillChunk
from longshore.worker.block_table import TableUpload
from longshore.worker.fed_back import FedBackTokens
from longshore.worker.kv_cache import KVCache
from longshore.worker.models.decoder import Decoder
from longshore.worker.parallel import Parallel
from longshore.worker.sampler import count_non_finite, sample
from longshore.worker.sampling_extras import DeviceExtras
from longshore.worker.stage_link import StageLink
from longshore.worker.step_inputs import StepInputs
from longshore.worker.token_table import TokenTable


@dataclass(frozen=True)
class DeviceState:
    """What lives on the device from start to end; only the compute queue touches the tensors.

    block_table: (max_num_seqs, max_blocks) int32.
    link:        to the other pipeline stages; None if there are none.
    """

    model: Decoder
    cache: KVCache
    attention: AttentionBackend
    tokens: TokenTable
    block_table: Tensor
    parallel: Parallel
    link: StageLink | None


@dataclass(frozen=True)
class DeviceStep:
    """One step, ready to run.

    started:  (row, token ids on the host) of rows that were added.
    uploads:  changes of the block tables.
    fed_back: tokens that another rank sampled in an earlier step and this one computes.
    """

    state: DeviceState
    inputs: StepInputs
    segments: Sequence[DecodeSegment]
    chunks: Sequence[PrefillChunk]
    uploads: Sequence[TableUpload]
    started: Sequence[tuple[int, Tensor]]
    fed_back: FedBackTokens | None

    def run(self) -> None:
        """Compute, sample, and start copying the answer into the step's staging set."""
        state, inputs = self.state, self.inputs
        for row, known_ids in self.started:
            state.tokens.start_row(row, known_ids)
        if self.fed_back is not None:
            self.fed_back.write(state.tokens)
        for upload in self.uploads:
            upload.run()
        ints, reals = inputs.to_device(state.cache.buffer.device)
        copied_blocks = ints[inputs.copied_blocks]
        if len(copied_blocks):
            state.cache.copy_blocks(*copied_blocks.view(3, -1))
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
        positions = ints[inputs.positions]
        if state.parallel.is_first_stage:
            model_inputs = state.tokens.gather(ints[inputs.token_index])
        else:
            assert state.link is not None
            model_inputs = state.link.receive(len(positions))
        hidden = state.model.forward(model_inputs, positions, attention)
        if state.parallel.is_last_stage:
            self._finish(hidden, ints, reals)
        else:
            assert state.link is not None
            state.link.send(hidden)

    def _finish(self, hidden: Tensor, ints: Tensor, reals: Tensor) -> None:
        """Logits, which all shards compute together, and tokens, of which one tells the others."""
        state, inputs = self.state, self.inputs
        extras = None if inputs.extras is None else inputs.extras.on_device(hidden.device)
        if extras is not None:
            extras.score_prompt(hidden, state.model.logits, state.tokens)
        if not len(inputs.sampled_rows):
            return
        last = hidden.index_select(0, ints[inputs.last_tokens])
        logits = state.model.logits(last)
        if state.parallel.samples:
            sampled = self._sample(logits, extras, ints, reals)
        else:
            sampled = ints.new_empty(len(logits), dtype=torch.int32)
        state.tokens.scatter(ints[inputs.destinations], state.parallel.broadcast(sampled))

    def _sample(
        self, logits: Tensor, extras: DeviceExtras | None, ints: Tensor, reals: Tensor
    ) -> Tensor:
        """(num_sampled,) int32, on the device; to the host they are on their way."""
        state, inputs = self.state, self.inputs
        non_finite = count_non_finite(logits)  # before tokens are forbidden by infinities
        raw = None
        if extras is not None:
            logits = logits.contiguous()  # a head in shards may leave columns behind its vocabulary
            raw = extras.edit(logits, state.tokens)
            if extras.edits is not None:  # a row that may sample nothing has no token to give
                non_finite += logits.amax(dim=-1).isneginf()
        whole, cut = inputs.whole_draws, inputs.cut_draws
        sampled = sample(
            logits,
            None if whole is None else whole.on_device(ints, reals),
            None if cut is None else cut.on_device(ints, reals),
        )
        inputs.receive(sampled, non_finite)
        if extras is not None:
            extras.score_sampled(raw, sampled)
        return sampled
