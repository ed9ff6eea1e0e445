"""The scheduler trace: what the scheduler sees and decides in each step, for research.

`SchedulerTrace` turns events of the scheduler into records (`trace_records`) and hands their bytes
to a sink, once per step and once per event between steps. It contains no tokens. A failure ends the
trace and never affects the scheduling.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import msgspec
import numpy as np

from longshore.connectors.base import AskLater, FinishAction, Matched, SchedulerConnector
from longshore.protocol.arrays import Int64Array
from longshore.protocol.outputs import FinishReason, ModelRunnerOutput
from longshore.protocol.plan import SchedulerOutput
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.features.loads import Loads
from longshore.scheduler.features.pins import Pins
from longshore.scheduler.hooks import Attempt, SchedulerFeature
from longshore.scheduler.inspect.trace_records import (
    NO_PINS,
    TRACE_FORMAT,
    BlockCounts,
    PinCounts,
    PrefixCacheEvent,
    RequestFinished,
    RequestQueued,
    StepDecision,
    StepLimits,
    StepOutput,
    StepSnapshot,
    TraceBegin,
)
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.queue.queues import WaitingRequests
from longshore.scheduler.request import Outcome, Request, RequestStatus
from longshore.scheduler.step.in_flight import PlannedStep, StepsInFlight
from longshore.scheduler.step.plan_builder import PlanBuilder
from longshore.scheduler.step.running import RunningTable
from longshore.scheduler.step.token_budget import TokenBudget

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")


def _harmless(
    method: Callable[Concatenate["SchedulerTrace", Arguments], None],
) -> Callable[Concatenate["SchedulerTrace", Arguments], None]:
    """After an exception in the method, the trace is over and the scheduler goes on."""

    @wraps(method)
    def guarded(
        trace: "SchedulerTrace", /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> None:
        if trace.is_over:
            return
        try:
            method(trace, *args, **kwargs)
        except Exception as error:
            trace.is_over = True
            is_expected = isinstance(error, OSError)  # the disk is full, or a pipe is closed
            logger.warning(
                "the scheduler trace ends here, and scheduling goes on: %s",
                error,
                exc_info=None if is_expected else error,
            )

    return guarded


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The tables of a scheduler that its trace reads."""

    config: SchedulerConfig
    running: RunningTable
    waiting: WaitingRequests
    kv_cache: KVCacheManager
    in_flight: StepsInFlight
    plan: PlanBuilder
    budget: TokenBudget
    pins: Pins | None
    loads: Loads | None
    connector: SchedulerConnector | None


