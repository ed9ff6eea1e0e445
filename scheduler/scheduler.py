"""The scheduler, without I/O, clock or tensors: requests in, plans out, outputs in, tokens out.

`Scheduler` builds the objects below and is their interface. `step.planner` chooses the requests of
the next step, `step.admission` admits waiting ones, `step.output_processor` applies outputs, and
`lifecycle` adds, preempts and ends requests.
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
from longshore.protocol.requests import AddRequest, ContinueSession, Malformed, StopFound
from longshore.protocol.statistics import (
    MAX_REPORTED,
    BlockSnapshot,
    EngineReport,
    SchedulerStats,
    WorkerStats,
)
from longshore.scheduler.config import CacheConfig, SchedulerConfig, check_states
from longshore.scheduler.features.drafts import Drafts
from longshore.scheduler.features.encoder import check_encoder, make_encoder
from longshore.scheduler.features.forks import Forks
from longshore.scheduler.features.grammar import GrammarCompiler, Grammars
from longshore.scheduler.features.lora import LoRASlots
from longshore.scheduler.features.metrics import BlockMetrics
from longshore.scheduler.features.recovery import Recovery
from longshore.scheduler.features.transfers import Transfers
from longshore.scheduler.inspect.block_snapshot import BlockSnapshots
from longshore.scheduler.inspect.reports import WaitingReasons
from longshore.scheduler.kv_cache.holds import Holds
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.queue.outside_policies import checked, load_policy
from longshore.scheduler.queue.policies import SchedulingPolicy
from longshore.scheduler.queue.queues import WaitingRequests
from longshore.scheduler.request import Outcome, RequestStatus
from longshore.scheduler.step.admission import Admission, AdmissionGates
from longshore.scheduler.step.client_outputs import ClientOutputs
from longshore.scheduler.step.in_flight import StepsInFlight
from longshore.scheduler.step.output_processor import OutputProcessor
from longshore.scheduler.step.output_validator import OutputValidator
from longshore.scheduler.step.plan_builder import PlanBuilder
from longshore.scheduler.step.planner import PauseState, StepPlanner
from longshore.scheduler.step.running import RunningTable
from longshore.scheduler.validation import RequestValidator


class Scheduler:
    """Requests in, plans out, outputs in, tokens out.

    `schedule` and `update_from_output` take the time as an argument and are deterministic: the same
    calls in the same order give the same plans.

    kv_cache:  the groups and the number of blocks that the workers agreed on.
    features:  what the workers support beyond plain text; requests for other features are rejected.
    policy:    None: the policy of `config`. One that is not built in is checked at every call.
    connector: the scheduler half of a connector; None: KV stays on the device.
    grammars:  compiles grammars; None: requests with structured output are rejected.
    num_ranks: workers that each report the end of a transfer.
    block_metrics: receives allocation, access and eviction of blocks.
    Raises ConfigError if one request of `max_model_len` does not fit into the empty pool.
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
        num_encoder_tokens = max_encoder_tokens(kv_cache.groups)
        _check(config, cache, kv_cache, has_connector=connector is not None)
        if num_encoder_tokens is not None:  # equal tokens need not have equal KV
            cache = msgspec.structs.replace(cache, enable_prefix_caching=False)
        self.config = config
        self._num_bad_reports = self._sum_in_flight = self._num_steps_reported = 0
        self._advanced_at_s: float | None = None

        # Tables
        self.kv_cache = KVCacheManager(
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
        self.waiting = WaitingRequests(policy)
        self.running = RunningTable(
            config.max_num_seqs, config.max_model_len, config.num_speculative_tokens
        )
        self._in_flight = StepsInFlight(self.running)
        self._holds = Holds(self.kv_cache)
        self._outputs = ClientOutputs()
        self._gates = AdmissionGates(cache, kv_cache.num_blocks, self.kv_cache.num_usable_blocks)

        # Features: forks are always there, the others only if configured
        self._forks = Forks(self.running, self.waiting, self.kv_cache, self._holds, self._in_flight)
        self._transfers = self._encoder = self._loras = self._grammars = self._drafts = None
        if connector is not None:
            self._transfers = Transfers(connector, self.kv_cache, num_ranks=num_ranks)
        self._encoder = make_encoder(config, kv_cache)
        if config.max_loras:
            self._loras = LoRASlots(config.max_loras)
        if grammars is not None:
            self._grammars = Grammars(grammars, self._in_flight, vocab_size=vocab_size, epoch=epoch)
        if config.num_speculative_tokens:
            is_async = config.max_steps_in_flight > 1
            self._drafts = Drafts(self.running, self._grammars, is_async)

        # Decisions
        self._plan = PlanBuilder(
            self.running,
            self.kv_cache,
            epoch=epoch,
            encoder=self._encoder,
            drafts=self._drafts,
            connector=connector,
            feed_back_tokens=config.feed_back_tokens,
            has_grammars=grammars is not None,
            verify_plan=verify_plan,
        )
        validator = RequestValidator(
            config,
            vocab_size=vocab_size,
            features=features,
            has_connector=connector is not None,
            has_grammars=grammars is not None,
            max_encoder_tokens=num_encoder_tokens,
        )
        self._lifecycle = Lifecycle(
            config=config,
            validator=validator,
            running=self.running,
            waiting=self.waiting,
            forks=self._forks,
            holds=self._holds,
            kv_cache=self.kv_cache,
            in_flight=self._in_flight,
            outputs=self._outputs,
            plan=self._plan,
            eos_token_ids=eos_token_ids,
            transfers=self._transfers,
            encoder=self._encoder,
            loras=self._loras,
            grammars=self._grammars,
        )
        self._admission = Admission(
            config=config,
            running=self.running,
            waiting=self.waiting,
            forks=self._forks,
            holds=self._holds,
            kv_cache=self.kv_cache,
            in_flight=self._in_flight,
            gates=self._gates,
            plan=self._plan,
            lifecycle=self._lifecycle,
            max_loading_blocks=config.max_loading_blocks or kv_cache.num_blocks // 2,
            transfers=self._transfers,
            encoder=self._encoder,
            loras=self._loras,
            grammars=self._grammars,
        )
        self._planner = StepPlanner(
            config=config,
            policy=policy,
            running=self.running,
            waiting=self.waiting,
            holds=self._holds,
            kv_cache=self.kv_cache,
            in_flight=self._in_flight,
            plan=self._plan,
            lifecycle=self._lifecycle,
            admission=self._admission,
            transfers=self._transfers,
            encoder=self._encoder,
            drafts=self._drafts,
            allow_steady=not (
                connector is not None
                or verify_plan
                or config.feed_back_tokens
                or config.num_speculative_tokens
            ),
        )
        self._recovery = Recovery(
            config=config,
            running=self.running,
            holds=self._holds,
            kv_cache=self.kv_cache,
            in_flight=self._in_flight,
            plan=self._plan,
            lifecycle=self._lifecycle,
            transfers=self._transfers,
            encoder=self._encoder,
        )
        self._processor = OutputProcessor(
            running=self.running,
            in_flight=self._in_flight,
            outputs=self._outputs,
            plan=self._plan,
            lifecycle=self._lifecycle,
            recovery=self._recovery,
            validator=OutputValidator(self.running, self._in_flight, vocab_size),
            drafts=self._drafts,
            grammars=self._grammars,
        )

        # Reports
        self._reasons = WaitingReasons(
            config=config,
            running=self.running,
            waiting=self.waiting,
            kv_cache=self.kv_cache,
            in_flight=self._in_flight,
            gates=self._gates,
            planner=self._planner,
            holds=self._holds,
            loras=self._loras,
            transfers=self._transfers,
            encoder=self._encoder,
        )
        self._snapshots = BlockSnapshots(
            kv_cache,
            running=self.running,
            holds=self._holds,
            transfers=self._transfers,
            kv_cache=self.kv_cache,
        )

    # Requests

    def add_request(self, message: AddRequest, *, client: int, now: float) -> None:
        """Queue a request; one that cannot be served is rejected with a reason."""
        self._lifecycle.add(message, client=client, now=now)

    def reject_message(self, malformed: Malformed, reason: str, *, client: int, now: float) -> None:
        """Answer a message that could not be decoded: its request ends."""
        self._lifecycle.reject_message(malformed, reason, client=client, now=now)

    def continue_session(self, client: int, message: ContinueSession, now: float) -> None:
        """Receive input for a session. Unknown handles are ignored: their requests have ended."""
        request = self._lifecycle.get(client, message.handle)
        if request is not None:
            self._lifecycle.sessions.receive(request, message, now)

    def abort_requests(self, client: int, handles: Int32Array, now: float) -> None:
        """Abort these requests. Unknown handles are ignored: their requests have ended."""
        for handle in handles.tolist():
            request = self._lifecycle.get(client, handle)
            if request is not None:
                self._lifecycle.end(request, Outcome(FinishReason.ABORTED), now)

    def abort_client(self, client: int, now: float) -> None:
        """A client has disconnected: abort its requests."""
        self.abort_requests(client, int32_array(self._lifecycle.handles_of(client)), now)

    def stop_found(self, client: int, message: StopFound, now: float) -> None:
        """The gateway found a stop string: the request ends, cut to `num_tokens` output tokens."""
        request = self._lifecycle.get(client, message.handle)
        # A session between two inputs has no output to cut.
        between = RequestStatus.WAITING_FOR_STREAMING_REQ
        if request is not None and request.status is not between:
            outcome = Outcome(
                FinishReason.STOPPED, ends_output=True, num_output_tokens=message.num_tokens
            )
            self._lifecycle.end(request, outcome, now)

    # A step

    def schedule(self, now: float) -> SchedulerOutput | None:
        """The next plan; None if too many plans are unanswered or there is nothing to plan. The
        policy is in `StepPlanner.plan_step`."""
        if len(self._in_flight.steps) >= self.config.max_steps_in_flight:
            return None
        if self._transfers is not None:
            for request in self._transfers.expired(now):
                self._lifecycle.expire_load(request, now)
        plan = self._planner.plan_step(now)
        if plan is not None:
            if self._forks.pending:
                self._forks.planned()
            self._sum_in_flight += len(self._in_flight.steps)
            if plan.num_scheduled_tokens:
                self._advanced_at_s = now
        return plan

    def take_masks(self) -> list[SampleMask]:
        """Masks of plans with structured output, which workers wait for; to be sent at once."""
        return [] if self._grammars is None else self._grammars.take_masks()

    # An output

    def update_from_output(self, output: ModelRunnerOutput, now: float) -> None:
        """Apply the output of the oldest unanswered plan.

        An output of another epoch is counted and dropped. Raises InvalidOutput, and nothing has
        changed, if the output does not fit its plan.
        """
        was_due = self._processor.apply(output, now)
        if self._forks.pending:
            self._forks.answered()
        if was_due and self._transfers is not None:
            metadata = (output.connector_metadata,) if output.connector_metadata else ()
            self._transfers.connector.update_connector_output(
                ConnectorOutput(
                    output.step, failed_block_ids=output.failed_block_ids, metadata=metadata
                )
            )

    def update_drafts(self, rows: Int32Array, token_ids: Int32Array) -> None:
        """Receive drafts, separately from an output, for the next step of rows that decode."""
        if self._drafts is not None:
            self._drafts.receive(rows, token_ids)

    def update_from_transfers(self, report: TransferReport, now: float) -> None:
        """Transfers have ended on a rank; unknown and repeated reports are counted and ignored."""
        if report.epoch != self._plan.epoch or self._transfers is None:
            self._num_bad_reports += 1
            return
        output, ended = self._transfers.apply(report)
        for load in ended:
            self._lifecycle.end_load(load, now)
        self._transfers.connector.update_connector_output(output)

    # The whole engine

    def set_pause(self, state: PauseState) -> None:
        """Set what is scheduled from now on; unanswered plans are not affected."""
        self._planner.pause = state

    def begin_epoch(self, epoch: int, now: float) -> None:
        """All workers are new and empty: rows are free, cached blocks are void, transfers have
        failed. Running requests wait again, in the order in which they ran."""
        if self._transfers is not None:
            self._transfers.begin_epoch(epoch)
        self._lifecycle.begin_epoch(now)
        self._in_flight.reset()
        self.kv_cache.clear()
        if self._encoder is not None:
            self._encoder.clear()
        self._plan.begin_epoch(epoch)
        if self._grammars is not None:
            self._grammars.begin_epoch(epoch)
        self._sum_in_flight = self._num_steps_reported = 0

    def shutdown(self) -> None:
        """No hook of the connector is called after this."""
        if self._transfers is not None:
            self._transfers.connector.shutdown()

    # Outputs, events and reports

    def take_outputs(self) -> list[tuple[int, EngineOutputs]]:
        """(client, message) for each client with outputs since the last call."""
        return self._outputs.take()

    def take_kv_events(self) -> list[Any]:
        """Events of blocks cached or evicted, as far as outputs have proven them, and of the
        connector's tiers."""
        events: list[Any] = [*self.kv_cache.take_events(self._in_flight.last_answered_step)]
        if self._transfers is not None:
            events += self._transfers.connector.take_events()
        return events

    def has_unfinished_requests(self) -> bool:
        """Whether some request has not ended."""
        return len(self._lifecycle) > 0

    def is_waited_for(self) -> bool:
        """Whether a request waits for this engine, not for its client as sessions do."""
        between = RequestStatus.WAITING_FOR_STREAMING_REQ
        return self.running.num_rows > 0 or any(
            request.status is not between for request in self.waiting
        )

    def has_finished_requests(self) -> bool:
        """Whether rows were emptied that the workers still hold."""
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
        """Uncache all prefixes; False while any block is held."""
        return self.kv_cache.reset_prefix_cache()

    def reset_encoder_cache(self) -> bool:
        """Drop all encoder outputs; False while a request needs one."""
        return self._encoder is None or self._encoder.reset()

    def reset_connector_cache(self) -> bool:
        """Make the connector drop its stored KV. False if it cannot, or if there is none."""
        return self._transfers is not None and self._transfers.connector.reset_cache()

    def check(self) -> None:
        """Raise LongshoreError unless every block is accounted for. For tests and idle times."""
        owners = [request.hold.blocks for request in self._holds if request.hold is not None]
        if self._transfers is not None:
            owners += [blocks for _, _, blocks in self._transfers.owners()]
        self.kv_cache.check(owners)

    def make_report(self, now: float, engine_id: str) -> EngineReport:
        """The current state, with what each waiting request waits for."""
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
            waiting=self._reasons.describe(now, MAX_REPORTED),
        )

    def make_block_snapshot(self, now: float, engine_id: str) -> BlockSnapshot:
        """The use and holder of every block; the last snapshot if that was made recently."""
        return self._snapshots.latest(now) or self._snapshots.make(
            self.make_report(now, engine_id),
            now,
            num_steps=self._plan.step,
            num_preemptions=self._lifecycle.num_preemptions,
        )

    def idle_s(self, now: float) -> float:
        """Seconds for which no request has advanced although some wait."""
        if not self.is_waited_for():
            self._advanced_at_s = now
        return 0.0 if self._advanced_at_s is None else max(now - self._advanced_at_s, 0.0)

    def make_stats(
        self, num_bad_messages: int = 0, workers: tuple[WorkerStats, ...] = ()
    ) -> SchedulerStats:
        """The current state; the mean of steps in flight is since the previous call."""
        num_steps = self._plan.step - self._num_steps_reported
        steps_in_flight = self._sum_in_flight / num_steps if num_steps else 0.0
        self._num_steps_reported, self._sum_in_flight = self._plan.step, 0
        num_running, num_waiting = self.get_request_counts()
        prefixes, transfers, drafts = self.kv_cache.stats, self._transfers, self._drafts
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
            num_stale_tokens=self._processor.num_stale_tokens,
            num_bad_messages=num_bad_messages
            + self._num_bad_reports
            + (0 if transfers is None else transfers.num_bad_reports),
            num_external_queried_tokens=0 if transfers is None else transfers.num_queried_tokens,
            num_external_hit_tokens=0 if transfers is None else transfers.num_hit_tokens,
            num_draft_tokens=0 if drafts is None else drafts.num_draft_tokens,
            num_accepted_tokens=0 if drafts is None else drafts.num_accepted_tokens,
            num_invalid_draft_tokens=0 if drafts is None else drafts.num_invalid_draft_tokens,
            encoder_cache_usage=0.0 if self._encoder is None else self._encoder.usage,
            num_quarantined_blocks=0 if transfers is None else transfers.num_quarantined_blocks,
            num_rewinds=self._recovery.num_rewinds,
            workers=workers,
        )


def _check(
    config: SchedulerConfig, cache: CacheConfig, kv_cache: KVCacheConfig, *, has_connector: bool
) -> None:
    """Raise ConfigError for settings that these KV cache groups do not support."""
    longest = config.longest_request(cache.context_parallel_size)
    check_holds_one_request(kv_cache.groups, kv_cache.num_blocks, longest)
    check_states(config, [group.spec for group in kv_cache.groups], has_connector=has_connector)
    check_encoder(config, kv_cache, has_connector=has_connector)
