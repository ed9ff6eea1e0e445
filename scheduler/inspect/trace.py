"""The scheduler trace: what the scheduler sees and decides in each step, for research.

`SchedulerTrace` turns events of the scheduler into records (`trace_records`) and hands their bytes
to a sink, once per step and once per event between steps. It contains no tokens. A failure ends the
trace and never affects the scheduling.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import msgspec
import numpy as np

from longshore.connectors.base import Match, Matched, SchedulerConnector
from longshore.protocol.arrays import Int64Array
from longshore.protocol.outputs import FinishReason
from longshore.protocol.plan import SchedulerOutput
from longshore.scheduler.features.pins import Pins
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
from longshore.scheduler.request import Request
from longshore.scheduler.step.running import RunningTable

if TYPE_CHECKING:  # all parts of a scheduler refer to its trace
    from longshore.scheduler.step.planner import StepPlanner

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


class SchedulerTrace:
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
        self._planner: StepPlanner
        self._connector: SchedulerConnector | None = None
        self.is_over = False
        self._snapshot: StepSnapshot | None = None  # during a step
        self._lookups: dict[str, PrefixCacheEvent] = {}  # of this step, by request
        self._lines: list[bytes] = []  # other records of this step
        self._preempted: list[str] = []
        self._running = _RunningTokens()

    @_harmless
    def begin(self, planner: "StepPlanner") -> None:
        """The first record. Called once, before all other methods."""
        self._planner = planner
        if planner.transfers is not None:
            self._connector = planner.transfers.connector
        self._add(
            TraceBegin(
                format=TRACE_FORMAT,
                engine=self._engine,
                policy=planner.config.policy,
                block_size=planner.kv_cache.block_sizes[0],
                max_num_seqs=planner.config.max_num_seqs,
                max_steps_in_flight=planner.config.max_steps_in_flight,
                unix_time_offset_s=self._unix_time_offset_s,
            )
        )

    # A step

    @_harmless
    def begin_step(self, now: float) -> None:
        """The planner is about to be called."""
        planner = self._planner
        pool, config = planner.kv_cache.pool, planner.config
        self._lookups = {}
        self._snapshot = StepSnapshot(
            epoch=planner.plan.epoch,
            step=planner.plan.step + 1,
            now=now,
            running=planner.running.num_rows,
            waiting=len(planner.waiting),
            in_flight=len(planner.in_flight.steps),
            gpu=BlockCounts(pool.num_free, pool.num_usable, pool.num_cached),
            cpu=_host_blocks(self._connector),
            pins=_pins(planner.pins),
            limits=StepLimits(config.max_num_seqs, planner.budget.num_tokens),
        )

    @_harmless
    def end_step(self, plan: SchedulerOutput | None, now: float) -> None:
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
        running = self._planner.running
        num_scheduled = self._planner.in_flight.steps[-1].num_scheduled
        new: dict[str, int] = {}
        resumed: dict[str, int] = {}
        for start in plan.added:
            tokens = int(num_scheduled[start.row])
            (resumed if start.resumed else new)[start.request_id] = tokens
        num_prefill, prefilled = 0, []
        if new or resumed or not self._running.are_same(running, num_scheduled):
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
            running=self._running.encoded(running, num_scheduled, new.keys() | resumed.keys()),
            preempted=self._preempted,
            tokens=plan.num_scheduled_tokens,
            prefill_tokens=num_prefill,
            prefilled=prefilled,
        )

    # Events

    @_harmless
    def looked_up(self, request: Request, num_local: int) -> None:
        """The request was looked up in the prefix cache, in the step that is being planned."""
        snapshot = self._snapshot
        assert snapshot is not None
        self._lookups[request.request_id] = PrefixCacheEvent(
            epoch=snapshot.epoch,
            step=snapshot.step,
            now=snapshot.now,
            request=request.request_id,
            job=request.job_id,
            local_hit_tokens=num_local,
            external_hit_tokens=0,
            prompt_tokens=request.num_prompt_tokens,
            total_tokens=len(request.token_ids),
            connector=None if self._connector is None else type(self._connector).__name__,
            is_async=False,
        )

    @_harmless
    def asked_connector(self, request: Request, match: Match) -> None:
        """Likewise in the connector, with this answer."""
        event = self._lookups[request.request_id]
        num_tokens, is_async = None, False
        if isinstance(match, Matched):
            num_tokens = min(match.num_tokens, event.total_tokens - event.local_hit_tokens)
            is_async = match.is_async
        self._lookups[request.request_id] = msgspec.structs.replace(
            event, external_hit_tokens=num_tokens, is_async=is_async
        )

    @_harmless
    def tried(self, request: Request, result: str) -> None:
        """The request was tried, and looked up unless it has its blocks or cannot run yet."""
        event = self._lookups.get(request.request_id)
        if event is not None:
            self._lookups[request.request_id] = msgspec.structs.replace(event, result=result)

    @_harmless
    def queued(self, request: Request, now: float) -> None:
        """A request, or the next input of a session, was queued."""
        self._add(
            RequestQueued(
                now=now,
                request=request.request_id,
                job=request.job_id,
                arrival=request.arrival_time,
                prompt_tokens=request.num_prompt_tokens,
                max_total_tokens=request.max_total_tokens,
            )
        )

    @_harmless
    def preempted(self, request: Request) -> None:
        """The next decision says so."""
        self._preempted.append(request.request_id)

    @_harmless
    def answered(self, epoch: int, step: int, num_sampled: int, now: float) -> None:
        """The output of a step is valid, and about to be applied."""
        self._add(StepOutput(epoch=epoch, step=step, now=now, sampled_tokens=num_sampled))

    @_harmless
    def ended(
        self, request: Request, reason: FinishReason, now: float, *, continues: bool = False
    ) -> None:
        """A request, or the output of a session that continues, has ended."""
        self._add(
            RequestFinished(
                now=now,
                request=request.request_id,
                job=request.job_id,
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
