"""The device's part of one step: from packed inputs to sampled tokens.

Runs on the compute queue, in order with the operations of earlier and later steps. Nothing here
waits for the device. It is one operation, or two if the sampling needs a token mask, which arrives
later.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from longshore.protocol.kv_cache_spec import CrossAttentionSpec
from longshore.worker.attention.backend import LayerHooks
from longshore.worker.attention.grouped import GroupedAttention
from longshore.worker.attention.metadata import AttentionMetadata, DecodeSegment, PrefillChunk
from longshore.worker.errors import OutOfMemory
from longshore.worker.kernels.argmax import argmax
from longshore.worker.kv_cache.block_table import TableUpload
from longshore.worker.kv_cache.buffer import KVCache
from longshore.worker.models.decoder_model import DecoderModel
from longshore.worker.process.device import is_out_of_memory, release_unused_memory
from longshore.worker.ranks.parallel import Parallel
from longshore.worker.ranks.stage_link import StageLink
from longshore.worker.sampling.extras import DeviceExtras
from longshore.worker.sampling.pooling import PooledSums
from longshore.worker.sampling.sampler import sample
from longshore.worker.sampling.token_masks import TokenMask
from longshore.worker.step.decode_graphs import Decoded, DecodeGraphs, GraphKey
from longshore.worker.step.encoder_rows import EncoderInput
from longshore.worker.step.expert_capture import ExpertCapture
from longshore.worker.step.model_forward import ModelForward
from longshore.worker.step.network_drafts import STAGED, DraftParts, NetworkDrafts
from longshore.worker.step.step_inputs import StepInputs
from longshore.worker.step.step_task import StepTask
from longshore.worker.step.token_table import TokenTable


@dataclass(frozen=True)
class DeviceState:
    """State on the device that all steps use; only the compute queue touches the tensors.

    block_tables: per group, (max_num_seqs, max_blocks) int32.
    graphs:      of decode steps; None if there are none.
    link:        link to the other pipeline stages; None if there is one stage.
    pooled:      running sums of pooling rows.
    experts:     captures the chosen experts; None if they are not returned.
    network:     a drafter with weights; None: there is none.
    may_repeat_steps: a step without memory is reported as not computed; else it fails.
    """

    model: DecoderModel
    forward: ModelForward
    cache: KVCache
    attention: GroupedAttention
    tokens: TokenTable
    block_tables: Sequence[Tensor]
    parallel: Parallel
    graphs: DecodeGraphs | None
    link: StageLink | None
    pooled: PooledSums
    experts: ExpertCapture | None
    network: NetworkDrafts | None
    may_repeat_steps: bool


@dataclass(frozen=True)
class Unsampled:
    """What the sampling of a step needs, on the device.

    logits: (num_sampled, vocab_size) float32; on ranks that do not sample, their shard's.
    ints, reals: see `StepInputs.to_device`.
    """

    logits: Tensor
    extras: DeviceExtras | None
    ints: Tensor
    reals: Tensor


@dataclass
class DeviceStep:
    """One step, ready to run: `compute`, then `finish`.

    segments: segments of the decodes, per group.
    uploads:  changes of the block tables.
    shares_blocks: the decodes read the blocks that they have in common once.
    unsampled: set by `compute` if rows of this rank's stage sample.
    """

    state: DeviceState
    inputs: StepInputs
    task: StepTask
    segments: Sequence[Sequence[DecodeSegment]]
    chunks: Sequence[PrefillChunk]
    uploads: Sequence[TableUpload]
    shares_blocks: bool = False
    unsampled: Unsampled | None = field(default=None, init=False)
    _draft_parts: DraftParts | None = field(default=None, init=False)

    def run(self) -> None:
        """The whole step as one operation."""
        self.compute()
        self.finish()

    def compute(self) -> None:
        """Compute the logits. Raises OutOfMemory for a step that cannot be computed again."""
        if self.task.guard is not None:
            self.task.guard.begin()
        if self.task.transfers is not None:
            self.task.transfers.before_step()
        with _lack_of_memory_named():
            self._run()

    def finish(self, mask: TokenMask | None = None) -> None:
        """Sample, and start copying the results into the step's staging set. Raises OutOfMemory as
        `compute` does.

        mask: of the rows with structured output, on the rank that samples.
        """
        unsampled, self.unsampled = self.unsampled, None  # free the logits with this operation
        if unsampled is not None:
            with _lack_of_memory_named():
                self._if_it_fits(partial(self._sample_and_share, unsampled, mask))
        if self.task.transfers is not None:
            self.task.transfers.after_step()
        if self.task.guard is not None:
            self.task.guard.end()

    def _run(self) -> None:
        state, inputs = self.state, self.inputs
        for row, known_ids in self.task.started:
            state.tokens.start_row(row, known_ids)
        for given in self.task.given:
            given.write(state.tokens)
        for upload in self.uploads:
            upload.run()
        ints, reals = inputs.to_device(state.cache.device)
        copied_blocks = ints[inputs.copied_blocks]
        if len(copied_blocks):
            sources, targets, num_tokens = copied_blocks.view(3, -1)
            state.cache.copy_blocks(sources, targets, num_tokens, self.task.copies.num_of_group)
        cleared_blocks = ints[inputs.cleared_blocks]
        if len(cleared_blocks):
            state.cache.clear(cleared_blocks)
        if len(ints[inputs.token_index]):
            self._if_it_fits(partial(self._compute, ints, reals))

    def _if_it_fits(self, part: Callable[[], None]) -> None:
        """Without memory for its intermediate tensors, a step can be computed later, in parts. But
        if other ranks compute it too, they wait for this one; a connector may have stored what the
        step has not computed; and encoder inputs are given only once. Then the step fails, and new
        workers get smaller ones."""
        try:
            part()
            return
        except (RuntimeError, MemoryError) as error:
            if not self.state.may_repeat_steps or self.task.encoded or not is_out_of_memory(error):
                raise
            self.inputs.outcome.is_out_of_memory = True
        # Now that the error, and with it all tensors of the step, is gone: the memory that torch
        # keeps is in pieces for steps of this size.
        release_unused_memory(self.state.cache.device)

    def _compute(self, ints: Tensor, reals: Tensor) -> None:
        state, inputs = self.state, self.inputs
        if inputs.num_padded is not None:
            assert state.graphs is not None
            graph = GraphKey(inputs.num_padded, self.shares_blocks)
            if self.task.captured is not None:
                state.graphs.capture(graph, partial(self._decode, ints))
                return
            hidden, logits = state.graphs.replay(graph, self.task.transfers)
            self._keep_states(ints)
            self._follow(hidden, ints, None)
            self._finish(hidden, ints, reals, logits)
            return
        metadata = self._metadata(ints)
        attention = state.attention.begin_step(metadata, self.task.transfers)
        for item in self.task.encoded:
            state.model.write_encoded(self._encoded(item, ints.device), item.row, attention)
        positions = ints[inputs.positions]
        if state.parallel.is_first_stage:
            model_inputs = state.tokens.gather(ints[inputs.token_index])
        else:
            assert state.link is not None
            model_inputs = state.link.receive(len(positions))
        if self.task.prepare is not None:
            self.task.prepare(model_inputs, positions, attention)
        hidden = state.forward(model_inputs, positions, attention)
        self._keep_states(ints)
        self._follow(hidden, ints, metadata)
        if state.parallel.is_last_stage:
            self._finish(hidden, ints, reals)
        else:
            assert state.link is not None
            state.link.send(hidden)

    def _follow(
        self, hidden: Tensor, ints: Tensor, metadata: Sequence[AttentionMetadata] | None
    ) -> None:
        """A drafter with weights computes the step's tokens, too. metadata: None: not made yet."""
        state, inputs = self.state, self.inputs
        if state.network is None or inputs.network is None:
            return
        self._draft_parts = parts = state.network.parts(inputs.network, ints.device)
        metadata = self._metadata(ints) if metadata is None else metadata
        token_ids = state.tokens.gather(ints[inputs.token_index])
        positions, hooks = ints[inputs.positions], self.task.transfers
        state.network.follow(parts, token_ids, positions, hidden, metadata, hooks)

    def _keep_states(self, ints: Tensor) -> None:
        """Copy the states of single tokens that are kept. The kernels of such a step know nothing
        of it, so that graphs can replay them."""
        kept = self.inputs.kept_pages
        if kept.start < kept.stop:
            sources, targets = ints[kept].view(2, -1)
            self.state.cache.copy_pages(sources, targets)

    def _decode(self, ints: Tensor, hooks: LayerHooks | None) -> Decoded:
        """What graphs replay of a step in which every row computes one token. It reads only memory
        that later steps fill again."""
        state, inputs = self.state, self.inputs
        attention = state.attention.begin_step(self._metadata(ints), hooks)
        token_ids = state.tokens.gather(ints[inputs.token_index])
        hidden = state.forward(token_ids, ints[inputs.positions], attention)
        last = hidden.index_select(0, ints[inputs.last_tokens])
        return Decoded(hidden, state.model.logits(last))

    def _encoded(self, item: EncoderInput, device: torch.device) -> Tensor:
        """(num_tokens, hidden_size), from the encoder connector if it has it."""
        outputs = item.outputs
        if outputs is not None and (loaded := outputs.load(item.row)) is not None:
            return loaded.to(device, non_blocking=True)
        samples = item.samples.to(device, non_blocking=True)
        encoded = self.state.model.encode(samples)[: item.num_tokens]
        if outputs is not None:
            outputs.save(item.row, encoded)
        return encoded

    def _metadata(self, ints: Tensor) -> list[AttentionMetadata]:
        """The attention metadata of each group."""
        state, inputs = self.state, self.inputs
        decodes = ints[inputs.decode_rows], ints[inputs.decode_lens], self.chunks
        to_encoder = ints[inputs.cross_rows], ints[inputs.cross_lens], ()
        is_shared = state.parallel.context_share.size > 1
        kept_tokens = ints[inputs.kept_tokens] if is_shared else None
        metadata = []
        for index, (group, slots, table, segments) in enumerate(
            zip(state.cache.groups, inputs.slots, state.block_tables, self.segments, strict=True)
        ):
            is_cross = isinstance(group.spec, CrossAttentionSpec)
            rows, lens, chunks = to_encoder if is_cross else decodes
            shared_tokens = None
            if self.shares_blocks and not is_cross:
                shared_tokens = ints[inputs.shared_tokens][index : index + 1]
            metadata.append(
                AttentionMetadata(
                    ints[slots], table, rows, lens, segments, chunks, kept_tokens, shared_tokens
                )
            )
        return metadata

    def _finish(
        self, hidden: Tensor, ints: Tensor, reals: Tensor, logits: Tensor | None = None
    ) -> None:
        """What follows the layers: copy the experts, pool, score the prompt, and compute the logits
        of sampling rows on all shards, unless a graph has: then they are the first of `logits`."""
        state, inputs = self.state, self.inputs
        if state.experts is not None:
            state.experts.receive(inputs)
        if self.task.transfers is not None and state.parallel.samples:
            self.task.transfers.after_layers(hidden)
        if self.task.pooling is not None:
            self.task.pooling.run(hidden, state.model, state.pooled)
        extras = None if inputs.extras is None else inputs.extras.on_device(hidden.device)
        if extras is not None:
            extras.score_prompt(hidden, state.model.logits, state.tokens)
        if not len(inputs.sampled_rows):
            return
        if logits is None:
            logits = state.model.logits(hidden.index_select(0, ints[inputs.last_tokens]))
        self.unsampled = Unsampled(logits[: len(inputs.sampled_rows)], extras, ints, reals)

    def _sample_and_share(self, unsampled: Unsampled, mask: TokenMask | None) -> None:
        """Sample on the sampling rank, and broadcast the tokens to all shards."""
        state, ints = self.state, unsampled.ints
        if state.parallel.samples:
            sampled = self._sample(unsampled, mask)
        else:
            sampled = ints.new_empty(len(unsampled.logits), dtype=torch.int32)
        sampled = state.parallel.broadcast(sampled)
        state.tokens.scatter(ints[self.inputs.destinations], sampled)
        parts, self._draft_parts = self._draft_parts, None
        step, network = self.inputs.network, state.network
        if step is not None and parts is not None and network is not None:
            staged = self.inputs.staging.tensors[STAGED]
            self.inputs.outcome.drafting_s = network.propose(step, parts, sampled, staged)

    def _sample(self, unsampled: Unsampled, token_mask: TokenMask | None) -> Tensor:
        """Sample, and start copying the ids to the host. Returns (num_sampled,) int32 on the
        device."""
        state, inputs = self.state, self.inputs
        logits, extras, ints = unsampled.logits, unsampled.extras, unsampled.ints
        best: Tensor | None
        best, non_finite = argmax(logits)  # before edits set forbidden tokens to -inf
        mask = raw = unedited = None
        if token_mask is not None:
            mask = token_mask.on_device(logits.device)
        if extras is not None:
            logits = logits.contiguous()  # a sharded head may pad the vocabulary with columns
            if mask is not None and extras.edits is not None:
                unedited = mask.unedited(logits)
            raw = extras.edit(logits, state.tokens)
            best = None
        if mask is not None:
            masked = mask.apply(logits, unedited)
            if best is not None:
                best.index_copy_(0, mask.samples, argmax(masked)[0])
        if token_mask is not None or (extras is not None and extras.edits is not None):
            # A row with every token forbidden counts as non-finite.
            non_finite += logits.amax(dim=-1).isneginf()
        draws = inputs.draws
        sampled = sample(
            logits,
            None if draws is None else draws.on_device(ints, unsampled.reals),
            num_whole=0 if draws is None else draws.num_whole,
            best=best,
        )
        inputs.receive(sampled, non_finite)
        if extras is not None:
            extras.score_sampled(raw, sampled)
        return sampled


@contextmanager
def _lack_of_memory_named() -> Iterator[None]:
    """Raise OutOfMemory if the block has no memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"no memory: {error}") from error
        raise
