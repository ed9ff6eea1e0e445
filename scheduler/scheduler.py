"""Requests in, plans out: the scheduler without I/O, clock or tensors.

It joins the parts and is their one door. Who runs in the next step is decided in `step_planner`,
who may join in `admission`, what an answer means in `answers`, how a request comes and goes in
`lifecycle`.
"""

from typing import Any

import msgspec

from longshore.connectors.base import ConnectorOutput, SchedulerConnector
from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.handshake import Feature
from longshore.protocol.kv_cache_spec import (
    KVCacheConfig,
    check_holds_one_request,
    max_encoder_tokens,
)
from longshore.protocol.outputs import (
    EngineOutputs,
    FinishReason,
    ModelRunnerOutput,
    TransferReport,
)
from longshore.protocol.plan import SampleMask, SchedulerOutput
from longshore.protocol.requests import (
    AddRequest,
    ContinueSession,
    Malformed,
    StopFound,
)
from longshore.protocol.statistics import (
    MAX_REPORTED,
    BlockSnapshot,
    EngineReport,
    SchedulerStats,
    WorkerStats,
)
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.features.forks import Forks
from longshore.scheduler.features.grammar import GrammarCompiler, StructuredOutputs
from longshore.scheduler.features.lora import LoRASlots
from longshore.scheduler.features.metrics import BlockMetrics
from longshore.scheduler.features.recovery import Recovery
from longshore.scheduler.features.row_encoder import check_encoder, make_encoder
from longshore.scheduler.features.transfers import Transfers
from longshore.scheduler.inspect.block_snapshot import BlockSnapshots
from longshore.scheduler.inspect.reports import Progress, WaitingReasons
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.kv_cache.windowed import check_states
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.parts import Parts
from longshore.scheduler.queue.policies import (
    SchedulingPolicy,
    checked,
    load_policy,
)
from longshore.scheduler.queue.waiting import WaitingRequests
from longshore.scheduler.request import RequestStatus
from longshore.scheduler.step.admission import Admission
from longshore.scheduler.step.client_outputs import OutputBuckets
from longshore.scheduler.step.gates import AdmissionGates
from longshore.scheduler.step.in_flight import StepsInFlight
from longshore.scheduler.step.output_processor import OutputProcessor
from longshore.scheduler.step.pause import PauseState
from longshore.scheduler.step.plan_builder import PlanBuilder
from longshore.scheduler.step.planner import StepPlanner
from longshore.scheduler.step.running import RunningTable
from longshore.scheduler.validation import RequestValidator


