"""Executes plans: updates rows, packs inputs for the device, and returns sampled tokens.

`submit` does not wait for the device, which may be a step behind. It does the host's part of a step
(rows, slots, random numbers); the rest is one operation on the compute queue, and outputs come
from the queue's thread, in order. So two steps overlap: while one computes, the next is prepared,
and its input tokens are read on the device without a round trip to the host.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longshore.protocol.errors import EngineDead, PlanMismatch
from longshore.protocol.kv_cache_spec import NULL_BLOCK, CrossAttentionSpec, KVCacheSpec, MambaSpec
from longshore.protocol.logs.records import fields
from longshore.protocol.outputs import (
    ModelRunnerOutput,
    WorkerFailed,
    WorkerReport,
)
from longshore.protocol.plan import SchedulerOutput
from longshore.worker.attention.grouped import GroupedAttention
from longshore.worker.attention.segments import decode_segments
from longshore.worker.errors import RankLost
from longshore.worker.kv_cache.block_table import BlockTable, MultiGroupBlockTable
from longshore.worker.kv_cache.buffer import KVCache
from longshore.worker.kv_cache.context_share import ContextShare
from longshore.worker.models.decoder_model import DecoderModel
from longshore.worker.ranks.parallel import ALONE, Parallel
from longshore.worker.ranks.stage_link import StageLink
from longshore.worker.sampling.pooling import PooledSums, StepPooling
from longshore.worker.step.compute_queue import Completion, ComputeQueue
from longshore.worker.step.device_step import (
    DeviceState,
    DeviceStep,
    Preparation,
)
from longshore.worker.step.encoder_rows import (
    CrossBlockTable,
    EncoderInput,
    EncoderRows,
)
from longshore.worker.step.fed_back_tokens import FedBackTokens, fed_back_tokens
from longshore.worker.step.model_forward import GRAPH_TOKENS, ModelForward
from longshore.worker.step.step_batch import (
    Int64s,
    StepBatch,
    blocks_to_clear,
    make_batch,
)
from longshore.worker.step.step_inputs import StepInputs, StepInputsBuilder
from longshore.worker.step.token_table import TokenTable, known_token_ids
from longshore.worker.step.worker_rows import (
    NO_COPIES,
    BlockCopies,
    WorkerRows,
)

logger = logging.getLogger(__name__)

NO_BLOCKS: Final = np.empty(0, np.int64)
NO_TOKENS: Final = NO_BLOCKS


class ModelRunner:
    """One rank's model, KV cache and rows. Plans must come from one thread, in order."""

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
        epoch: int = 1,
        parallel: Parallel = ALONE,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """parallel: this rank's place; only the outputs of the sampling rank have tokens.
        eos_token_ids: not sampled until a request has min_tokens."""
        device = cache.device
        self._queue = queue
        self._epoch = epoch
        self._parallel = parallel
        self._pin_memory = device.type == "cuda"
        self._tables = MultiGroupBlockTable(
            [
                _block_table(
                    group.spec, max_num_seqs, max_model_len, parallel.context_share, device
                )
                for group in cache.groups
            ]
        )
        # Blocks of states and of cross attention are always written whole, so they need no
        # clearing.
        self._cleared_tables = [
            table
            for table, group in zip(self._tables.tables, cache.groups, strict=True)
            if not isinstance(group.spec, (MambaSpec, CrossAttentionSpec))
        ]
        self._encoder = EncoderRows(
            self._tables.tables,
            max_num_seqs=max_num_seqs,
            max_tokens=model.config.max_encoder_tokens,
            max_samples=model.config.max_audio_samples,
            pin_memory=self._pin_memory,
        )
        self._rows = WorkerRows(
            tables=self._tables,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=model.config.vocab_size,
            num_blocks=cache.num_blocks,
            epoch=epoch,
            eos_token_ids=eos_token_ids,
        )
        tokens = TokenTable(max_num_seqs, max_model_len, device)
        link = None
        if parallel.num_stages > 1:
            hidden_size = model.config.hidden_size
            link = StageLink(parallel, hidden_size=hidden_size, dtype=cache.dtype, device=device)
        self._max_step_tokens = min(max_num_batched_tokens, max_model_len)
        self._device_state = DeviceState(
            model,
            ModelForward(model),
            cache,
            attention,
            tokens,
            self._tables.device_tables,
            parallel,
            link,
            PooledSums(max_num_seqs),
        )
        self._inputs = StepInputsBuilder(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            token_width=tokens.width,
            num_blocks=cache.num_blocks,
            num_groups=len(cache.groups),
            vocab_size=model.config.vocab_size,
            pin_memory=self._pin_memory,
        )

    def submit(
        self, plan: SchedulerOutput, on_report: Callable[[WorkerReport], None]
    ) -> Completion | None:
        """Start executing `plan`. A repeat of the last plan is ignored: returns None, no report.

        on_report: called with the output on a thread of the compute queue, in order of the plans,
                   or with WorkerFailed if this step or an earlier one failed.
        Raises PlanMismatch if the plan does not match this worker's state. No further plan can be
        executed then.
        """
        if self._rows.is_repeat(plan):
            about = fields(step_id=plan.step, epoch=plan.epoch)
            logger.info("ignored a repeated plan", extra=about)
            return None
        num_scheduled = self._rows.apply(plan)
        table = self._rows.rows
        batch = make_batch(num_scheduled, table.num_computed, min(self._tables.block_sizes))
        answered_rows = np.flatnonzero(table.samples(num_scheduled))
        generates = ~self._rows.pooling.is_pooling[answered_rows]
        sampled_rows = answered_rows[generates]
        started = [
            (start.row, known_token_ids(start, pin_memory=self._pin_memory)) for start in plan.added
        ]
        return self._launch(
            batch,
            sampled_rows=sampled_rows,
            sampled_positions=table.num_computed[sampled_rows],
            fed_back=self._fed_back(plan, num_scheduled),
            copies=self._rows.copies(plan),
            zero_block_ids=plan.zero_block_ids.astype(np.int64),
            started=started,
            encoded=self._encoder.take(plan, num_scheduled),
            pooling=(pooling := self._pooling(batch)),
            step_id=plan.step,
            on_answer=lambda inputs, completion: on_report(
                self._report(plan.step, inputs, generates, pooling, completion)
            ),
        )

    def _pooling(self, batch: StepBatch) -> StepPooling | None:
        """The step's pooling; None if no row pools or another rank samples."""
        if not (self._parallel.samples and self._rows.pooling.is_pooling.any()):
            return None
        hidden_size = self._device_state.model.config.hidden_size
        return self._rows.pooling.take(batch, hidden_size, pin_memory=self._pin_memory)

    def _fed_back(self, plan: SchedulerOutput, num_scheduled: Int64s) -> FedBackTokens | None:
        if self._parallel.num_stages == 1:
            if len(plan.sampled_rows):
                raise PlanMismatch(
                    f"step {plan.step} has sampled_rows, which only pipeline parallelism needs; "
                    "this engine has one stage. Switch feed_back_tokens off in the scheduler."
                )
            return None
        return fed_back_tokens(
            plan,
            self._rows.rows,
            num_scheduled,
            vocab_size=self._device_state.model.config.vocab_size,
            token_width=self._device_state.tokens.width,
            pin_memory=self._pin_memory,
        )

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Execute `plan` and wait for its output. Raises PlanMismatch, also for a repeated plan, or
        EngineDead if the step failed."""
        reports: list[WorkerReport] = []
        completion = self.submit(plan, reports.append)
        if completion is None:
            raise PlanMismatch(f"step {plan.step} has already been executed")
        completion.wait()
        (report,) = reports
        if isinstance(report, WorkerFailed):
            raise EngineDead(report.reason)
        return report

    def warm_up(self, num_prefill_tokens: int, num_decodes: int) -> None:
        """Compute a prompt in two chunks and a step of decodes on the null block, then clear it.
        A model with an encoder encodes silence first.

        The first calls of a process choose kernels and grow memory pools; requests must not wait
        for that. Call it on all ranks before the first plan. Raises EngineDead if the model cannot
        be computed, RankLost if another rank is lost.
        """
        row_zero, half = np.zeros(1, np.int64), np.array([max(1, num_prefill_tokens // 2)])
        rows = np.arange(num_decodes)
        batches = [
            StepBatch(row_zero, np.zeros(1, np.int64), half, num_decodes=0),
            StepBatch(rows, np.zeros_like(rows), np.ones_like(rows), num_decodes=num_decodes),
        ]
        if 2 * half <= num_prefill_tokens:
            batches.append(StepBatch(row_zero, half, half, num_decodes=0))
        silence = self._encoder.silence(row=0)
        self._warm_up(batches[0], encoded=() if silence is None else (silence,))
        for batch in batches[1:]:
            self._warm_up(batch)
        cache = self._device_state.cache
        if cache.device.type == "cpu":
            self._prepare_graph()
        self._queue.submit(cache.buffer[NULL_BLOCK].zero_).wait()

    def _prepare_graph(self) -> None:
        forward = self._device_state.forward
        sizes = [size for size in GRAPH_TOKENS if size <= self._max_step_tokens]
        if not sizes or not forward.is_capturable:
            return
        for size in sizes:
            self._warm_up(_first_tokens(size), forward.capture)
        if forward.has_graph or self._parallel.num_stages > 1:  # stages step together
            # The null block alone has distinct slots for this many tokens.
            num_verified = min(*self._tables.block_sizes, sizes[0])
            self._warm_up(_first_tokens(num_verified), forward.verify)
            for size in sizes:
                self._warm_up(_first_tokens(size), forward.time)

    def _warm_up(
        self,
        batch: StepBatch,
        prepare: Preparation | None = None,
        *,
        encoded: Sequence[EncoderInput] = (),
    ) -> None:
        samples = slice(None if self._device_state.model.config.has_head else 0)
        completion = self._launch(
            batch,
            sampled_rows=np.sort(batch.rows)[samples],
            sampled_positions=batch.ends[samples],
            encoded=encoded,
            prepare=prepare,
        )
        completion.wait()
        if isinstance(completion.error, RankLost):
            raise completion.error
        if completion.error is not None:
            raise EngineDead(
                f"the model cannot be computed on this device: {completion.error}"
            ) from completion.error

    def close(self) -> None:
        """Wait until the next pipeline stage has received everything. No plan may follow."""
        link = self._device_state.link
        if link is not None:
            self._queue.submit(link.finish).wait()

    def _launch(
        self,
        batch: StepBatch,
        *,
        sampled_rows: Int64s,
        sampled_positions: Int64s,
        fed_back: FedBackTokens | None = None,
        copies: BlockCopies = NO_COPIES,
        zero_block_ids: Int64s = NO_BLOCKS,
        started: Sequence[tuple[int, Tensor]] = (),
        encoded: Sequence[EncoderInput] = (),
        pooling: StepPooling | None = None,
        prepare: Preparation | None = None,
        on_answer: Callable[[StepInputs, Completion], None] | None = None,
        step_id: int | None = None,
    ) -> Completion:
        tables = self._tables
        begun = [blocks_to_clear(batch, t.host, t.block_size) for t in self._cleared_tables]
        token_rows, positions = batch.token_rows(), batch.positions()
        share, cross_lens = self._parallel.context_share, self._encoder.lens_of(token_rows)
        inputs = self._inputs.build(
            batch,
            slots=tables.slots(token_rows, positions),
            kept_tokens=NO_TOKENS if share.size == 1 else np.flatnonzero(share.keeps(positions)),
            cross_lens=cross_lens,
            sampled_rows=sampled_rows,
            sampled_positions=sampled_positions,
            copied_blocks=copies.blocks,
            cleared_blocks=np.concatenate((zero_block_ids, *begun)),
            sampling=self._rows.sampling,
        )
        uploads = tables.commit()
        segments = {
            size: decode_segments(batch.decode_blocks(size), size)
            for size in set(tables.block_sizes)
        }
        # Segments of cross attention follow the order of the step's tokens. If the lengths differ,
        # there are more segments than necessary; in practice all are equal.
        step = DeviceStep(
            state=self._device_state,
            inputs=inputs,
            segments=[
                decode_segments(-(-cross_lens // table.block_size), table.block_size)
                if isinstance(table, CrossBlockTable)
                else segments[table.block_size]
                for table in tables.tables
            ],
            chunks=batch.prefill_chunks(),
            copied_of_group=copies.num_of_group,
            uploads=uploads,
            started=started,
            encoded=encoded,
            fed_back=fed_back,
            pooling=pooling,
            prepare=prepare,
        )
        on_done = None if on_answer is None else partial(on_answer, inputs)
        completion = self._queue.submit(step.run, on_done, step_id=step_id)
        inputs.staging.guard(completion)
        for upload in uploads:
            upload.guard(completion)
        return completion

    def _report(
        self,
        step: int,
        inputs: StepInputs,
        generates: npt.NDArray[np.bool_],
        pooling: StepPooling | None,
        completion: Completion,
    ) -> WorkerReport:
        """generates: which of the rows with results sample a token; the others get vectors."""
        if completion.error is not None:
            error = completion.error
            reason = f"step {step} failed on the device: {type(error).__name__}: {error}"
            if is_lost := isinstance(error, RankLost):  # its message says all
                reason = f"step {step}: {error}"
            return WorkerFailed(self._epoch, self._parallel.rank, reason, is_consequence=is_lost)
        if not self._parallel.samples:
            return ModelRunnerOutput(self._epoch, step, compute_s=completion.elapsed_s)
        result = inputs.result()
        output = ModelRunnerOutput(
            epoch=self._epoch,
            step=step,
            sampled_tokens=result.sampled,
            logprobs=result.logprobs,
            nan_rows=result.nan_rows,
            num_nans=result.num_nans,
            compute_s=completion.elapsed_s,
        )
        return output if pooling is None else pooling.result().added_to(output, generates)


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
    return kind(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=spec.block_size,
        share=share,
        device=device,
    )


def _first_tokens(count: int) -> StepBatch:
    """The first `count` tokens of a prompt in row 0."""
    return StepBatch(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([count]), num_decodes=0)
