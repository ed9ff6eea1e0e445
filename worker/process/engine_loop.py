"""The worker's loop: receives plans and sends their outputs, in order.

Every rank of an engine receives every plan. Only the sampling rank sends outputs; the others send
failures. All ranks send step statistics about once a second.

The loop computes nothing. It sleeps until a plan arrives or the compute thread has an output, so
it prepares the next plan while the previous one still runs.
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from typing import assert_never

import zmq

from longshore.protocol.errors import EngineDead, PlanMismatch
from longshore.protocol.handshake import FromWorker, Rejected, ToWorker, WorkerAccepted
from longshore.protocol.outputs import WorkerFailed, WorkerReport
from longshore.protocol.plan import SampleMask, SchedulerOutput, Shutdown
from longshore.protocol.transport.channel import Channel
from longshore.worker.errors import RankLost
from longshore.worker.process.host_resources import resident_bytes
from longshore.worker.process.row_log import RowLog
from longshore.worker.process.step_statistics import StepStatistics
from longshore.worker.step.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class WorkerEngine:
    """Executes one scheduler's plans until it sends Shutdown.

    sends_outputs: this is the sampling rank; other ranks send failures and statistics only.
    device_bytes:  returns the bytes of GPU memory that this rank has reserved.
    """

    def __init__(
        self,
        channel: Channel[FromWorker, ToWorker],
        runner: ModelRunner,
        *,
        epoch: int,
        rank: int,
        sends_outputs: bool = True,
        device_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._channel = channel
        self._runner = runner
        self._epoch = epoch
        self._rank = rank
        self._sends_outputs = sends_outputs
        self._device_bytes = device_bytes
        self._statistics = StepStatistics(epoch=epoch, rank=rank)
        self._unanswered: deque[int] = deque()  # tokens of each plan
        self._is_stopping = False
        self._row_log = RowLog()
        # The compute thread appends a report and wakes the loop; only the loop uses the channel.
        self._reports: deque[WorkerReport] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def run(self) -> None:
        """Run until Shutdown has arrived and every plan received before it is answered.

        Raises PlanMismatch or EngineDead if this worker cannot continue, after it has sent the
        reason to the scheduler.
        """
        poller = zmq.Poller()
        poller.register(self._channel.socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        try:
            while not self._is_stopping or self._unanswered:
                due_s = self._statistics.due_in_s(time.monotonic())
                if due_s == 0:
                    self._send_statistics()
                for ready, _ in poller.poll(math.ceil(due_s * 1e3) if due_s else None):
                    if ready == self._bell:
                        os.eventfd_read(self._bell)
                self._send_reports()
                self._take_messages()
        except EngineDead:
            raise  # the failed step's report has already been sent
        except PlanMismatch as error:
            self._channel.send(WorkerFailed(self._epoch, self._rank, str(error)))
            raise
        except Exception as error:
            reason = f"internal error: {type(error).__name__}: {error}"
            self._channel.send(WorkerFailed(self._epoch, self._rank, reason))
            raise

    def _take_messages(self) -> None:
        for message in self._channel.drain():
            match message:
                case SchedulerOutput():
                    if self._runner.submit(message, self._on_report) is not None:
                        self._unanswered.append(message.num_scheduled_tokens)
                        self._row_log.log_plan(message)
                case Shutdown(reason=reason):
                    logger.info("shutdown requested by the scheduler: %s", reason)
                    self._is_stopping = True
                    return
                case SampleMask(step=step):
                    raise PlanMismatch(
                        f"received a token mask for step {step}, but this worker does not support "
                        "structured output; switch it off in the scheduler"
                    )
                case WorkerAccepted() | Rejected():
                    raise PlanMismatch(
                        f"received a second {type(message).__name__} instead of a plan"
                    )
                case _:
                    assert_never(message)
            self._send_reports()

    def _on_report(self, report: WorkerReport) -> None:
        self._reports.append(report)
        os.eventfd_write(self._bell, 1)

    def _send_reports(self) -> None:
        while self._reports:
            report = self._reports.popleft()
            num_tokens = self._unanswered.popleft()
            if isinstance(report, WorkerFailed):
                self._channel.send(report)
                raise (RankLost if report.is_consequence else EngineDead)(report.reason)
            if self._sends_outputs:
                self._channel.send(report)
            self._statistics.count(report.compute_s, num_tokens, time.monotonic())

    def _send_statistics(self) -> None:
        self._channel.send(
            self._statistics.take(
                resident_bytes=resident_bytes(), device_bytes=self._device_bytes()
            )
        )
