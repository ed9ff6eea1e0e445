"""Scheduler and worker in the caller's own process, without sockets: for tests and debugging."""

import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import assert_never

from longshore.deploy.supervisor.engine_config import EnginePlan, worker_config
from longshore.protocol.errors import ConfigError, EngineDead
from longshore.protocol.outputs import (
    EngineOutputs,
    ModelRunnerOutput,
    WorkerFailed,
    WorkerReport,
)
from longshore.protocol.requests import (
    AbortRequests,
    AddRequest,
    ClientRequest,
    ContinueSession,
    StopFound,
)
from longshore.protocol.statistics import DescribeEngine
from longshore.scheduler.scheduler import Scheduler

CLIENT_INDEX = 0


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C until after the block: an interrupted step would leave scheduler and worker
    inconsistent.

    Signals only reach the main thread; on other threads there is nothing to defer.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    arrived: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for number in arrived[:1]:
            signal.raise_signal(number)


class InProcessEngine:
    """The scheduler and worker objects that the processes run, driven by `receive`."""

    def __init__(self, plan: EnginePlan) -> None:
        """Raises ConfigError for a model that cannot be loaded."""
        from longshore.worker.worker import Worker  # imports torch, so only when needed

        if plan.options.kv_connector is not None:
            raise ConfigError(
                f"kv_connector={plan.options.kv_connector!r} is not supported with in_process; "
                "remove in_process"
            )
        self._worker = Worker(worker_config(plan))
        try:
            self._runner = self._worker.start()
            self._scheduler = Scheduler(
                plan.scheduler,
                plan.cache,
                kv_cache=self._worker.kv_cache,
                hash_seed=plan.hash_seed,
                vocab_size=plan.model.vocab_size,
                eos_token_ids=plan.model.eos_token_ids,
                features=frozenset(self._worker.features),
                verify_plan=plan.options.verify_plan,
            )
        except BaseException:
            self._worker.close()
            raise
        self._reports: deque[WorkerReport] = deque()
        self._has_reports = threading.Event()
        self._num_in_flight = 0
        self._outputs: list[EngineOutputs] = []
        self._failure: EngineDead | None = None

    @property
    def num_blocks(self) -> int:
        return self._worker.kv_cache.num_blocks

    def send(self, message: ClientRequest) -> None:
        self._check_alive()
        now = time.monotonic()
        with interrupts_deferred():
            match message:
                case AddRequest():
                    self._scheduler.add_request(message, client=CLIENT_INDEX, now=now)
                case AbortRequests():
                    self._scheduler.abort_requests(CLIENT_INDEX, message.handles, now)
                case ContinueSession():
                    self._scheduler.continue_session(CLIENT_INDEX, message, now)
                case StopFound():
                    self._scheduler.stop_found(CLIENT_INDEX, message, now)
                case DescribeEngine():
                    raise ValueError("an in-process engine has no reports")
                case _:
                    assert_never(message)

    def receive(self) -> EngineOutputs | None:
        """The outputs of one step, if any. Raises EngineDead if this or an earlier step failed.

        An interrupt is raised while this waits for the step, or after the step.
        """
        self._check_alive()
        if not self._outputs:
            if self._num_in_flight:
                self._has_reports.wait()
                self._check_alive()
            with interrupts_deferred():
                try:
                    self._advance()
                except Exception as error:
                    self._failure = EngineDead(f"a step failed: {error!r}")
                    raise
        return self._outputs.pop(0) if self._outputs else None

    def _advance(self) -> None:
        self._has_reports.clear()
        while self._reports:
            report = self._reports.popleft()
            match report:
                case ModelRunnerOutput():
                    self._num_in_flight -= 1
                    self._scheduler.update_from_output(report, time.monotonic())
                case WorkerFailed():
                    raise EngineDead(f"the worker failed: {report.reason}")
                case _:
                    assert_never(report)
        while (plan := self._scheduler.schedule(time.monotonic())) is not None:
            self._runner.submit(plan, self._take_report)
            self._num_in_flight += 1
        self._outputs += [outputs for _, outputs in self._scheduler.take_outputs()]
        is_stuck = not self._num_in_flight and not self._outputs
        if is_stuck and self._scheduler.is_waited_for():
            raise EngineDead("requests are waiting, but the scheduler cannot plan a step")

    def _take_report(self, report: WorkerReport) -> None:
        """Called on the worker's compute thread."""
        self._reports.append(report)
        self._has_reports.set()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Finish the steps in flight and release the model. May be called twice. A `receive` on
        another thread, and every later call, raises EngineDead."""
        self._failure = self._failure or EngineDead("the engine has been closed")
        self._worker.close()
        self._has_reports.set()
