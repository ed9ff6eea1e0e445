"""The worker's loop: receives plans and sends their outputs, in order.

Every rank of an engine receives every plan. Only the sampling rank sends outputs; the others send
failures. All ranks send step statistics about once a second, and report ended transfers.

The loop computes nothing. It sleeps until a plan arrives, the compute thread has an output or a
transfer has ended, so it prepares the next plan while the previous one still runs.
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, assert_never

import zmq

from longshore.protocol.errors import EngineDead, PlanMismatch
from longshore.protocol.handshake import Rejected, WorkerAccepted
from longshore.protocol.outputs import (
    ModelRunnerOutput,
    TransferReport,
    WorkerFailed,
    WorkerReport,
)
from longshore.protocol.plan import BeginSleep, EndSleep, SampleMask, SchedulerOutput, Shutdown
from longshore.protocol.transport.channel import has_input
from longshore.protocol.transport.lifeline import ALIVE_INTERVAL_S
from longshore.worker.errors import OutOfMemory, RankLost
from longshore.worker.process.device import is_out_of_memory
from longshore.worker.process.host_resources import resident_bytes
from longshore.worker.process.row_log import RowLog
from longshore.worker.process.scheduler_link import SchedulerLink, SchedulerLost
from longshore.worker.process.step_statistics import StepStatistics
from longshore.worker.ranks.last_plans import LastPlans
from longshore.worker.step.model_runner import ModelRunner
from longshore.worker.transfer.connector import ConnectorRunner, HookFailed
from longshore.worker.transfer.encoder import EncoderRunner

logger = logging.getLogger(__name__)

TOKENS_PER_TIMEOUT: Final = 1024
"""Tokens of a step for which it may take another `step_timeout_s`."""

RANK_POLL_S: Final = 0.005
"""How often a rank looks for the plans of the others, when the scheduler has died."""


class Bell:
    """Wakes the loop from other threads."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        """May be called on any thread."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Called by the loop when the bell is readable."""
        os.eventfd_read(self._fd)


