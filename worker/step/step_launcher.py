"""Launches steps: packs a batch for the device and submits its computation.

Owns what all steps share: block tables, staging memory and the state on the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch

from longshore.protocol.kv_cache_spec import (
    NULL_BLOCK,
    CrossAttentionSpec,
    KVCacheSpec,
    StateSpec,
)
from longshore.worker.attention.grouped import GroupedAttention
from longshore.worker.attention.metadata import DecodeSegment
from longshore.worker.attention.segments import decode_segments
from longshore.worker.drafting.network import DraftNetwork
from longshore.worker.kernels.cascade_attention import pays
from longshore.worker.kv_cache.block_table import BlockTable, MultiGroupBlockTable, StateTable
from longshore.worker.kv_cache.buffer import KVCache
from longshore.worker.kv_cache.context_share import ContextShare
from longshore.worker.models.decoder_model import DecoderModel
from longshore.worker.queues.compute_queue import Completion, ComputeQueue
from longshore.worker.ranks.parallel import Parallel
from longshore.worker.ranks.stage_link import StageLink
from longshore.worker.sampling.pooling import PooledSums
from longshore.worker.sampling.token_masks import TokenMask
from longshore.worker.step.decode_graphs import DecodeGraphs, graph_maker
from longshore.worker.step.device_step import DeviceState, DeviceStep
from longshore.worker.step.encoder_rows import CrossBlockTable, EncoderRows
from longshore.worker.step.expert_capture import ExpertCapture
from longshore.worker.step.model_forward import ModelForward
from longshore.worker.step.network_drafts import NetworkDrafts
from longshore.worker.step.step_batch import Int64s, StepBatch, blocks_to_clear
from longshore.worker.step.step_inputs import StepInputs, StepInputsBuilder
from longshore.worker.step.step_task import StepTask
from longshore.worker.step.token_table import TokenTable
from longshore.worker.step.unsampled_step import UnsampledStep

NO_TOKENS: Final = np.empty(0, np.int64)


@dataclass(frozen=True)
class PreparedStep:
    """A step whose part on the host is done. Steps are submitted in the order in which they were
    prepared.

    unsampled: the step waits for its token mask before it samples; no other step may be submitted
               until then.
    """

    unsampled: UnsampledStep | None
    _queue: ComputeQueue
    _step: DeviceStep
    _on_done: Callable[[Completion], None] | None
    _step_id: int | None

    @property
    def lacked_memory(self) -> bool:
        """Whether the step was not computed for want of memory; valid once it has ended."""
        return self._step.inputs.outcome.is_out_of_memory

    def submit(self) -> Completion:
        """Start the step; does not wait for the device. Returns the completion of what could be
        submitted."""
        step = self._step
        if self.unsampled is None:
            completion = self._queue.submit(step.run, self._on_done, step_id=self._step_id)
            step.inputs.staging.guard(completion)
        else:
            completion = self._queue.submit(step.compute, step_id=self._step_id)
            self.unsampled.launched(partial(self._finish, completion))
        for upload in step.uploads:
            upload.guard(completion)
        return completion

    def _finish(self, computed: Completion, mask: TokenMask | None) -> None:
        """Submit the second operation of the step. computed: the first."""

        def ended(completion: Completion) -> None:
            completion.elapsed_s += computed.elapsed_s
            completion.gap_s = computed.gap_s
            if self._on_done is not None:
                self._on_done(completion)

        finish = partial(self._step.finish, mask)
        completion = self._queue.submit(finish, ended, step_id=self._step_id)
        self._step.inputs.staging.guard(completion)


class StepLauncher:
    """Does the host's part of each step; the rest is one operation on the compute queue.

    max_step_tokens, max_decodes: of one sequence in a step, and sequences with one token each: the
             rows, and their drafts.
    tables:  block tables of all groups.
    encoder: encoder inputs of all rows.
    state:   what all steps use on the device.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: KVCache,
        attention: GroupedAttention,
        queue: ComputeQueue,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        parallel: Parallel,
        num_drafts: int = 0,
        has_layer_hooks: bool = False,
        may_repeat_steps: bool = True,
        enforce_eager: bool = False,
        experts: ExpertCapture | None = None,
        network: DraftNetwork | None = None,
    ) -> None:
        """num_drafts: the most that a row verifies in a step. has_layer_hooks, may_repeat_steps:
        see ConnectorRunner. enforce_eager: see WorkerConfig. experts: see DeviceState.
        network: a drafter with weights."""
        self._queue = queue
        self._share = parallel.context_share
        self.pin_memory = cache.device.type == "cuda"
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.max_step_tokens = min(max_num_batched_tokens, max_model_len)
        self._shares_blocks = attention.shares_blocks and self._share.size == 1
        self.max_decodes = min(max_num_batched_tokens, max_num_seqs * (1 + num_drafts))
        max_tokens, max_samples = max_num_batched_tokens, self.max_decodes
        if network is not None and network.reads_hidden:  # then a row may have a primer
            max_tokens, max_samples = max_tokens + max_num_seqs, max_samples + max_num_seqs
        self.tables = MultiGroupBlockTable(
            [
                _block_table(group.spec, max_num_seqs, max_model_len, self._share, cache.device)
                for group in cache.groups
            ]
        )
        # Blocks of states and of cross attention are always written whole, so they need no
        # clearing.
        self._cleared_tables = [
            table
            for table, group in zip(self.tables.tables, cache.groups, strict=True)
            if not isinstance(group.spec, (StateSpec, CrossAttentionSpec))
        ]
        self.encoder = EncoderRows(
            self.tables.tables,
            max_num_seqs=max_num_seqs,
            max_tokens=model.config.max_encoder_tokens,
            max_samples=model.config.max_audio_samples,
            pin_memory=self.pin_memory,
        )
        graphs = None
        maker = None if enforce_eager else graph_maker(cache.device)
        if (
            maker is not None
            and attention.is_replayable
            and model.config.has_head
            and parallel.num_stages == 1
        ):
            graphs = DecodeGraphs(
                maker,
                max_rows=self.max_decodes,
                has_layer_hooks=has_layer_hooks,
                shares_blocks=attention.shares_blocks,
            )
        tokens = TokenTable(max_num_seqs, max_model_len, cache.device)
        self.network: NetworkDrafts | None = None
        if network is not None:
            self.network = NetworkDrafts(
                network,
                GroupedAttention(cache, network.cached_layers(), parallel),
                self.tables.tables,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                num_drafts=num_drafts,
                dtype=cache.dtype,
                device=cache.device,
            )
        self.state = DeviceState(
            model,
            ModelForward(model, is_eager=enforce_eager or has_layer_hooks),
            cache,
            attention,
            tokens,
            self.tables.device_tables,
            parallel,
            graphs,
            _stage_link(parallel, model, cache),
            PooledSums(max_num_seqs),
            experts,
            self.network,
            may_repeat_steps=may_repeat_steps and parallel.num_ranks == 1,
        )
        self._inputs = StepInputsBuilder(
            max_num_seqs=max_num_seqs,
            max_samples=max_samples,
            max_num_batched_tokens=max_tokens,
            token_width=tokens.width,
            num_blocks=cache.num_blocks,
            num_groups=len(cache.groups),
            num_state_pages=sum(
                group.spec.num_pages for group in cache.groups if isinstance(group.spec, StateSpec)
            ),
            num_begun_blocks=1 if self.network is None else 2 + num_drafts,
            vocab_size=model.config.vocab_size,
            pin_memory=self.pin_memory,
            staged={
                **({} if experts is None else experts.staged),
                **({} if self.network is None else self.network.staged),
            },
            device=None if graphs is None else cache.device,
        )

    def prepare(
        self,
        task: StepTask,
        *,
        on_answer: Callable[[StepInputs, Completion], None] | None = None,
        step_id: int | None = None,
        unsampled: UnsampledStep | None = None,
    ) -> PreparedStep:
        """Do the host's part of one step. Of the steps prepared and not yet submitted, or submitted
        and without their mask, there may be two: each occupies a staging set.

        on_answer: called like `on_done` of ComputeQueue.submit, with the step's inputs first. The
                   time of a step in two operations is the sum of both.
        unsampled: see PreparedStep.
        """
        tables, batch = self.tables, task.batch
        begun = [blocks_to_clear(batch, t.host, t.block_size) for t in self._cleared_tables]
        token_rows, positions = batch.token_rows(), batch.positions()
        share, cross_lens = self._share, self.encoder.lens_of(token_rows)
        shared_tokens, shares_blocks = self._shared_tokens(batch, task.common_prefix_blocks)
        num_padded = None
        if task.captured is not None:
            num_padded, shares_blocks = task.captured
        elif self.state.graphs is not None and not task.encoded and batch.is_decode:
            num_padded, shares_blocks = self.state.graphs.best(len(batch.rows), shares_blocks)
        slots = tables.slots(token_rows, positions)
        if batch.primers is not None:
            is_primer = np.repeat(batch.primers, batch.counts)
            slots = [np.where(is_primer, -1, of_group) for of_group in slots]
        network = None
        if self.network is not None and task.captured is None:
            network = self.network.plan(task, num_padded)
            begun += [self.network.begun_blocks(network, table) for table in self._cleared_tables]
        inputs = self._inputs.build(
            task,
            slots=slots,
            kept_tokens=NO_TOKENS if share.size == 1 else np.flatnonzero(share.keeps(positions)),
            cross_lens=cross_lens,
            shared_tokens=shared_tokens,
            cleared_blocks=np.concatenate((task.zero_block_ids, *begun)),
            kept_pages=self._kept_pages(task),
            num_padded=num_padded,
            network=network,
        )
        step = DeviceStep(
            state=self.state,
            inputs=inputs,
            task=task,
            segments=self._segments(batch, cross_lens),
            chunks=batch.prefill_chunks(task.kept_states),
            uploads=tables.commit(),
            shares_blocks=shares_blocks,
        )
        on_done = None if on_answer is None else partial(on_answer, inputs)
        return PreparedStep(unsampled, self._queue, step, on_done, step_id)

    def _kept_pages(self, task: StepTask) -> Int64s:
        """See StepInputs. Chunks of several tokens write the states to keep themselves."""
        if not task.kept_states:
            return NO_TOKENS
        decodes = task.batch.rows[: task.batch.num_decodes].tolist()
        kept = [state for row in decodes for state in task.kept_states.get(row, ())]
        if not kept:
            return NO_TOKENS
        assert self.tables.states is not None
        sources = self.tables.states.host[[state.row for state in kept]]
        targets = [state.block_ids for state in kept]
        return np.concatenate((*sources, *targets), dtype=np.int64)

    def _shared_tokens(self, batch: StepBatch, common: Sequence[int]) -> tuple[Int64s, bool]:
        """The leading tokens that the decodes share, per group, and whether it pays in any group to
        read their blocks once."""
        tables, groups = self.tables.tables, self.state.cache.groups
        shared = np.zeros(len(tables), np.int64)
        if not self._shares_blocks or not any(common) or batch.num_decodes < 2:
            return shared, False
        does_pay = False
        for index, (table, group, num_common) in enumerate(
            zip(tables, groups, common, strict=True)
        ):
            size = table.block_size
            shared[index] = batch.shared_blocks(num_common, size) * size
            token_bytes = group.spec.page_size_bytes // size
            does_pay |= pays(batch.num_decodes, int(shared[index]), token_bytes)
        return shared, does_pay

    def _segments(self, batch: StepBatch, cross_lens: Int64s) -> list[Sequence[DecodeSegment]]:
        """The segments of the decodes, per group.

        Segments of cross attention follow the order of the step's tokens. If the lengths differ,
        there are more segments than necessary; in practice all are equal.
        """
        by_size = {
            size: decode_segments(batch.decode_blocks(size), size)
            for size in set(self.tables.block_sizes)
        }
        return [
            decode_segments(-(-cross_lens // table.block_size), table.block_size)
            if isinstance(table, CrossBlockTable)
            else by_size[table.block_size]
            for table in self.tables.tables
        ]

    def clear_null_block(self) -> None:
        """Wait until the null block is zero."""
        self._queue.submit(self.state.cache.buffer[NULL_BLOCK].zero_).wait()

    def finish(self) -> None:
        """Wait until all steps have ended, and the next pipeline stage has received everything."""
        link = self.state.link
        self._queue.submit((lambda: None) if link is None else link.finish).wait()


def _stage_link(parallel: Parallel, model: DecoderModel, cache: KVCache) -> StageLink | None:
    if parallel.num_stages == 1:
        return None
    hidden_size = model.config.hidden_size
    return StageLink(parallel, hidden_size=hidden_size, dtype=cache.dtype, device=cache.device)


def _block_table(
    spec: KVCacheSpec,
    max_num_seqs: int,
    max_model_len: int,
    share: ContextShare,
    device: torch.device,
) -> BlockTable:
    kind = BlockTable
    if isinstance(spec, CrossAttentionSpec):
        kind, max_model_len = CrossBlockTable, spec.max_encoder_tokens
    elif isinstance(spec, StateSpec):
        kind, max_model_len = StateTable, spec.num_pages * spec.block_size
    return kind(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=spec.block_size,
        share=share,
        device=device,
    )