class SchedulerTrace(SchedulerFeature):
    """Writes the trace of one scheduler.

    sink:   gets whole lines, for example the `write` of a binary file. It should not block.
    engine: the engine's id.
    unix_time_offset_s: added to the scheduler's time, it gives Unix time; None if that is virtual.

    is_over: the sink or a record has failed; nothing more is written.
    """

    def __init__(
        self,
        sink: Callable[[bytes], object],
        *,
        engine: str = "engine-0",
        unix_time_offset_s: float | None = None,
    ) -> None:
        self._sink = sink
        self._engine = engine
        self._unix_time_offset_s = unix_time_offset_s
        self._encode = msgspec.json.Encoder().encode
        self._tables: Traced
        self.is_over = False
        self._snapshot: StepSnapshot | None = None  # during a step
        self._lookups: dict[str, PrefixCacheEvent] = {}  # of this step, by request
        self._lines: list[bytes] = []  # other records of this step
        self._preempted: list[str] = []
        self._tokens = _RunningTokens()

    @_harmless
    def start(self, tables: Traced) -> None:
        """The first record. Called once, before all other methods."""
        self._tables = tables
        self._add(
            TraceBegin(
                format=TRACE_FORMAT,
                engine=self._engine,
                policy=tables.config.policy,
                block_size=tables.kv_cache.block_sizes[0],
                max_num_seqs=tables.config.max_num_seqs,
                max_steps_in_flight=tables.config.max_steps_in_flight,
                unix_time_offset_s=self._unix_time_offset_s,
            )
        )

    # A step

    @_harmless
    def poll(self, now: float) -> None:
        """The planner is about to be called."""
        tables = self._tables
        pool, config = tables.kv_cache.pool, tables.config
        self._lookups = {}
        self._snapshot = StepSnapshot(
            epoch=tables.plan.epoch,
            step=tables.plan.step + 1,
            now=now,
            running=tables.running.num_rows,
            waiting=len(tables.waiting),
            in_flight=len(tables.in_flight.steps),
            gpu=BlockCounts(pool.num_free, pool.num_usable, pool.num_cached),
            cpu=_host_blocks(tables.connector),
            pins=_pins(tables.pins),
            limits=StepLimits(config.max_num_seqs, tables.budget.num_tokens),
        )

    @_harmless
    def planned(self, plan: SchedulerOutput | None, now: float) -> None:
        """The records of the step. If there is nothing to plan, the next attempt has the same step
        number, and this one leaves no record."""
        snapshot, self._snapshot = self._snapshot, None
        lines, self._lines = self._lines, []
        if plan is not None and snapshot is not None:
            lines = [
                self._encode(snapshot),
                *map(self._encode, self._lookups.values()),
                *lines,
                self._encode(self._decision(plan, now)),
            ]
            self._preempted = []
        if lines:
            self._sink(b"\n".join(lines) + b"\n")

    def _decision(self, plan: SchedulerOutput, now: float) -> StepDecision:
        running = self._tables.running
        num_scheduled = self._tables.in_flight.steps[-1].num_scheduled
        new: dict[str, int] = {}
        resumed: dict[str, int] = {}
        for start in plan.added:
            tokens = int(num_scheduled[start.row])
            (resumed if start.resumed else new)[start.request_id] = tokens
        num_prefill, prefilled = 0, []
        if new or resumed or not self._tokens.are_same(running, num_scheduled):
            # A row past what was known when it was admitted decodes.
            num_left = running.num_known - running.num_computed + num_scheduled
            num_prefill = int(np.clip(num_left, 0, num_scheduled).sum())
            is_prefilled = (num_left > 0) & (num_left <= num_scheduled)
            prefilled = _ids(running, is_prefilled.nonzero()[0])
        return StepDecision(
            epoch=plan.epoch,
            step=plan.step,
            now=now,
            new=new,
            resumed=resumed,
            running=self._tokens.encoded(running, num_scheduled, new.keys() | resumed.keys()),
            preempted=self._preempted,
            tokens=plan.num_scheduled_tokens,
            prefill_tokens=num_prefill,
            prefilled=prefilled,
        )

    # Events

    @_harmless
    def tried(self, request: Request, num_local: int, result: Attempt) -> None:
        """The request was looked up, in the step that is being planned."""
        snapshot, tables = self._snapshot, self._tables
        assert snapshot is not None
        match = None if tables.loads is None else tables.loads.last_match(request, num_local)
        num_external, is_async = None if isinstance(match, AskLater) else 0, False
        if isinstance(match, Matched):
            num_external = min(match.num_tokens, len(request.token_ids) - num_local)
            is_async = match.is_async
        connector = tables.connector
        self._lookups[request.request_id] = PrefixCacheEvent(
            epoch=snapshot.epoch,
            step=snapshot.step,
            now=snapshot.now,
            request=request.request_id,
            job=request.options.job_id,
            local_hit_tokens=num_local,
            external_hit_tokens=num_external,
            prompt_tokens=request.num_prompt_tokens,
            total_tokens=len(request.token_ids),
            connector=None if connector is None else type(connector).__name__,
            is_async=is_async,
            result=result.name.lower(),
        )

    def arrived(self, request: Request, now: float) -> None:
        """A request was queued."""
        self._queued(request, now)

    def continued(self, request: Request, now: float) -> None:
        """The next input of a session was queued."""
        self._queued(request, now)

    @_harmless
    def _queued(self, request: Request, now: float) -> None:
        self._add(
            RequestQueued(
                now=now,
                request=request.request_id,
                job=request.options.job_id,
                arrival=request.arrival_time,
                prompt_tokens=request.num_prompt_tokens,
                max_total_tokens=request.max_total_tokens,
            )
        )

    @_harmless
    def vacated(self, request: Request, blocks: HeldBlocks | None) -> None:
        """If it is preempted, the next decision says so."""
        if request.status is RequestStatus.PREEMPTED:
            self._preempted.append(request.request_id)

    @_harmless
    def received(self, output: ModelRunnerOutput, planned: PlannedStep, now: float) -> None:
        """The output of a step is valid, and about to be applied."""
        num_sampled = len(output.sampled_tokens)
        record = StepOutput(
            epoch=output.epoch, step=planned.step, now=now, sampled_tokens=num_sampled
        )
        self._add(record)

    def ended(
        self, request: Request, blocks: HeldBlocks | None, outcome: Outcome, now: float
    ) -> FinishAction | None:
        """A request has ended."""
        self._finished(request, outcome.reason, now, continues=False)
        return None

    def paused(self, request: Request, outcome: Outcome, now: float) -> None:
        """The output of a session that goes on has ended."""
        self._finished(request, outcome.reason, now, continues=True)

    @_harmless
    def _finished(
        self, request: Request, reason: FinishReason, now: float, *, continues: bool
    ) -> None:
        self._add(
            RequestFinished(
                now=now,
                request=request.request_id,
                job=request.options.job_id,
                reason=reason.name.lower(),
                prompt_tokens=request.num_prompt_tokens,
                output_tokens=request.num_output_tokens,
                cached_tokens=max(request.num_cached_tokens, 0),
                preemptions=request.num_preemptions,
                continues=continues,
            )
        )

    def _add(self, record: msgspec.Struct) -> None:
        """Write a record now, or with those of the step that is being planned."""
        line = self._encode(record)
        if self._snapshot is not None:
            self._lines.append(line)
        else:
            self._sink(line + b"\n")


