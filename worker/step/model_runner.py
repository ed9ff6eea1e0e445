"""Executes plans: updates rows, launches steps, and reports sampled tokens.

`submit` does not wait for the device, which may still compute the previous step. It does the host's
part of a step (rows, slots, random numbers); the rest is one operation on the compute queue, and
outputs come from the queue's thread, in order. So two steps overlap: while one computes, the next
is prepared, and its input tokens are read on the device without a round trip to the host.

A step with structured output computes its logits at once and samples when its token mask arrives.
Plans after it are held until then, since their tokens depend on it; the first of them is prepared.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from longshore.protocol.arrays import EMPTY_INT32, Int32Array
from longshore.protocol.errors import EngineDead, PlanMismatch
from longshore.protocol.logs.records import fields
from longshore.protocol.outputs import ModelRunnerOutput, WorkerFailed, WorkerReport
from longshore.protocol.plan import SampleMask, SchedulerOutput
from longshore.worker.attention.grouped import GroupedAttention
from longshore.worker.drafting.drafter import Drafter
from longshore.worker.drafting.network import DraftNetwork, MadeDrafts
from longshore.worker.drafting.proposals import Proposals, SampledTokens
from longshore.worker.errors import OutOfMemory, RankLost
from longshore.worker.kv_cache.block_guard import BlockGuard, GuardedStep
from longshore.worker.kv_cache.buffer import KVCache
from longshore.worker.kv_cache.memory_budget import StepMemory
from longshore.worker.models.decoder_model import DecoderModel
from longshore.worker.process.memory_meter import MemoryMeter
from longshore.worker.queues.compute_queue import Completion, ComputeQueue
from longshore.worker.ranks.parallel import ALONE, Parallel
from longshore.worker.sampling.columns import ASKS_MASK
from longshore.worker.sampling.pooling import StepPooling
from longshore.worker.step.expert_capture import ExpertCapture
from longshore.worker.step.given_tokens import GivenTokens, fed_back_tokens
from longshore.worker.step.memory_profile import MemoryProfile
from longshore.worker.step.network_drafts import STAGED
from longshore.worker.step.planned_drafts import PlannedDrafts, planned_drafts
from longshore.worker.step.step_batch import Int64s, StepBatch, make_batch
from longshore.worker.step.step_inputs import StepInputs, StepResult
from longshore.worker.step.step_launcher import PreparedStep, StepLauncher
from longshore.worker.step.step_task import StepTask
from longshore.worker.step.token_table import known_token_ids
from longshore.worker.step.unsampled_step import UnsampledStep
from longshore.worker.step.warm_up import WarmUp
from longshore.worker.step.worker_rows import BlockCopies, WorkerRows
from longshore.worker.transfer.connector import ConnectorRunner, HookFailed, StepTransfers
from longshore.worker.transfer.encoder import EncoderRunner, StepOutputs, no_outputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Held:
    """A plan that is to be executed, and how it is answered."""

    plan: SchedulerOutput
    on_report: Callable[[WorkerReport], None]
    completion: Completion

    def answer(self, report: WorkerReport) -> None:
        try:
            self.on_report(report)
        finally:
            self.completion.finish()


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
        connector: ConnectorRunner | None = None,
        encoder_connector: EncoderRunner | None = None,
        guards_blocks: bool = False,
        enforce_eager: bool = False,
        experts: ExpertCapture | None = None,
        num_drafts: int = 0,
        make_drafter: Callable[[], Drafter] | None = None,
        network: DraftNetwork | None = None,
    ) -> None:
        """parallel: this rank's position; only the outputs of the sampling rank have tokens.
        eos_token_ids: not sampled until a request has min_tokens.
        connector: the worker half of the connector; None: plans with metadata are rejected.
        encoder_connector: likewise, of the encoder connector.
        guards_blocks: see BlockGuard. enforce_eager: see WorkerConfig.
        experts: see DeviceState.
        num_drafts: the most that a row verifies in a step. make_drafter: called on the rank that
        samples, for each epoch; None: drafts come from elsewhere, or from `network`."""
        self._parallel = parallel
        self._launcher = StepLauncher(
            model,
            cache,
            attention,
            queue,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            parallel=parallel,
            num_drafts=num_drafts,
            has_layer_hooks=connector is not None and connector.has_layer_hooks,
            may_repeat_steps=connector is None or connector.may_repeat_steps,
            enforce_eager=enforce_eager,
            experts=experts,
            network=network,
        )
        self._make_rows = partial(
            WorkerRows,
            tables=self._launcher.tables,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=model.config.vocab_size,
            num_blocks=cache.num_blocks,
            eos_token_ids=eos_token_ids,
        )
        self._guards_blocks = guards_blocks
        self._num_drafts, self._make_drafter = num_drafts, make_drafter
        self._unsampled: UnsampledStep | None
        self._prepared: PreparedStep | None
        self._held: deque[_Held] = deque()
        self.begin_epoch(epoch, connector, encoder_connector)

    def begin_epoch(
        self,
        epoch: int,
        connector: ConnectorRunner | None,
        encoder_connector: EncoderRunner | None = None,
    ) -> None:
        """No row is in use, and blocks hold anything. Call it after `finish`. The connectors: like
        the first ones."""
        self._epoch = epoch
        self._connector, self._encoder_connector = connector, encoder_connector
        self._masks_follow = True
        self._unsampled = self._prepared = None
        self._held.clear()
        self._rows = self._make_rows(epoch=epoch, has_connector=connector is not None)
        self._proposals = None
        self._made_drafts = MadeDrafts()
        drafter: Drafter | None = None
        if self._parallel.samples:
            if self._launcher.network is not None:
                drafter = self._made_drafts
            elif self._make_drafter is not None:
                drafter = self._make_drafter()
        if drafter is not None:
            vocab_size = self._launcher.state.model.config.vocab_size
            self._proposals = Proposals(drafter, max_drafts=self._num_drafts, vocab_size=vocab_size)
        self._guard = None
        if self._guards_blocks:
            self._guard = BlockGuard(self._launcher.state.cache, self._launcher.tables)

    def submit(
        self, plan: SchedulerOutput, on_report: Callable[[WorkerReport], None]
    ) -> Completion | None:
        """Start executing `plan`. A repeat of the last plan is ignored: returns None, no report.

        on_report: called with the output on a thread of the compute queue, in order of the plans,
                   or with WorkerFailed if this step or an earlier one failed.
        Raises PlanMismatch if the plan does not match this worker's state, or HookFailed. No
        further plan can be executed then.
        """
        if self._is_repeat(plan):
            about = fields(step_id=plan.step, epoch=plan.epoch)
            logger.info("ignored a repeated plan", extra=about)
            return None
        held = _Held(plan, on_report, Completion(plan.step))
        self._held.append(held)
        self._submit_held()
        return held.completion

    def _is_repeat(self, plan: SchedulerOutput) -> bool:
        if not self._held:
            return self._rows.is_repeat(plan)
        last = self._held[-1].plan
        return (plan.epoch, plan.step, plan.digest) == (last.epoch, last.step, last.digest)

    @property
    def step_without_mask(self) -> int | None:
        """The step that waits for its token mask, if one does."""
        return None if self._unsampled is None else self._unsampled.step

    def add_mask(self, mask: SampleMask) -> None:
        """Sample the step that waits for `mask`, and start the plans after it. Only the sampling
        rank needs masks; others ignore them. Raises PlanMismatch, also for those plans."""
        if not self._parallel.samples:
            return
        unsampled = self._unsampled
        if unsampled is None or (mask.epoch, mask.step) != (self._epoch, unsampled.step):
            waiting = "no step waits" if unsampled is None else f"step {unsampled.step} waits"
            raise PlanMismatch(
                f"received a token mask for step {mask.step} of epoch {mask.epoch}, but {waiting} "
                f"for one in epoch {self._epoch}"
            )
        unsampled.sample(mask)
        self._unsampled = None
        self._submit_held()

    def stop_masking(self) -> None:
        """No further mask arrives, because the scheduler has ended, and no token reaches a client:
        from now on steps do not wait for masks."""
        self._masks_follow = False
        while self._unsampled is not None:
            self._unsampled.sample_unmasked()
            self._unsampled = None
            self._submit_held()

    def _submit_held(self) -> None:
        """Submit the held plans, up to one that waits for its token mask, and prepare the next."""
        while self._prepared is not None or self._held:
            if self._prepared is None:
                self._prepared = self._prepare(self._held.popleft())
            if self._unsampled is not None:
                return
            self._prepared.submit()
            self._unsampled, self._prepared = self._prepared.unsampled, None

    def _prepare(self, held: "_Held") -> PreparedStep:
        plan = held.plan
        num_scheduled = self._rows.apply(plan)
        copies = self._rows.copies(plan)
        launcher, table = self._launcher, self._rows.rows
        drafts, num_drafts = self._drafts(plan, num_scheduled), None
        if drafts is not None:
            num_drafts = drafts.num_of_rows(table.max_num_seqs)
        batch = make_batch(
            num_scheduled, table.num_computed, min(launcher.tables.block_sizes), num_drafts
        )
        answered_rows = np.flatnonzero(table.samples(num_scheduled))
        generates = ~self._rows.pooling.is_pooling[answered_rows]
        sampled_rows = answered_rows[generates]
        sampled_positions = table.num_computed[sampled_rows]
        if drafts is not None:
            sampled_rows, sampled_positions = drafts.samples(sampled_rows, sampled_positions)
        transfers = None
        if self._connector is not None:
            transfers = self._connector.begin_step(plan, batch.rows, batch.starts, batch.counts)
        if (network := launcher.network) is not None:
            network.forget([start.row for start in plan.added])
            network.forget([rewind.row for rewind in plan.rewound])
            generating = ~self._rows.pooling.is_pooling[batch.rows]
            primed = network.primers(batch.rows[generating], batch.starts[generating])
            batch = batch.with_primers(*primed, min(launcher.tables.block_sizes))
        outputs = None
        if self._encoder_connector is not None:
            outputs = self._encoder_connector.begin_step(plan)
        else:
            no_outputs(plan)
        started = [
            (start.row, known_token_ids(start, pin_memory=launcher.pin_memory))
            for start in plan.added
        ]
        task = StepTask(
            batch,
            self._rows.sampling,
            sampled_rows=sampled_rows,
            sampled_positions=sampled_positions,
            given=self._given(plan, num_scheduled, drafts),
            drafts=drafts,
            num_drafts=0 if network is None else self._num_wanted(sampled_rows, num_drafts),
            copies=copies,
            kept_states=self._rows.kept_states(plan, num_scheduled),
            zero_block_ids=plan.zero_block_ids.astype(np.int64),
            common_prefix_blocks=self._rows.common_prefix_blocks,
            started=started,
            encoded=launcher.encoder.take(plan, num_scheduled, outputs),
            pooling=(pooling := self._pooling(batch)),
            transfers=transfers,
            guard=self._guarded(plan, num_scheduled, drafts),
        )
        return launcher.prepare(
            task,
            step_id=plan.step,
            unsampled=self._waiting_for_mask(plan, sampled_rows),
            on_answer=lambda inputs, completion: held.answer(
                self._report_or_failure(
                    plan, inputs, generates, pooling, transfers, outputs, copies, completion
                )
            ),
        )

    def _num_wanted(self, sampled_rows: Int64s, num_drafts: Int64s | None) -> int:
        """The most drafts of a row that the step makes. All shards of a model make as many.
        num_drafts: (max_num_seqs,) those that it verifies."""
        table = self._rows.rows
        num_computed = table.num_computed if num_drafts is None else table.num_computed - num_drafts
        rows = np.unique(sampled_rows)
        rows = rows[num_computed[rows] < table.last_computed[rows]]  # others end with this step
        if not len(rows):
            return 0
        if self._proposals is None or self._parallel.num_shards > 1:
            return self._num_drafts
        return self._proposals.num_wanted(rows.tolist())

    def _report_or_failure(
        self, plan: SchedulerOutput, inputs: StepInputs, *others: Any
    ) -> WorkerReport:
        """A step without an answer would be waited for."""
        try:
            return self._report(plan, inputs, *others)
        except Exception as error:
            about = fields(step_id=plan.step, epoch=plan.epoch)
            logger.exception("the answer of a step cannot be made", extra=about)
            reason = f"step {plan.step}: its answer cannot be made: {type(error).__name__}: {error}"
            return WorkerFailed(self._epoch, self._parallel.rank, reason)

    def _waiting_for_mask(
        self, plan: SchedulerOutput, sampled_rows: Int64s
    ) -> UnsampledStep | None:
        """None if the step samples at once."""
        if not self._parallel.samples:
            return None
        is_masked = (self._rows.sampling.asks[sampled_rows] & ASKS_MASK) != 0
        if bool(is_masked.any()) != plan.has_structured_output:
            raise PlanMismatch(
                f"step {plan.step} has has_structured_output={plan.has_structured_output}, but "
                f"{np.count_nonzero(is_masked)} of its rows sample with structured output"
            )
        if not plan.has_structured_output or not self._masks_follow:
            return None
        return UnsampledStep(
            plan.step,
            sampled_rows=sampled_rows,
            is_masked=is_masked,
            vocab_size=self._launcher.state.model.config.vocab_size,
            pin_memory=self._launcher.pin_memory,
        )

    def _drafts(self, plan: SchedulerOutput, num_scheduled: Int64s) -> PlannedDrafts | None:
        return planned_drafts(
            plan,
            self._rows.rows,
            num_scheduled,
            max_drafts=self._num_drafts,
            vocab_size=self._launcher.state.model.config.vocab_size,
        )

    def _guarded(
        self, plan: SchedulerOutput, num_scheduled: Int64s, drafts: PlannedDrafts | None
    ) -> GuardedStep | None:
        if self._guard is None:
            return None
        num_computed, added = self._rows.rows.num_computed, [start.row for start in plan.added]
        if drafts is not None:  # blocks with drafts may be written again
            num_drafts = drafts.num_of_rows(len(num_computed))
            num_computed, num_scheduled = num_computed - num_drafts, num_scheduled - num_drafts
        return self._guard.plan(plan.step, num_computed, num_scheduled, added)

    def _pooling(self, batch: StepBatch) -> StepPooling | None:
        """The step's pooling; None if no row pools or another rank samples."""
        if not (self._parallel.samples and self._rows.pooling.is_pooling.any()):
            return None
        config = self._launcher.state.model.config
        return self._rows.pooling.take(
            batch,
            config.hidden_size,
            num_labels=len(config.labels),
            is_bidirectional=config.is_bidirectional,
            pin_memory=self._launcher.pin_memory,
        )

    def _given(
        self, plan: SchedulerOutput, num_scheduled: Int64s, drafts: PlannedDrafts | None
    ) -> list[GivenTokens]:
        launcher, given = self._launcher, []
        if (fed_back := self._fed_back(plan, num_scheduled)) is not None:
            given.append(fed_back)
        if drafts is not None:
            width = launcher.state.tokens.width
            given.append(drafts.given(width, pin_memory=launcher.pin_memory))
        return given

    def _fed_back(self, plan: SchedulerOutput, num_scheduled: Int64s) -> GivenTokens | None:
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
            vocab_size=self._launcher.state.model.config.vocab_size,
            token_width=self._launcher.state.tokens.width,
            pin_memory=self._launcher.pin_memory,
        )

    def execute(self, plan: SchedulerOutput, mask: SampleMask | None = None) -> ModelRunnerOutput:
        """Execute `plan` and wait for its output. Raises PlanMismatch, also for a repeated plan, or
        EngineDead if the step failed. mask: of a plan with structured output."""
        reports: list[WorkerReport] = []
        completion = self.submit(plan, reports.append)
        if completion is None:
            raise PlanMismatch(f"step {plan.step} has already been executed")
        if mask is not None:
            self.add_mask(mask)
        completion.wait()
        (report,) = reports
        if isinstance(report, WorkerFailed):
            raise EngineDead(report.reason)
        return report

    def warm_up(
        self, num_prefill_tokens: int, num_decodes: int, *, show_progress: bool | None = None
    ) -> None:
        """See WarmUp.run. Call it on all ranks before the first plan."""
        warm_up = WarmUp(self._launcher, self._rows.sampling)
        warm_up.run(num_prefill_tokens, num_decodes, show_progress=show_progress)

    def profile(self, meter: MemoryMeter) -> StepMemory:
        """See MemoryProfile.run. No plan may follow."""
        return MemoryProfile(self._launcher, meter).run()

    def verify_adopted(self, block_ids: Int32Array) -> None:
        """See BlockGuard; nothing is verified without one."""
        if self._guard is not None:
            self._guard.verify_adopted(block_ids)

    def finish(self) -> None:
        """See StepLauncher.finish. Plans may follow after `begin_epoch`."""
        self.stop_masking()
        self._launcher.finish()

    def _report(
        self,
        plan: SchedulerOutput,
        inputs: StepInputs,
        generates: npt.NDArray[np.bool_],
        pooling: StepPooling | None,
        transfers: StepTransfers | None,
        outputs: StepOutputs | None,
        copies: BlockCopies,
        completion: Completion,
    ) -> WorkerReport:
        """generates: which of the rows with results sample a token; the others get vectors."""
        step = plan.step
        if self._proposals is not None:
            self._proposals.begin(plan)
        error, failed_block_ids = completion.error, EMPTY_INT32
        if error is None and transfers is not None:
            try:
                failed_block_ids = transfers.failed_block_ids()
            except HookFailed as failure:
                error = failure
        if error is None and outputs is not None:
            try:
                outputs.step_ended()
            except HookFailed as failure:
                error = failure
        if error is not None:
            reason = f"step {step} failed on the device: {type(error).__name__}: {error}"
            if isinstance(error, RankLost | HookFailed | OutOfMemory):
                reason = f"step {step}: {error}"  # the message is complete
            return WorkerFailed(
                self._epoch,
                self._parallel.rank,
                reason,
                is_consequence=isinstance(error, RankLost),
                is_out_of_memory=isinstance(error, OutOfMemory),
            )
        if (experts := self._launcher.state.experts) is not None:
            experts.store(inputs, copies)
        if inputs.outcome.is_out_of_memory:
            return ModelRunnerOutput(
                self._epoch,
                step,
                failed_block_ids=failed_block_ids,
                is_out_of_memory=True,
                compute_s=completion.elapsed_s,
                gap_s=completion.gap_s,
            )
        if not self._parallel.samples:
            return ModelRunnerOutput(
                self._epoch,
                step,
                failed_block_ids=failed_block_ids,
                compute_s=completion.elapsed_s,
                gap_s=completion.gap_s,
            )
        result = inputs.result()
        draft_rows, draft_tokens = self._propose(inputs, result, completion)
        output = ModelRunnerOutput(
            epoch=self._epoch,
            step=step,
            sampled_tokens=result.sampled,
            num_sampled=result.num_sampled,
            draft_rows=draft_rows,
            draft_tokens=draft_tokens,
            logprobs=result.logprobs,
            nan_rows=result.nan_rows,
            num_nans=result.num_nans,
            failed_block_ids=failed_block_ids,
            compute_s=completion.elapsed_s,
            gap_s=completion.gap_s,
        )
        return output if pooling is None else pooling.result().added_to(output, generates)

    def _propose(
        self, inputs: StepInputs, result: StepResult, completion: Completion
    ) -> tuple[Int32Array, Int32Array]:
        """The drafts for the next step: the row of each, and its id."""
        if self._proposals is None:
            return EMPTY_INT32, EMPTY_INT32
        costs, network = self._proposals.costs, self._launcher.network
        drafting_s = 0.0
        if network is not None and inputs.network is not None:
            self._made_drafts.made = network.drafts(inputs.network, inputs.staging.tensors[STAGED])
            drafting_s = inputs.outcome.drafting_s
            if drafting_s:
                costs.drafted(inputs.network.num_drafts, drafting_s)
        rows, counts = np.unique(inputs.sampled_rows, return_counts=True)
        num_tokens = result.num_sampled.astype(np.int64) if inputs.drafts is not None else counts
        if 0 < inputs.num_tokens == len(inputs.sampled_rows):
            costs.measured(inputs.num_tokens, max(0.0, completion.elapsed_s - drafting_s))
        return self._proposals.propose(SampledTokens(rows, counts - 1, num_tokens, result.sampled))