class Scheduler:
    """Requests in, plans out, answers in, tokens out.

    `schedule` and `update_from_output` take the time as an argument and are deterministic: the same
    calls in the same order give the same plans.

    kv_cache:  the groups and the number of blocks that the workers agreed on.
    features:  what the workers can do beyond plain text; requests for the rest are refused.
    policy:    None takes the one that `config` names. One that is not built in is checked.
    connector: its scheduler half; None keeps KV on the device.
    grammars:  compiles grammars; None refuses requests with structured output.
    num_ranks: workers that each report the end of a transfer.
    block_metrics: is told how blocks live; None costs nothing.
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
        block_metrics: BlockMetrics | None = None,
    ) -> None:
        check_holds_one_request(
            kv_cache.groups,
            kv_cache.num_blocks,
            *config.longest_request,
            context_parallel_size=cache.context_parallel_size,
        )
        specs = [group.spec for group in kv_cache.groups]
        check_states(config, specs, has_connector=connector is not None)
        check_encoder(config, kv_cache, has_connector=connector is not None)
        if max_encoder_tokens(kv_cache.groups) is not None:  # equal tokens need not have equal KV
            cache = msgspec.structs.replace(cache, enable_prefix_caching=False)
        blocks = KVCacheManager(
            cache,
            kv_cache,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_tokens_in_flight,
            max_steps_in_flight=config.max_steps_in_flight,
            hash_seed=hash_seed,
            metrics=block_metrics,
            record_cached=connector is not None,
        )
        policy = load_policy(config.policy) if policy is None else checked(policy)
        in_flight = StepsInFlight()
        running = RunningTable(
            config.max_num_seqs, config.max_model_len, config.num_speculative_tokens
        )
        waiting = WaitingRequests(policy)
        parts = Parts(
            config=config,
            vocab_size=vocab_size,
            policy=policy,
            connector=connector,
            running=running,
            waiting=waiting,
            forks=Forks(running, waiting, blocks, in_flight),
            kv_cache=blocks,
            in_flight=in_flight,
            outputs=OutputBuckets(),
            transfers=Transfers(blocks, in_flight, num_ranks=num_ranks),
            gates=AdmissionGates(cache, kv_cache.num_blocks),
            loras=LoRASlots(config.max_loras),
            encoder=make_encoder(config, kv_cache),
        )
        self.config = config
        self.running, self.waiting, self.kv_cache = running, waiting, blocks
        self._forks = parts.forks
        self._connector = connector
        self._in_flight, self._outputs = in_flight, parts.outputs
        self._transfers, self._encoder = parts.transfers, parts.encoder
        intake = RequestValidator(
            config,
            vocab_size=vocab_size,
            features=features,
            has_connector=connector is not None,
            has_grammars=grammars is not None,
            max_encoder_tokens=max_encoder_tokens(kv_cache.groups),
        )
        self._plan = PlanBuilder(parts, epoch=epoch, verify_plan=verify_plan)
        self._structured = StructuredOutputs(parts, grammars, epoch=epoch)
        self._lifecycle = Lifecycle(parts, self._plan, intake, eos_token_ids=eos_token_ids)
        self._admission = Admission(parts, self._plan, self._lifecycle, self._structured)
        self._recovery = Recovery(parts, self._plan, self._lifecycle)
        self._answers = OutputProcessor(parts, self._plan, self._lifecycle, self._recovery)
        self._planner = StepPlanner(
            parts,
            self._plan,
            self._lifecycle,
            self._admission,
            allow_steady_steps=not (
                connector is not None
                or verify_plan
                or config.feed_back_tokens
                or config.num_speculative_tokens
            ),
        )
        self._reasons, self._progress = WaitingReasons(parts), Progress()
        self._block_maps = BlockSnapshots(parts, kv_cache)
        self._sum_in_flight = self._num_steps_reported = 0
        if connector is not None:
            connector.bind_blocks(parts.transfers)

    # Requests in

    def add_request(self, message: AddRequest, *, client: int, now: float) -> None:
        """Queue a request; one that cannot be served is answered with the reason at once."""
        self._lifecycle.queue(message, client=client, now=now)

    def reject_message(self, malformed: Malformed, reason: str, *, client: int) -> None:
        """Answer for a message that could not be read: the request that it is about ends."""
        self._lifecycle.reject_message(malformed, reason, client=client)

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
                self._lifecycle.end(request, FinishReason.ABORTED)

    def abort_client(self, client: int, now: float) -> None:
        """A whole client is gone."""
        self.abort_requests(client, int32_array(self._lifecycle.handles_of(client)), now)

    def stop_found(self, client: int, message: StopFound, now: float) -> None:
        """The gateway found a stop string: the request ends, cut to `num_tokens` output tokens."""
        request = self._lifecycle.get(client, message.handle)
        # A session between two outputs has none that could be cut.
        between = RequestStatus.WAITING_FOR_STREAMING_REQ
        if request is not None and request.status is not between:
            self._lifecycle.end_cut(request, message.num_tokens, now)

    # A step

    def schedule(self, now: float) -> SchedulerOutput | None:
        """The next plan; None while enough plans are unanswered or there is nothing to plan. Who
        runs is decided in `StepPlanner.plan_step`."""
        if len(self._in_flight) >= self.config.max_steps_in_flight:
            return None
        for request in self._transfers.expired(now):
            self._lifecycle.stop_waiting(request)
        plan = self._planner.plan_step(now)
        if plan is not None:
            self._forks.planned()
            self._sum_in_flight += len(self._in_flight)
            if plan.num_scheduled_tokens:
                self._progress.advanced(now)
        return plan

    def take_masks(self) -> list[SampleMask]:
        """Masks that workers wait for, for plans with structured output; to be sent at once."""
        return self._structured.take_masks()

    # An answer

    def update_from_output(self, output: ModelRunnerOutput, now: float) -> None:
        """Apply the answer to the oldest unanswered plan.

        An answer of another epoch is counted and dropped. Raises InvalidOutput for one that fits no
        plan, and changes nothing then.
        """
        was_due = self._answers.apply(output, now)
        self._forks.answered()
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
                self._lifecycle.fail_load(load)
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

    # The whole engine

    def set_pause(self, state: PauseState) -> None:
        """How much is scheduled from now on; plans under way are not touched."""
        self._planner.pause = state

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
        self._sum_in_flight = self._num_steps_reported = 0

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

    def is_waited_for(self) -> bool:
        """Somebody waits for this engine: sessions whose client has the next word do not."""
        between = RequestStatus.WAITING_FOR_STREAMING_REQ
        return self.running.num_rows > 0 or any(
            request.status is not between for request in self.waiting
        )

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
            pause=self._planner.pause.value,
            waiting=self._reasons.describe(self._planner.pause, now, MAX_REPORTED),
        )

    def make_block_snapshot(self, now: float, engine_id: str) -> BlockSnapshot:
        """What every block is used for, and who holds which; the one before, if asked too soon."""
        return self._block_maps.latest(now) or self._block_maps.make(
            self.make_report(now, engine_id),
            now,
            num_steps=self._plan.step,
            num_preemptions=self._lifecycle.num_preemptions,
        )

    def idle_s(self, now: float) -> float:
        """Seconds for which requests have been there and none has advanced."""
        if not self.is_waited_for():
            self._progress.advanced(now)
        return self._progress.idle_s(now)

    def make_stats(
        self, num_bad_messages: int = 0, workers: tuple[WorkerStats, ...] = ()
    ) -> SchedulerStats:
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
            workers=workers,
        )