class _RunningTokens:
    """The `running` of decisions. In steady decode it stays the same and is encoded once."""

    def __init__(self) -> None:
        self._num_scheduled: Int64Array | None = None
        self._version = -1
        self._encoded = msgspec.Raw()

    def are_same(self, running: RunningTable, num_scheduled: Int64Array) -> bool:
        """Whether this step has the array of the last one, so it is a steady decode: see
        `SteadyDecode`."""
        return num_scheduled is self._num_scheduled and running.version == self._version

    def encoded(self, running: RunningTable, num_scheduled: Int64Array, added: set[str]) -> Any:
        """JSON of the tokens per request, without the `added` ones."""
        if not added and self.are_same(running, num_scheduled):
            return self._encoded
        rows = running.order[num_scheduled[running.order] > 0]
        counts = dict(zip(_ids(running, rows), num_scheduled[rows].tolist(), strict=True))
        for request_id in added:
            counts.pop(request_id, None)
        encoded = msgspec.Raw(msgspec.json.encode(counts))
        if not added:
            self._num_scheduled, self._version = num_scheduled, running.version
            self._encoded = encoded
        return encoded


def _ids(running: RunningTable, rows: Int64Array) -> list[str]:
    return [running.request_on(row).request_id for row in rows.tolist()]


def _pins(pins: Pins | None) -> PinCounts:
    return NO_PINS if pins is None else PinCounts(len(pins), pins.num_blocks, tuple(pins.job_ids))


def _host_blocks(connector: SchedulerConnector | None) -> BlockCounts:
    """Offloaded blocks in host memory. Not called as a hook: that would let the planner expect work
    of the connector."""
    total = cached = 0
    if connector is not None:
        for tier in connector.get_kv_connector_stats().tiers:
            if tier.medium == "CPU":
                total += tier.capacity_blocks
                cached += tier.num_blocks
    return BlockCounts(max(total - cached, 0), total, cached)
