"""Who runs in the next step, on which blocks: policy without I/O, clock or tensors.

Each request has a number of computed tokens, and every step gives it tokens until it has caught up
with those it has; there is no prefill phase and no decode phase. Running requests are columns
(`RunningTable`), so the common step is a handful of vector operations; what happens to one request
(admission, preemption, the end) is ordinary code. The design is that of vLLM V1's scheduler.
"""

from typing import Any

import numpy as np

from longshore.connectors.base import ConnectorOutput, SchedulerConnector
from longshore.protocol.arrays import Int32Array, Int64Array, int32_array
from longshore.protocol.client import (
    MAX_REPORTED,
    AddRequest,
    ContinueSession,
    EngineOutputs,
    EngineReport,
    FinishReason,
    SchedulerStats,
    StopFound,
)
from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import Feature
from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.protocol.plan import AppendedBlocks, SampleMask, SchedulerOutput
from longshore.protocol.results import ModelRunnerOutput, TransferReport
from longshore.scheduler.admission import Admission
from longshore.scheduler.answers import Answers
from longshore.scheduler.budget import StepBudget
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.encoder_cache import EncoderCache
from longshore.scheduler.gates import AdmissionGates
from longshore.scheduler.in_flight import PlannedStep, StepsInFlight
from longshore.scheduler.intake import Intake
from longshore.scheduler.kv_cache_manager import KVCacheManager
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.lora import LoRAPlaces
from longshore.scheduler.outputs import OutputBuckets
from longshore.scheduler.pause import PauseState
from longshore.scheduler.plan_builder import PlanBuilder
from longshore.scheduler.policy import SchedulingPolicy, load_policy
from longshore.scheduler.recovery import Recovery
from longshore.scheduler.report import Progress, WaitingReasons
from longshore.scheduler.running import RunningTable
from longshore.scheduler.sampling_rows import SamplingRows
from longshore.scheduler.standing_step import StandingStep
from longshore.scheduler.structured_output import GrammarCompiler, StructuredOutputs
from longshore.scheduler.transfers import Transfers
from longshore.scheduler.waiting import WaitingRequests