class WorkerEngine:
    """Executes one scheduler's plans until it sends Shutdown or BeginSleep.

    bell:    rung by the connector when transfers have ended.
    sends_outputs: this is the sampling rank; other ranks send failures, statistics and transfers.
    connectors: the worker halves of the connectors.
    last_plans: shares plans with the engine's other ranks, if any.
    device_bytes:  returns the bytes of GPU memory that this rank has reserved.
    report_alive:  called regularly, with what is late.
    step_timeout_s: see EngineOptions.
    """

    def __init__(
        self,
        link: SchedulerLink,
        runner: ModelRunner,
        *,
        epoch: int,
        rank: int,
        bell: Bell | None = None,
        sends_outputs: bool = True,
        connectors: Sequence[ConnectorRunner | EncoderRunner] = (),
        last_plans: LastPlans | None = None,
        device_bytes: Callable[[], int] = lambda: 0,
        report_alive: Callable[[str | None], None] = lambda late: None,
        step_timeout_s: float = math.inf,
    ) -> None:
        self._link = link
        self._channel = link.channel
        self._runner = runner
        self._epoch = epoch
        self._rank = rank
        self._sends_outputs = sends_outputs
        self._device_bytes = device_bytes
        self._report_alive = report_alive
        self._step_timeout_s = step_timeout_s
        self._first_since_s = 0.0  # since when the oldest unanswered plan is the oldest
        self._statistics = StepStatistics(epoch=epoch, rank=rank)
        self._connectors = connectors
        intervals = [connector.poll_interval_s for connector in connectors]
        self._poll_interval_s = min((each for each in intervals if each is not None), default=None)
        self._last_plans = last_plans
        self._unanswered: deque[SchedulerOutput] = deque()
        self._is_stopping = self._is_to_sleep = False
        self._row_log = RowLog()
        # The compute thread appends a report and wakes the loop; only the loop uses the channel.
        self._reports: deque[WorkerReport] = deque()
        self._bell = bell or Bell()

    def run(self) -> bool:
        """Run until Shutdown or BeginSleep has arrived and every plan received before it is
        answered. Returns whether it was BeginSleep.

        Raises PlanMismatch, HookFailed or EngineDead if this worker cannot continue, after it has
        sent the reason to the scheduler, and SchedulerLost if that has died. Then all ranks have
        computed the same plans.
        """
        poller = zmq.Poller()
        poller.register(self._channel.socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        poller.register(self._link.monitor, zmq.POLLIN)
        self._report_alive(None)  # before the first hook of a connector, which may hang
        try:
            while not self._is_stopping or self._unanswered:
                due_s = self._statistics.due_in_s(time.monotonic())
                if due_s == 0:
                    self._send_statistics()
                events = dict(poller.poll(self._poll_ms(due_s)))
                if self._bell.fileno() in events:
                    self._bell.clear()
                self._send_reports()
                self._take_messages()
                if events or self._asks_regularly:
                    self._send_transfers()
                self._report_alive(self._late())
                if self._link.monitor in events and self._has_read_all:
                    if not self._is_stopping:
                        self._finish_plans()
                        raise SchedulerLost
                    poller.unregister(self._link.monitor)
        except (EngineDead, SchedulerLost):
            raise  # the failed step's report has already been sent
        except (PlanMismatch, HookFailed) as error:
            self._channel.send(WorkerFailed(self._epoch, self._rank, str(error)))
            raise
        except Exception as error:
            reason = f"internal error: {type(error).__name__}: {error}"
            self._channel.send(WorkerFailed(self._epoch, self._rank, reason))
            if is_out_of_memory(error):
                raise OutOfMemory(reason) from error
            raise
        return self._is_to_sleep

    @property
    def _asks_regularly(self) -> bool:
        """Whether a connector does not ring the bell for everything that ends."""
        return self._poll_interval_s is not None

    @property
    def _has_read_all(self) -> bool:
        """No plan waits in the socket, which is read in parts."""
        return self._is_stopping or not has_input(self._channel.socket)

    def _poll_ms(self, due_s: float | None) -> int:
        """How long to sleep: until this process must report to be alive, the statistics are due or
        the connector must be asked."""
        waits_s = [ALIVE_INTERVAL_S]
        if due_s:
            waits_s.append(due_s)
        if self._poll_interval_s is not None:
            waits_s.append(self._poll_interval_s)
        return math.ceil(min(waits_s) * 1e3)

    def _late(self) -> str | None:
        """The step under way, if it takes longer than it may."""
        if not self._unanswered:
            return None
        plan, taken_s = self._unanswered[0], time.monotonic() - self._first_since_s
        limit_s = self._step_timeout_s * (1 + plan.num_scheduled_tokens / TOKENS_PER_TIMEOUT)
        if taken_s <= limit_s:
            return None
        cause = ""
        if self._runner.step_without_mask == plan.step:
            cause = "; it waits for its token mask (structured output) from the scheduler"
        return (
            f"step {plan.step} with {plan.num_scheduled_tokens} tokens has taken {taken_s:.0f} s, "
            f"more than {limit_s:.0f} s (--step-timeout-s={self._step_timeout_s:g}){cause}"
        )

    def _take_messages(self) -> None:
        for message in self._channel.drain():
            match message:
                case SchedulerOutput():
                    self._submit(message)
                case Shutdown(reason=reason):
                    logger.info("shutdown requested by the scheduler: %s", reason)
                    self._is_stopping = True
                    self._runner.stop_masking()  # no message of this scheduler is read any more
                    return
                case BeginSleep():
                    self._is_stopping = self._is_to_sleep = True
                    return
                case SampleMask():
                    self._runner.add_mask(message)
                case WorkerAccepted() | Rejected() | EndSleep():
                    raise PlanMismatch(
                        f"received a second {type(message).__name__} instead of a plan"
                    )
                case _:
                    assert_never(message)
            self._send_reports()

    def _submit(self, plan: SchedulerOutput) -> None:
        if self._runner.submit(plan, self._on_report) is None:
            return
        if not self._unanswered:
            self._first_since_s = time.monotonic()
        self._unanswered.append(plan)
        if self._last_plans is not None:
            self._last_plans.add(plan)
        self._row_log.log_plan(plan)

    def _finish_plans(self) -> None:
        """The scheduler has died: compute what any rank has received, and send nothing, because it
        would reach the next scheduler."""
        self._link.disconnect()
        self._runner.stop_masking()
        if self._last_plans is not None:
            self._last_plans.publish()
        missed: list[SchedulerOutput] | None = None if self._last_plans is not None else []
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        while missed is None or self._unanswered:
            interval_s = RANK_POLL_S if missed is None else ALIVE_INTERVAL_S
            if poller.poll(math.ceil(interval_s * 1e3)):
                self._bell.clear()
            while self._reports:
                self._take_report()
            if missed is None and self._last_plans is not None:
                missed = self._last_plans.missed()
                for plan in missed or ():
                    self._submit(plan)
            self._report_alive(self._late())

    def _on_report(self, report: WorkerReport) -> None:
        self._reports.append(report)
        self._bell.ring()

    def _take_report(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """The next answered plan, and its output. Raises RankLost or EngineDead if the step has
        failed."""
        report = self._reports.popleft()
        plan = self._unanswered.popleft()
        self._first_since_s = time.monotonic()
        if isinstance(report, WorkerFailed):
            raise _error_of(report)
        return plan, report

    def _send_reports(self) -> None:
        while self._reports:
            if isinstance(first := self._reports[0], WorkerFailed):
                self._channel.send(first)
            plan, report = self._take_report()
            if self._sends_outputs:
                self._channel.send(report)
            elif plan.has_loads:
                failed = report.failed_block_ids
                self._channel.send(
                    TransferReport(self._epoch, self._rank, plan.step, failed_block_ids=failed)
                )
            self._statistics.count(
                report.compute_s, plan.num_scheduled_tokens, time.monotonic(), report.gap_s
            )

    def _send_transfers(self) -> None:
        for connector in self._connectors:
            report = connector.take_report()
            if report is not None:
                self._channel.send(report)

    def _send_statistics(self) -> None:
        self._channel.send(
            self._statistics.take(
                resident_bytes=resident_bytes(), device_bytes=self._device_bytes()
            )
        )


def _error_of(report: WorkerFailed) -> EngineDead:
    if report.is_consequence:
        return RankLost(report.reason)
    return (OutOfMemory if report.is_out_of_memory else EngineDead)(report.reason)
