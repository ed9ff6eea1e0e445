"""The scheduler, without I/O, clock or tensors: requests in, plans out, outputs in, tokens out.

`Scheduler` builds its parts and is their interface. `step.planner` chooses the requests of
the next step, `step.admission` admits waiting ones, `step.output_processor` applies outputs, and
`lifecycle` adds, preempts and ends requests.
"""

import dataclasses
import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

from longshore.connectors.base import EncoderConnector, SchedulerConnector
from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import ConfigError
from longshore.protocol.events import KVEvent
from longshore.protocol.handshake import Feature
from longshore.protocol.kv_cache_spec import (
    KVCacheConfig,
    KVCapacity,
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
from longshore.scheduler.attached import AttachedFeatures, GivenFeatures
from longshore.scheduler.config import (
    CacheConfig,
    SchedulerConfig,
    check_states,
)
from longshore.scheduler.features.encoder import check_encoder
from longshore.scheduler.features.grammar import GrammarCompiler
from longshore.scheduler.features.metrics import BlockMetrics
from longshore.scheduler.features.routed_experts import RoutedExpertsReader
from longshore.scheduler.features.swap import check_swaps
from longshore.scheduler.features.tool_calls import Decoder
from longshore.scheduler.features.transfers import Transfers
from longshore.scheduler.hooks import Hooks
from longshore.scheduler.inspect.block_snapshot import BlockSnapshots
from longshore.scheduler.inspect.reports import WaitingReasons
from longshore.scheduler.inspect.trace import SchedulerTrace
from longshore.scheduler.kv_cache.holds import Holds
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.queue.outside_policies import checked, load_policy
from longshore.scheduler.queue.policies import FairPolicy, SchedulingPolicy
from longshore.scheduler.queue.queues import SharedEvent, WaitingRequests
from longshore.scheduler.queue.shares import Shares
from longshore.scheduler.request import Outcome, RequestStatus
from longshore.scheduler.step.admission import Admission, AdmissionGates
from longshore.scheduler.step.client_outputs import ClientOutputs
from longshore.scheduler.step.in_flight import StepsInFlight
from longshore.scheduler.step.output_processor import OutputProcessor
from longshore.scheduler.step.output_validator import OutputValidator
from longshore.scheduler.step.plan_builder import PlanBuilder
from longshore.scheduler.step.planner import PauseState, StepPlanner
from longshore.scheduler.step.running import RunningTable
from longshore.scheduler.step.token_budget import TokenBudget
from longshore.scheduler.validation import RequestValidator


class Scheduler:
    """Requests in, plans out, outputs in, tokens out.

    `schedule` and `update_from_output` take the time as an argument and are deterministic: the same
    calls in the same order give the same plans.

    kv_cache:  the groups and the number of blocks that the workers agreed on.
    features:  what the workers support beyond plain text; requests for other features are rejected.
    policy:    None: the policy of `config`. One that is not built in is checked at every call.
    connector: the scheduler half of a connector; None: KV stays on the device.
    encoder_connector: the scheduler half of an encoder connector; None: each item is encoded here.
    grammars:  compiles grammars; None: requests with structured output are rejected.
    num_ranks: workers that each report the end of a transfer.
    experts:   reads the experts of tokens, which outputs then have; None: they have not.
    decode: the text of token ids, in which the policy `continuum` looks for the names of tools.
    block_metrics: receives allocation, access and eviction of blocks.
    trace:     records every step; None: no trace.
    capacity: how many blocks requests can hold.
    pins: what the policy `continuum` keeps between the turns of a job; None with other policies.
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
        encoder_connector: EncoderConnector | None = None,
        grammars: GrammarCompiler | None = None,
        num_ranks: int = 1,
        block_metrics: BlockMetrics | None = None,
        experts: RoutedExpertsReader | None = None,
        decode: Decoder | None = None,
        trace: SchedulerTrace | None = None,
    ) -> None:
        config, cache = _fit_settings(config, cache, kv_cache, features, connector)
        policy = load_policy(config.policy) if policy is None else checked(policy)
        self.config = config
        self.capacity = KVCapacity.of_pool(
            kv_cache,
            config.longest_request(cache.context_parallel_size),
            num_leasable_blocks=0 if connector is None else connector.num_leasable_blocks,
            num_lookahead_tokens=config.num_lookahead_tokens,
        )
        blocks = self.kv_cache = KVCacheManager(
            cache,
            kv_cache,
            config.longest_request(cache.context_parallel_size),
            max_num_seqs=config.max_num_seqs,
            hash_seed=hash_seed,
            metrics=block_metrics,
            chunk_blocks=(
                0
                if connector is None or config.kv_role == "kv_consumer"
                else connector.chunk_blocks
            ),
        )
        is_fair = isinstance(policy, FairPolicy)
        if isinstance(policy, FairPolicy):
            num_slots = blocks.num_usable_blocks * cache.block_size
            policy.shares = Shares(config.max_num_seqs, num_slots)
        polls = connector is not None and not connector.names_answers
        running = self.running = RunningTable(
            config.max_num_seqs, config.max_model_len, config.num_speculative_tokens
        )
        waiting = self.waiting = WaitingRequests(
            policy, polled=(SharedEvent.CONNECTOR,) if polls else ()
        )
        in_flight, holds = StepsInFlight(running), Holds(blocks)
        outputs, hooks = ClientOutputs(), Hooks()
        plan = PlanBuilder(
            running,
            blocks,
            hooks,
            epoch=epoch,
            feed_back_tokens=config.feed_back_tokens,
            has_drafts=config.num_speculative_tokens > 0,
            verify_plan=verify_plan,
        )
        self._in_flight, self._holds, self._plan = in_flight, holds, plan
        self._outputs, self._hooks = outputs, hooks
        self._retained = blocks.pool.retained
        self._num_bad_reports = self._sum_in_flight = self._num_steps_reported = 0
        # Since when no request has advanced, if one is waited for; infinite until workers serve.
        self._idle_since_s = math.inf

        tables: dict[str, Any] = dict(
            config=config, running=running, waiting=waiting, holds=holds, kv_cache=blocks
        )
        tables |= dict(in_flight=in_flight, plan=plan, hooks=hooks)
        validator = RequestValidator(
            config,
            vocab_size=vocab_size,
            features=features,
            has_connector=connector is not None,
            has_grammars=grammars is not None,
            has_experts=experts is not None,
            max_encoder_tokens=max_encoder_tokens(kv_cache.groups),
        )
        lifecycle = self._lifecycle = Lifecycle(
            **tables, validator=validator, outputs=outputs, eos_token_ids=eos_token_ids
        )
        gates = AdmissionGates(
            cache,
            kv_cache.num_blocks,
            blocks.num_usable_blocks,
            swaps=config.preemption_mode != "recompute",
            has_shares=is_fair,
        )
        has_whole_inputs = config.max_num_encoder_input_tokens > 0
        budget = TokenBudget(
            config.token_budget, can_shrink=config.enable_chunked_prefill and not has_whole_inputs
        )
        attached = AttachedFeatures(
            **tables, policy=policy, gates=gates, budget=budget, lifecycle=lifecycle
        )
        attached.attach(
            GivenFeatures(
                cache=cache,
                kv_cache=kv_cache,
                vocab_size=vocab_size,
                connector=connector,
                encoder_connector=encoder_connector,
                grammars=grammars,
                num_ranks=num_ranks,
                experts=experts,
                decode=decode,
                trace=trace,
            )
        )
        # For calls that concern one feature.
        self._attached = attached
        self._forks, self._sessions = attached.forks, attached.sessions
        self._recovery = attached.recovery
        self._transfers, self._loads, self.pins = attached.transfers, attached.loads, attached.pins
        self._encoder, self._encoder_connector = attached.encoder, encoder_connector
        self._grammars, self._drafts = attached.grammars, attached.drafts
        self._planner = StepPlanner(
            **tables,
            policy=policy,
            lifecycle=lifecycle,
            admission=Admission(**tables, gates=gates, lifecycle=lifecycle),
            budget=budget,
        )
        self._processor = OutputProcessor(
            running=running,
            in_flight=in_flight,
            hooks=hooks,
            outputs=outputs,
            lifecycle=lifecycle,
            recovery=attached.recovery,
            validator=OutputValidator(running, in_flight, vocab_size),
        )
        self._reasons = WaitingReasons(self._planner, attached.encoder, attached.transfers)
        self._snapshots = BlockSnapshots(kv_cache, blocks, running, holds, hooks)

    # Requests

    def add_request(self, message: AddRequest, *, client: int, now: float) -> None:
        """Queue a request; one that cannot be served is rejected with a reason."""
        self._begin_wait(now)
        if message.fork_of is not None:
            self._hooks.wake(self._forks)
        if message.options.resumable:
            self._hooks.wake(self._sessions)
        self._lifecycle.add(message, client=client, now=now)

    def reject_message(self, malformed: Malformed, reason: str, *, client: int, now: float) -> None:
        """Answer a message that could not be decoded: its request ends."""
        self._lifecycle.reject_message(malformed, reason, client=client, now=now)

    def continue_session(self, client: int, message: ContinueSession, now: float) -> None:
        """Receive input for a session. Unknown handles are ignored: their requests have ended."""
        request = self._lifecycle.get(client, message.handle)
        if request is not None:
            self._begin_wait(now)
            self._sessions.receive(request, message, now)

    def abort_requests(self, client: int, handles: Int32Array, now: float) -> None:
        """Abort these requests. Unknown handles are ignored: their requests have ended."""
        for handle in handles.tolist():
            request = self._lifecycle.get(client, handle)
            if request is not None:
                self._lifecycle.end(request, Outcome(FinishReason.ABORTED), now)

    def release_transfers(self, transfer_ids: Sequence[str]) -> None:
        """No other engine will pull the KV of these transfers. Unknown ids are ignored."""
        if self._transfers is not None and transfer_ids:
            self._transfers.hooks.call(self._transfers.connector.release_transfers, transfer_ids)

    def abort_client(self, client: int, now: float, max_requests: int | None = None) -> int:
        """A client has disconnected: abort its requests, but not more than `max_requests`. Returns
        how many; if they are as many as allowed, others may be left."""
        requests = list(islice(self._lifecycle.of_client(client), max_requests))
        for request in requests:
            self._lifecycle.end(request, Outcome(FinishReason.ABORTED), now)
        if not self._lifecycle.of_client(client):
            for feature in self._hooks.release_kept:
                feature.release_kept(client)
        return len(requests)

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
        self._idle_since_s = min(self._idle_since_s, now)
        if len(self._in_flight.steps) >= self.config.max_steps_in_flight:
            return None
        if now >= self._retained.next_expiry_s:
            self.kv_cache.pool.expire_retained(now)
        for feature in self._hooks.poll:
            feature.poll(now)
        plan = self._planner.plan_step(now)
        for feature in self._hooks.planned:
            feature.planned(plan, now)
        if plan is not None:
            self._sum_in_flight += len(self._in_flight.steps)
            if plan.num_scheduled_tokens:
                self._idle_since_s = now
        return plan

    def take_masks(self) -> list[SampleMask]:
        """Masks of plans with structured output, which workers wait for; to be sent at once."""
        return [] if self._grammars is None else self._grammars.take_masks()

    # An output

    def update_from_output(self, output: ModelRunnerOutput, now: float) -> None:
        """Apply the output of the oldest unanswered plan. If the plan loads KV within the step, the
        output waits until all other ranks have reported their loads.

        An output of another epoch is counted and dropped. Raises InvalidOutput, and nothing has
        changed, if the output does not fit its plan.
        """
        if output.epoch != self._plan.epoch:
            self._processor.num_stale_tokens += len(output.sampled_tokens)
        elif self._transfers is not None and self._transfers.step_loads:
            self._transfers.step_loads.hold(output)
            self._apply_ready(self._transfers, now)
        else:
            self._processor.apply(output, now)

    def _apply_ready(self, transfers: Transfers, now: float) -> None:
        """Apply the outputs whose loads within the step have ended on all ranks."""
        for output in transfers.step_loads.take_ready():
            self._processor.apply(output, now)

    def update_drafts(self, rows: Int32Array, token_ids: Int32Array) -> None:
        """Receive drafts, separately from an output, for the next step of rows that decode. Raises
        InvalidOutput, and nothing has changed, if they are not one token id per row."""
        if self._drafts is not None:
            self._processor.validator.check_drafts(rows, token_ids)
            self._drafts.receive(rows, token_ids)

    def update_from_transfers(self, report: TransferReport, now: float) -> None:
        """Transfers have ended on a rank; unknown and repeated reports are counted and ignored."""
        loads = self._loads
        of_encoder, metadata = self._encoder_connector, report.ec_connector_metadata
        if of_encoder is not None and metadata and report.epoch == self._plan.epoch:
            of_encoder.update_connector_output(report.rank, metadata)
            self.waiting.happened(SharedEvent.ENCODER)
            return
        if report.epoch != self._plan.epoch or loads is None:
            self._num_bad_reports += 1
        elif report.step:
            self._num_bad_reports += not loads.transfers.step_loads.receive(report)
            self._apply_ready(loads.transfers, now)
        else:
            loads.apply(report, now)

    # The whole engine

    @property
    def pause(self) -> PauseState:
        """The pause that `set_pause` has set."""
        return self._planner.pause

    def set_pause(self, state: PauseState, now: float = 0.0) -> None:
        """Set what is scheduled from now on; unanswered plans are not affected."""
        if self._is_kept_by_pause():
            self._start_clock(now)
        self._planner.pause = state

    def lower_demand(self, now: float) -> None:
        """The workers had no memory for a step: later ones get fewer tokens, or the newest request
        ends. Called before `begin_epoch`."""
        self._recovery.lower_demand(self._in_flight.newest_step, now)

    def begin_epoch(self, epoch: int, now: float, *, keeps_kv: bool = False) -> None:
        """All workers are new: rows are free, transfers have failed. Running requests wait again,
        in the order in which they ran. Cached blocks are void; with `keeps_kv` only those that no
        answered plan has computed. The next call of `schedule` is when the workers serve."""
        self._idle_since_s = math.inf
        for feature in self._hooks.begin_epoch:
            feature.begin_epoch(epoch)
        answered_step = self._in_flight.last_answered_step if keeps_kv else None
        self.kv_cache.begin_epoch(self.running.order, answered_step)
        self._lifecycle.begin_epoch(now)
        self._in_flight.reset()
        self._plan.begin_epoch(epoch)
        self._sum_in_flight = self._num_steps_reported = 0

    def shutdown(self) -> None:
        """No hook of the connector is called after this."""
        for feature in self._hooks.release_kept:
            feature.release_kept(None)
        if self._transfers is not None:
            self._transfers.hooks.shutdown()

    # Outputs, events and reports

    def take_outputs(self) -> list[tuple[int, EngineOutputs]]:
        """(client, message) for each client with outputs since the last call."""
        return self._outputs.take()

    def take_kv_events(self) -> list[KVEvent]:
        """Events of blocks cached or evicted, as far as outputs have proven them, and of the
        connector's tiers."""
        events = self.kv_cache.take_events(self._in_flight.last_answered_step)
        if self._transfers is not None:
            events += self._transfers.hooks.call(self._transfers.connector.take_events)
        return events

    def has_unfinished_requests(self) -> bool:
        """Whether some request has not ended."""
        return len(self._lifecycle) > 0

    def is_waited_for(self) -> bool:
        """Whether a request waits for this engine, not for its client as sessions do."""
        return self.running.num_rows > 0 or len(self.waiting) > self._sessions.num_between

    @property
    def has_untried(self) -> bool:
        """Whether the last plan has not tried all waiting requests that it could have, because it
        had tried enough: another one may admit some."""
        return self._planner.admission.has_untried

    def has_finished_requests(self) -> bool:
        """Whether rows were emptied that the workers still hold."""
        return self._plan.has_drops

    def has_pending_work(self) -> bool:
        """Whether a connector has instructions for the workers, which the next plan takes."""
        return self._plan.features_have_work

    def has_transfers(self) -> bool:
        """Whether blocks of this engine are being transferred or held for other engines, or the
        connector has instructions for the workers."""
        return self.num_transfers > 0 or self.has_pending_work()

    @property
    def num_steps_in_flight(self) -> int:
        """Plans not answered yet."""
        return len(self._in_flight.steps)

    @property
    def epoch(self) -> int:
        """The epoch of the next plan."""
        return self._plan.epoch

    @property
    def num_steps(self) -> int:
        """Plans built in this epoch."""
        return self._plan.step

    @property
    def num_transfer_operations(self) -> int:
        """Transfers that ranks have reported."""
        return 0 if self._transfers is None else self._transfers.statistics.num_operations

    @property
    def num_transfers(self) -> int:
        """Transfers under way, and holds of the connector."""
        return 0 if self._transfers is None else len(self._transfers)

    def get_request_counts(self) -> tuple[int, int]:
        """Numbers of running and of waiting requests."""
        return self.running.num_rows, len(self.waiting)

    def reset_prefix_cache(self, now: float = 0.0, *, reset_running_requests: bool = False) -> bool:
        """Release all pins and uncache all prefixes; False while any block is held.

        reset_running_requests: take the blocks of running requests, which are preempted at `now`,
                and of waiting ones. All of them recompute their KV. False, and nothing has changed,
                while transfers own blocks; only their end releases those.
        """
        if reset_running_requests:
            if self.num_transfers:
                return False
            for request in reversed(self.running.requests_in_order()):
                self._lifecycle.preempt(request, now)
            self._holds.release_all()
        for feature in self._hooks.release_kept:
            feature.release_kept(None)
        return self.kv_cache.reset_prefix_cache()

    def reset_encoder_cache(self) -> bool:
        """Drop all encoder outputs; False while a request needs one."""
        return self._encoder is None or self._encoder.reset()

    def reset_connector_cache(self) -> bool:
        """Make the connector drop its stored KV. False if it cannot, or if there is none."""
        transfers = self._transfers
        return transfers is not None and transfers.hooks.call(transfers.connector.reset_cache)

    def check(self) -> None:
        """Raise LongshoreError unless every block is accounted for and every count is what a
        recount gives. For tests and idle times."""
        self.running.check()
        self._lifecycle.check()
        waiting, running = list(self.waiting), self.running.requests_in_order()
        self._holds.check(waiting)
        owners = [request.hold.blocks for request in self._holds if request.hold is not None]
        for feature in self._hooks.check:
            feature.check(running, waiting)
        for feature in self._hooks.owners:
            owners += [blocks for _, _, blocks in feature.owners()]
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
            steps_in_flight=len(self._in_flight.steps),
            idle_s=self.idle_s(now),
            pause=self._planner.pause.value,
            waiting=self._reasons.describe(now, MAX_REPORTED),
            num_pins=0 if self.pins is None else len(self.pins),
            num_pinned_blocks=self.kv_cache.num_yieldable,
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
        """Seconds for which no request has advanced although some wait. Time in which a pause
        keeps all of them, or the workers are replaced or asleep, does not count."""
        if self._is_kept_by_pause() or not self.is_waited_for():
            return 0.0
        return max(now - self._idle_since_s, 0.0)

    def _begin_wait(self, now: float) -> None:
        """A request may be the first one that is waited for."""
        if not self.is_waited_for():
            self._start_clock(now)

    def _start_clock(self, now: float) -> None:
        """Time before now does not count in `idle_s`."""
        if self._idle_since_s < math.inf:
            self._idle_since_s = max(self._idle_since_s, now)

    def _is_kept_by_pause(self) -> bool:
        if self.pause is PauseState.PAUSED_ALL:
            return not self.num_steps_in_flight
        return self.pause is PauseState.PAUSED_NEW and not self.running.num_rows

    def make_stats(
        self, num_bad_messages: int = 0, workers: tuple[WorkerStats, ...] = ()
    ) -> SchedulerStats:
        """The current state; the mean of steps in flight is since the previous call."""
        num_steps = self._plan.step - self._num_steps_reported
        steps_in_flight = self._sum_in_flight / num_steps if num_steps else 0.0
        self._num_steps_reported, self._sum_in_flight = self._plan.step, 0
        num_running, num_waiting = self.get_request_counts()
        prefixes = self.kv_cache.stats
        num_bad_messages += self._num_bad_reports
        if self._transfers is not None:
            num_bad_messages += self._transfers.num_bad_reports
        of_features: dict[str, Any] = {}
        for feature in self._hooks.counts:
            of_features |= feature.counts()
        return SchedulerStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_blocks=self.kv_cache.num_blocks,
            num_free_blocks=self.kv_cache.num_free_blocks,
            kv_usage=self.kv_cache.usage,
            steps_in_flight=steps_in_flight,
            num_steps=self._plan.step,
            num_preemptions=self._lifecycle.num_preemptions,
            num_prompt_tokens=prefixes.num_prompt_tokens,
            num_prefix_queried_tokens=prefixes.num_queried_tokens,
            num_prefix_hit_tokens=prefixes.num_hit_tokens,
            num_preempted_queried_tokens=prefixes.num_preempted_queried_tokens,
            num_preempted_hit_tokens=prefixes.num_preempted_hit_tokens,
            num_stale_tokens=self._processor.num_stale_tokens,
            num_bad_messages=num_bad_messages,
            num_rewinds=self._recovery.num_rewinds,
            tenants=self._lifecycle.count_by_tenant(),
            workers=workers,
            **of_features,
        )


def _fit_settings(
    config: SchedulerConfig,
    cache: CacheConfig,
    kv_cache: KVCacheConfig,
    features: frozenset[Feature],
    connector: SchedulerConnector | None,
) -> tuple[SchedulerConfig, CacheConfig]:
    """The settings without those that this model cannot have. Raises ConfigError for settings that
    cannot work with each other or with this model."""
    longest = config.longest_request(cache.context_parallel_size)
    check_holds_one_request(kv_cache.groups, kv_cache.num_blocks, longest)
    check_states(config, [group.spec for group in kv_cache.groups])
    check_encoder(config, kv_cache, has_connector=connector is not None)
    check_swaps(config, cache, connector)
    is_bidirectional = Feature.BIDIRECTIONAL in features
    if is_bidirectional and connector is not None:
        raise ConfigError(
            "the tokens of this model attend to later ones, so its KV cannot be reused. "
            "Remove kv_connector"
        )
    if is_bidirectional:
        config = dataclasses.replace(config, enable_chunked_prefill=False)
    if is_bidirectional or max_encoder_tokens(kv_cache.groups) is not None:
        # Equal tokens need not have equal KV.
        cache = dataclasses.replace(cache, enable_prefix_caching=False)
    return config, cache