class Scheduler:
    """Requests in, plans out, answers in, tokens out.

    `schedule` and `update_from_output` take the time as an argument and are deterministic: the same
    calls in the same order give the same plans.

    kv_cache:  the groups and the number of blocks that the workers agreed on.
    features:  what the workers can do beyond plain text; requests for the rest are refused.
    policy:    None takes the one that `config` names.
    connector: its scheduler half; None keeps KV on the device.
    grammars:  compiles grammars; None refuses requests with structured output.
    num_ranks: workers that each report the end of a transfer.
    Raises ConfigError if one request of `max_model_len` does not fit the empty pool.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        kv_cache: KVCacheConfig,
        hash_seed: bytes,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        epoch: int = 1,
        verify_plan: bool = False,
        features: frozenset[Feature] = frozenset(),
        policy: SchedulingPolicy | None = None,
        connector: SchedulerConnector | None = None,
        grammars: GrammarCompiler | None = None,
        num_ranks: int = 1,
    ) -> None:
        check_pool_size(config, kv_cache)
        self.config = config
        self._policy = load_policy(config.policy) if policy is None else policy
        self._connector = connector
        self._pause = PauseState.UNPAUSED
        self.running = RunningTable(
            config.max_num_seqs, config.max_model_len, config.num_speculative_tokens
        )
        self.waiting = WaitingRequests(self._policy)
        self.kv_cache = KVCacheManager(
            cache,
            kv_cache,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            hash_seed=hash_seed,
            record_named=connector is not None,
        )
        self._in_flight = StepsInFlight()
        self._outputs = OutputBuckets()
        self._progress = Progress()
        self._loras = LoRAPlaces(config.max_loras)
        self._encoder = EncoderCache(
            capacity=(
                config.max_num_encoder_input_tokens
                if config.encoder_cache_size is None
                else config.encoder_cache_size
            ),
            budget=config.max_num_encoder_input_tokens,
        )
        self._transfers = Transfers(self.kv_cache, self._in_flight, num_ranks=num_ranks)
        self._plan = PlanBuilder(
            self.running,
            self.kv_cache,
            self._encoder,
            epoch=epoch,
            verify_plan=verify_plan,
            feed_back_tokens=config.feed_back_tokens,
            connector=connector,
        )
        self._structured = StructuredOutputs(
            grammars,
            running=self.running,
            in_flight=self._in_flight,
            epoch=epoch,
            vocab_size=vocab_size,
        )
        self._lifecycle = Lifecycle(
            config,
            running=self.running,
            waiting=self.waiting,
            kv_cache=self.kv_cache,
            in_flight=self._in_flight,
            plan=self._plan,
            outputs=self._outputs,
            intake=Intake(
                config,
                vocab_size=vocab_size,
                features=features,
                has_connector=connector is not None,
                has_grammars=grammars is not None,
            ),
            loras=self._loras,
            encoder=self._encoder,
            transfers=self._transfers,
            connector=connector,
            eos_token_ids=eos_token_ids,
        )
        gates = AdmissionGates(cache, kv_cache.num_blocks)
        self._reasons = WaitingReasons(
            config,
            running=self.running,
            waiting=self.waiting,
            kv_cache=self.kv_cache,
            in_flight=self._in_flight,
            gates=gates,
            loras=self._loras,
            transfers=self._transfers,
        )
        self._admission = Admission(
            config,
            running=self.running,
            waiting=self.waiting,
            kv_cache=self.kv_cache,
            in_flight=self._in_flight,
            lifecycle=self._lifecycle,
            plan=self._plan,
            gates=gates,
            loras=self._loras,
            encoder=self._encoder,
            structured=self._structured,
            transfers=self._transfers,
            connector=connector,
        )
        self._recovery = Recovery(
            running=self.running,
            waiting=self.waiting,
            kv_cache=self.kv_cache,
            in_flight=self._in_flight,
            encoder=self._encoder,
        )
        self._answers = Answers(
            config,
            running=self.running,
            kv_cache=self.kv_cache,
            in_flight=self._in_flight,
            lifecycle=self._lifecycle,
            plan=self._plan,
            outputs=self._outputs,
            recovery=self._recovery,
            transfers=self._transfers,
            epoch=epoch,
            vocab_size=vocab_size,
        )
        # Whoever is to hear of every row, or of every step, gets plans that are worked out anew.
        self._steps_can_stand = not (
            connector is not None
            or verify_plan
            or config.feed_back_tokens
            or config.num_speculative_tokens
        )
        self._standing: StandingStep | None = None
        self._sampling = SamplingRows(self.running, np.empty(0, np.int64))
        self._sum_in_flight = 0
        self._num_steps_reported = 0
        if connector is not None:
            connector.bind_blocks(self._transfers)

    # Requests in

    def add_request(self, message: AddRequest, *, client: int, now: float) -> None:
        """Queue a request; one that cannot be served is answered with the reason at once."""
        self._lifecycle.queue(message, client=client, now=now)

    def continue_session(self, client: int, message: ContinueSession, now: float) -> None:
        """More input for a resumable request. Handles that have ended already are ignored."""
        request = self._lifecycle.get(client, message.handle)
        if request is not None:
            self._lifecycle.continue_session(request, message, now)

    def abort_requests(self, client: int, handles: Int32Array, now: float) -> None:
        """The client lost interest. Handles that have ended already are ignored."""
        for handle in handles.tolist():
            request = self._lifecycle.get(client, handle)
            if request is not None:
                self._lifecycle.end(request, FinishReason.ABORTED, now)

    def abort_client(self, client: int, now: float) -> None:
        """A whole client is gone."""
        self.abort_requests(client, int32_array(self._lifecycle.handles_of(client)), now)

    def stop_found(self, client: int, message: StopFound, now: float) -> None:
        """The gateway found a stop string: the request ends, cut to `num_tokens` output tokens."""
        request = self._lifecycle.get(client, message.handle)
        if request is not None:
            self._lifecycle.end_cut(request, message.num_tokens, now)

    # A step

    def schedule(self, now: float) -> SchedulerOutput | None:
        """The next plan; None while enough plans are unanswered or there is nothing to plan."""
        if len(self._in_flight) >= self.config.max_steps_in_flight:
            return None
        self._give_up_late_loads(now)
        if (plan := self._plan_standing_step(now)) is not None:
            return plan
        budget = StepBudget(self._token_budget, self.config.long_prefill_token_threshold)
        self._encoder.begin_step()
        num_scheduled, nobody_preempted = self._schedule_running(budget, now)
        self._name_running_blocks(num_scheduled)
        if nobody_preempted and self._pause is PauseState.UNPAUSED:
            self._admission.admit_waiting(budget, num_scheduled, now)
        if not budget.num_spent and not self._plan.must_be_sent:
            return None
        return self._build_plan(num_scheduled, budget.num_spent, now)

    @property
    def _token_budget(self) -> int:
        return 0 if self._pause is PauseState.PAUSED_ALL else self.config.token_budget

    def _plan_standing_step(self, now: float) -> SchedulerOutput | None:
        """The next plan if it is like the one before: the same requests run, each computes one
        token, and nobody can join them. None if that is not sure, or blocks are short."""
        standing, running, step = self._standing, self.running, self._plan.step + 1
        if standing is None or not standing.holds(running, step):
            return None
        if self._pause is not PauseState.UNPAUSED or (
            not running.is_full and self.waiting.peek() is not None
        ):
            return None
        is_quiet = standing.is_quiet(step)
        if not is_quiet:
            appended = self.kv_cache.grow(
                self._num_slots(standing.num_scheduled), running.generation
            )
            if appended is None:
                return None
            self._plan.appended += appended
            has_named = self._name_running_blocks(standing.num_scheduled)
        plan = self._plan.build_standing(
            standing.num_tokens, answered_step=self._in_flight.last_answered_step
        )
        running.advance(standing.num_scheduled)
        running.num_placeholders += standing.num_scheduled
        if not (is_quiet or appended or has_named):
            standing.look_ahead(
                running,
                self.kv_cache.block_sizes,
                num_lookahead=self.config.num_lookahead_tokens,
                step=step,
            )
        self._in_flight.add(PlannedStep(step, standing.sampling))
        self._sum_in_flight += len(self._in_flight)
        self._progress.advanced(now)
        return plan

    def _schedule_running(self, budget: StepBudget, now: float) -> tuple[Int64Array, bool]:
        """Tokens per row for the requests that run, and whether all of them still do."""
        running = self.running
        wanted = budget.cap(running.wanted())
        before = self._encoder.checkpoint() if self._encoder.pending else None
        num_scheduled = self._cut(wanted, budget)
        appended = self.kv_cache.grow(self._num_slots(num_scheduled), running.generation)
        if appended is None:
            if before is not None:
                self._encoder.restore(before)
            return self._schedule_under_pressure(wanted, budget, now)
        self._plan.appended += appended
        budget.spend(int(num_scheduled.sum()))
        return num_scheduled, True

    def _cut(self, wanted: Int64Array, budget: StepBudget) -> Int64Array:
        """What of `wanted` the budgets of tokens and of encoder inputs allow, in admission order.

        An item that cannot be encoded yet cuts its request, and leaves more for those behind it.
        """
        running = self.running
        num_scheduled = budget.cut(wanted, running)
        pending = self._encoder.pending.values()
        if not pending:
            return num_scheduled
        for request in sorted(pending, key=lambda request: int(running.generation[request.row])):
            row = request.row
            allowed = self._encoder.limit(
                request, int(running.num_computed[row]), int(num_scheduled[row])
            )
            if allowed < num_scheduled[row]:
                wanted = wanted.copy()
                wanted[row] = allowed
                num_scheduled = budget.cut(wanted, running)
        return num_scheduled

    def _num_slots(self, num_scheduled: Int64Array) -> Int64Array:
        """(max_num_seqs,) tokens that rows need slots for; a drafter writes behind those that
        compute."""
        num_tokens = self.running.num_computed + num_scheduled
        lookahead = self.config.num_lookahead_tokens
        if lookahead:
            num_tokens[num_scheduled > 0] += lookahead
        return num_tokens

    def _schedule_under_pressure(
        self, wanted: Int64Array, budget: StepBudget, now: float
    ) -> tuple[Int64Array, bool]:
        """The same, one request after the other, when the blocks do not suffice for all: the
        policy's victim gives up its blocks, and what it took in this step, until they do."""
        running = self.running
        num_scheduled = np.zeros_like(wanted)
        requests = running.requests_in_order()
        grown: dict[int, list[list[int]]] = {}
        nobody_preempted = True
        index = 0
        while index < len(requests) and budget.num_left > 0:
            request = requests[index]
            row = request.row
            count = min(int(wanted[row]), budget.num_left)
            if request.multimodal:
                num_computed = int(running.num_computed[row])
                count = self._encoder.would_limit(request, num_computed, count)
            if count == 0:
                index += 1
                continue
            num_tokens = int(running.num_computed[row]) + count + self.config.num_lookahead_tokens
            block_ids = self.kv_cache.grow_row(row, num_tokens)
            while block_ids is None:
                if len(requests) == 1 and self._lifecycle.give_up_youngest_load():
                    block_ids = self.kv_cache.grow_row(row, num_tokens)
                    continue
                victim_index = self._policy.pick_victim(requests)
                victim = requests.pop(victim_index)
                budget.give_back(int(num_scheduled[victim.row]))
                num_scheduled[victim.row] = 0
                grown.pop(victim.row, None)
                self._lifecycle.preempt(victim, now)
                nobody_preempted = False
                index -= victim_index < index
                if victim is request:
                    break
                block_ids = self.kv_cache.grow_row(row, num_tokens)
            if block_ids is None:
                continue
            if request.multimodal:
                self._encoder.limit(request, int(running.num_computed[row]), count)
            grown[row] = block_ids
            num_scheduled[row] = count
            budget.spend(count)
            index += 1
        self._plan.appended += _appended_blocks(grown)
        return num_scheduled, nobody_preempted

    def _name_running_blocks(self, num_scheduled: Int64Array) -> bool:
        """Make findable what this plan completes, if anything. Not earlier: a request preempted in
        this step computes nothing of what it had been given. Tokens not verified yet name nothing.
        """
        running = self.running
        num_named = np.minimum(running.num_computed + num_scheduled, running.num_tokens)
        rows = self.kv_cache.rows_to_name(num_named)
        if len(rows):
            rows = rows[np.argsort(running.generation[rows])]
            self.kv_cache.name_rows(
                rows, num_named, running.token_ids, running.requests, self._plan.step + 1
            )
        return len(rows) > 0

    def _build_plan(
        self, num_scheduled: Int64Array, num_tokens: int, now: float
    ) -> SchedulerOutput:
        running = self.running
        num_drafts = running.num_drafts_in(num_scheduled) if running.drafts.shape[1] else None
        plan, loads = self._plan.build(
            num_scheduled, num_tokens, answered_step=self._in_flight.last_answered_step
        )
        running.advance(num_scheduled)
        rows = running.samples(num_scheduled).nonzero()[0]
        running.num_placeholders[rows] += 1
        planned = self._planned_step(plan, loads, rows, num_drafts)
        if num_drafts is not None:
            self._consume_drafts(num_scheduled, rows, num_drafts)
        for request in list(self._encoder.pending.values()):
            self._encoder.advanced(request, int(running.num_computed[request.row]))
        self._standing = self._standing_after(plan, planned, num_scheduled)
        if plan.num_scheduled_tokens:
            self._progress.advanced(now)
        self._in_flight.add(planned)
        self._sum_in_flight += len(self._in_flight)
        return plan

    def _standing_after(
        self, plan: SchedulerOutput, planned: PlannedStep, num_scheduled: Int64Array
    ) -> StandingStep | None:
        """What stands if this plan, just built, is one that the next can be like."""
        running, last = self.running, self._standing
        if (
            not self._steps_can_stand
            or len(plan.scheduled_rows)
            or plan.num_scheduled_tokens != running.num_rows
            or not running.num_rows
            or not planned.sampling.is_plain
        ):
            return None
        if last is not None and last.holds(running, plan.step):
            return last
        return StandingStep(running, planned.sampling, num_scheduled, step=plan.step)

    def _planned_step(
        self,
        plan: SchedulerOutput,
        loads: tuple[int, ...],
        rows: Int64Array,
        num_drafts: Int64Array | None,
    ) -> PlannedStep:
        running = self.running
        if not self._sampling.serves(running, rows):
            self._sampling = SamplingRows(running, rows)
        has_drafts = len(plan.draft_rows) > 0 and num_drafts is not None
        return PlannedStep(
            plan.step,
            self._sampling,
            num_drafts=num_drafts[rows] if has_drafts and num_drafts is not None else None,
            drafts=plan.draft_tokens if has_drafts else None,
            is_masked=running.has_grammar[rows] if plan.has_structured_output else None,
            loads=loads,
        )

    def _consume_drafts(
        self, num_scheduled: Int64Array, rows: Int64Array, num_drafts: Int64Array
    ) -> None:
        """Drafts are consumed by the plan that verifies them. With two steps in flight only the
        workers know the next ones; their number is what is planned with."""
        running = self.running
        running.num_placeholders += num_drafts
        running.num_drafts[num_scheduled > 0] = 0
        if self.config.max_steps_in_flight > 1:
            rows = rows[~running.has_grammar[rows]]
            running.num_drafts[rows] = running.drafts.shape[1]
            running.drafts[rows] = -1

    def take_masks(self) -> list[SampleMask]:
        """Masks that workers wait for, for plans with structured output; to be sent at once."""
        return self._structured.take_masks()

    # An answer

    def update_from_output(self, output: ModelRunnerOutput, now: float) -> None:
        """Apply the answer to the oldest unanswered plan.

        An answer of another epoch is counted and dropped. Raises BadAnswer for one that fits no
        plan, and changes nothing then.
        """
        was_due = self._answers.apply(output, now)
        if was_due and self._connector is not None:
            metadata = (output.connector_metadata,) if output.connector_metadata else ()
            self._connector.update_connector_output(
                ConnectorOutput(
                    output.step, failed_block_ids=output.failed_block_ids, metadata=metadata
                )
            )

    def update_drafts(self, rows: Int32Array, token_ids: Int32Array) -> None:
        """Drafts that came apart from an answer, for the next step of rows that decode."""
        self._answers.take_drafts(rows, token_ids)

    def update_from_transfers(self, report: TransferReport, now: float) -> None:
        """Transfers have ended on a rank; unknown and repeated ones are counted and ignored."""
        if report.epoch != self._plan.epoch or self._connector is None:
            self._transfers.num_bad_reports += 1
            return
        sent, received, ended = self._transfers.apply(report)
        for load in ended:
            if not load.is_whole and self.config.load_failure_policy == "fail":
                self._lifecycle.fail_load(load, now)
            else:
                self._lifecycle.end_load(load)
        self._connector.update_connector_output(
            ConnectorOutput(
                finished_sending=sent,
                finished_receiving=received,
                failed_block_ids=report.failed_block_ids,
                metadata=(report.connector_metadata,) if report.connector_metadata else (),
            )
        )

    def _give_up_late_loads(self, now: float) -> None:
        for request in self._transfers.expired(now):
            self._lifecycle.give_up_waiting(request, now)

    # The whole engine

    def set_pause(self, state: PauseState) -> None:
        """How much is scheduled from now on; plans under way are not touched."""
        self._pause = state

    def begin_epoch(self, epoch: int, now: float) -> None:
        """All workers are new, and know nothing: rows are empty, cached blocks void, transfers
        failed. Running requests wait again, in the order in which they ran."""
        self._transfers.reset()
        if self._connector is not None:
            self._connector.on_new_epoch(epoch)
        self._lifecycle.clear_rows(now)
        self._in_flight.reset()
        self.kv_cache.clear()
        self._encoder.clear()
        self._plan.begin_epoch(epoch)
        self._structured.begin_epoch(epoch)
        self._answers.epoch = epoch

    def shutdown(self) -> None:
        """No hook of the connector is called after this."""
        if self._connector is not None:
            self._connector.shutdown()

    # What others look at

    def take_outputs(self) -> list[tuple[int, EngineOutputs]]:
        """(client, message) for each client with news since the last call."""
        return self._outputs.take()

    def take_kv_events(self) -> list[Any]:
        """Blocks that became findable or ceased to be, as far as answers have proven it, and what
        the connector says of its tiers."""
        events: list[Any] = [*self.kv_cache.take_events(self._in_flight.last_answered_step)]
        if self._connector is not None:
            events += self._connector.take_events()
        return events

    def has_unfinished_requests(self) -> bool:
        """Somebody still waits for tokens."""
        return len(self._lifecycle) > 0

    def has_finished_requests(self) -> bool:
        """Rows were given up that the workers still believe held."""
        return self._plan.has_drops

    @property
    def num_steps_in_flight(self) -> int:
        """Plans not answered yet."""
        return len(self._in_flight)

    @property
    def num_steps(self) -> int:
        """Plans built in this epoch."""
        return self._plan.step

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return self.running.num_rows, len(self.waiting)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while any block is held."""
        return self.kv_cache.reset_prefix_cache()

    def reset_encoder_cache(self) -> bool:
        """Forget all encoder outputs; False while a request needs one."""
        return self._encoder.reset()

    def reset_connector_cache(self) -> bool:
        """Have the connector forget what it stored. False if it cannot, or there is none."""
        return self._connector is not None and self._connector.reset_cache()

    def check(self) -> None:
        """Raise LongshoreError unless every block is accounted for. For tests and idle moments."""
        held = [request.held for request in self.waiting if request.held is not None]
        self.kv_cache.check([*held, *self._transfers.held()])

    def make_report(self, now: float, engine_id: str) -> EngineReport:
        """The state now, with what each waiting request waits for."""
        num_running, num_waiting = self.get_request_counts()
        return EngineReport(
            engine_id=engine_id,
            num_running=num_running,
            num_waiting=num_waiting,
            num_blocks=self.kv_cache.num_blocks,
            num_free_blocks=self.kv_cache.num_free_blocks,
            kv_usage=self.kv_cache.usage,
            steps_in_flight=len(self._in_flight),
            idle_s=self.idle_s(now),
            pause=self._pause.value,
            waiting=self._reasons.describe(self._pause, now, MAX_REPORTED),
        )

    def idle_s(self, now: float) -> float:
        """Seconds for which requests have been there and none has advanced."""
        if not self.has_unfinished_requests():
            self._progress.advanced(now)
        return self._progress.idle_s(now)

    def make_stats(self, num_bad_messages: int = 0) -> SchedulerStats:
        """The state now; the mean of steps in flight starts anew with each call."""
        num_steps = self._plan.step - self._num_steps_reported
        steps_in_flight = self._sum_in_flight / num_steps if num_steps else 0.0
        self._num_steps_reported, self._sum_in_flight = self._plan.step, 0
        num_running, num_waiting = self.get_request_counts()
        prefixes, answers = self.kv_cache.stats, self._answers
        return SchedulerStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_blocks=self.kv_cache.num_blocks,
            num_free_blocks=self.kv_cache.num_free_blocks,
            kv_usage=self.kv_cache.usage,
            steps_in_flight=steps_in_flight,
            num_steps=self._plan.step,
            num_preemptions=self._lifecycle.num_preemptions,
            num_prefix_queried_tokens=prefixes.num_queried_tokens,
            num_prefix_hit_tokens=prefixes.num_hit_tokens,
            num_preempted_queried_tokens=prefixes.num_preempted_queried_tokens,
            num_preempted_hit_tokens=prefixes.num_preempted_hit_tokens,
            num_stale_tokens=answers.num_stale_tokens,
            num_bad_messages=num_bad_messages + self._transfers.num_bad_reports,
            num_external_queried_tokens=self._admission.num_external_queried_tokens,
            num_external_hit_tokens=self._admission.num_external_hit_tokens,
            num_draft_tokens=answers.num_draft_tokens,
            num_accepted_tokens=answers.num_accepted_tokens,
            num_invalid_draft_tokens=answers.num_invalid_draft_tokens,
            encoder_cache_usage=self._encoder.usage,
            num_quarantined_blocks=self._transfers.num_quarantined_blocks,
            num_rewinds=self._recovery.num_rewinds,
        )


def check_pool_size(config: SchedulerConfig, kv_cache: KVCacheConfig) -> None:
    """Raise ConfigError if one request of the longest length does not fit the empty pool: it could
    never finish, and everything behind it would wait for ever."""
    needed = sum(group.spec.max_blocks(config.max_model_len) for group in kv_cache.groups)
    usable = kv_cache.num_blocks - 1
    if needed > usable:
        raise ConfigError(
            f"a request of max_model_len={config.max_model_len} tokens needs {needed} blocks, but "
            f"the pool has {usable} usable ones. Lower max_model_len or raise num_blocks."
        )


def _appended_blocks(grown: dict[int, list[list[int]]]) -> list[AppendedBlocks]:
    """Blocks per row and group as columns per group."""
    appended = []
    for group in range(max(map(len, grown.values()), default=0)):
        rows = [row for row, block_ids in grown.items() for _ in block_ids[group]]
        ids = [block_id for block_ids in grown.values() for block_id in block_ids[group]]
        if ids:
            appended.append(
                AppendedBlocks(group, np.array(rows, np.int32), np.array(ids, np.int32))
            )
    return appended
