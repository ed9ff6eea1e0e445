"""Scheduler and worker in the caller's own process, without sockets: for tests and debugging."""

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, assert_never

from longshore.connectors.base import (
    ConnectorConfig,
    EncoderConnector,
    EncoderConnectorConfig,
    EncoderWorker,
    SchedulerConnector,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.connectors.encoder_registry import load_encoder_connector, load_encoder_worker
from longshore.connectors.registry import (
    engine_fields,
    load_scheduler_connector,
    load_worker_connector,
    parse_options,
)
from longshore.deploy.llm.local_grammars import LocalGrammars
from longshore.deploy.supervisor.engine_config import worker_config
from longshore.deploy.supervisor.engine_plan import EnginePlan, trace_path
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
from longshore.protocol.statistics import DescribeEngine, SchedulerStats
from longshore.scheduler.features.routed_experts import RoutedExpertsReader
from longshore.scheduler.features.tool_calls import load_decoder
from longshore.scheduler.inspect.trace import SchedulerTrace
from longshore.scheduler.process.trace_file import TraceFile, open_trace
from longshore.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from longshore.worker.worker import Worker

CLIENT_INDEX = 0

TRANSFER_POLL_S: Final = 0.05
"""How often deadlines are checked while no step is in flight and transfers may be."""


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
    """The scheduler and worker objects that the processes run, driven by `receive`.

    scheduler, worker, connector_halves, encoder_halves: may be inspected between calls.
    """

    def __init__(self, plan: EnginePlan, *, delay: Callable[[], None] | None = None) -> None:
        """delay: called before each step and each transfer, on their threads; for tests.

        Raises ConfigError for a model that cannot be loaded."""
        # These import torch, so only when needed.
        from longshore.worker.queues.compute_queue import CpuComputeQueue
        from longshore.worker.worker import Worker

        if plan.options.enable_kv_cache_events:
            raise ConfigError(
                "enable_kv_cache_events is not supported with in_process, which has no sockets; "
                "remove in_process"
            )
        if plan.options.record is not None:
            raise ConfigError("record is not supported with in_process; remove in_process")
        self._reports: deque[WorkerReport] = deque()
        self._has_reports = threading.Event()
        self._experts_fd = None
        self._trace_file: TraceFile | None = None
        if plan.options.enable_return_routed_experts:
            self._experts_fd = os.memfd_create("longshore-experts", os.MFD_CLOEXEC)
        worker = replace(worker_config(plan), routed_experts_fd=self._experts_fd)
        try:
            self.worker = Worker(worker)
        except BaseException:
            self._close_experts()
            raise
        try:
            self.connector_halves = _connector(plan, self.worker)
            self.encoder_halves = _encoder_connector(plan, self.worker)
            scheduler_half, worker_half = self.connector_halves
            self._runner = self.worker.start(
                queue=None if delay is None else CpuComputeQueue(delay),
                connector=worker_half,
                encoder_connector=self.encoder_halves[1],
                wake=self._has_reports.set,
                transfer_delay=delay,
            )
            self.scheduler = Scheduler(
                plan.scheduler,
                plan.cache,
                kv_cache=self.worker.kv_cache,
                hash_seed=plan.hash_seed,
                vocab_size=plan.model.vocab_size,
                eos_token_ids=plan.model.eos_token_ids,
                features=frozenset(self.worker.features),
                connector=scheduler_half,
                encoder_connector=self.encoder_halves[0],
                verify_plan=plan.options.verify_plan,
                grammars=LocalGrammars(plan),
                experts=self._experts_reader(),
                decode=load_decoder(
                    plan.scheduler.policy,
                    None if (file := plan.model.tokenizer_file) is None else str(file),
                ),
                trace=self._open_trace(plan),
            )
        except BaseException:
            self.worker.close()
            raise
        finally:
            self._close_experts()  # they are mapped on both sides
        self._num_in_flight = 0
        self._outputs: list[EngineOutputs] = []
        self._failure: EngineDead | None = None
        self._is_closed = False

    def _open_trace(self, plan: EnginePlan) -> SchedulerTrace | None:
        path = trace_path(plan)
        if (
            path is None
            or (opened := open_trace(path, "engine-0", plan.options.sched_trace_mib << 20)) is None
        ):
            return None
        trace, self._trace_file = opened
        return trace

    def _experts_reader(self) -> RoutedExpertsReader | None:
        if self._experts_fd is None or self.worker.routed_experts is None:
            return None
        return RoutedExpertsReader(
            self._experts_fd, self.worker.routed_experts, self.worker.kv_cache
        )

    def _close_experts(self) -> None:
        if self._experts_fd is not None:
            os.close(self._experts_fd)

    @property
    def num_blocks(self) -> int:
        return self.worker.kv_cache.num_blocks

    def stats(self) -> SchedulerStats:
        return self.scheduler.make_stats()

    def reset_prefix_cache(self) -> bool:
        """Uncache all prefixes; False while a request holds blocks. Raises EngineDead."""
        self._check_alive()
        with self._uninterrupted():
            return self.scheduler.reset_prefix_cache(time.monotonic())

    def send(self, message: ClientRequest) -> None:
        self._check_alive()
        if isinstance(message, DescribeEngine):
            raise ValueError("an in-process engine has no reports")
        with self._uninterrupted():
            self._pass_on(message, time.monotonic())
        self._has_reports.set()  # `receive` plans it at once

    def _pass_on(
        self, message: AddRequest | AbortRequests | ContinueSession | StopFound, now: float
    ) -> None:
        match message:
            case AddRequest():
                self.scheduler.add_request(message, client=CLIENT_INDEX, now=now)
            case AbortRequests():
                self.scheduler.abort_requests(CLIENT_INDEX, message.handles, now)
                self.scheduler.release_transfers(message.transfer_ids)
            case ContinueSession():
                self.scheduler.continue_session(CLIENT_INDEX, message, now)
            case StopFound():
                self.scheduler.stop_found(CLIENT_INDEX, message, now)
            case _:
                assert_never(message)

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """No interrupt in the block; after an exception in it the engine is dead."""
        with interrupts_deferred():
            try:
                yield
            except Exception as error:
                self._failure = EngineDead(f"a step failed: {error!r}")
                raise

    def receive(self) -> EngineOutputs | None:
        """The outputs of one step, if any. Raises EngineDead if this or an earlier step failed.

        An interrupt is raised while this waits for the step, or after the step.
        """
        self._check_alive()
        if not self._outputs:
            connectors = self.worker.connectors
            if self._num_in_flight:
                self._has_reports.wait()
                self._check_alive()
            elif connectors:  # their transfers may be all that goes on
                intervals = [each.poll_interval_s or math.inf for each in connectors]
                self._has_reports.wait(min(TRANSFER_POLL_S, *intervals))
            with self._uninterrupted():
                self._advance()
        return self._outputs.pop(0) if self._outputs else None

    def _advance(self) -> None:
        self._has_reports.clear()
        while self._reports:
            report = self._reports.popleft()
            match report:
                case ModelRunnerOutput():
                    self._num_in_flight -= 1
                    self.scheduler.update_from_output(report, time.monotonic())
                case WorkerFailed():
                    raise EngineDead(f"the worker failed: {report.reason}")
                case _:
                    assert_never(report)
        for connector in self.worker.connectors:
            if (transfers := connector.take_report()) is not None:
                self.scheduler.update_from_transfers(transfers, time.monotonic())
        self._add_masks()
        while (plan := self.scheduler.schedule(time.monotonic())) is not None:
            self._runner.submit(plan, self._take_report)
            self._num_in_flight += 1
        self._add_masks()
        self._outputs += [outputs for _, outputs in self.scheduler.take_outputs()]
        is_stuck = not self._num_in_flight and not self._outputs
        if is_stuck and not self.worker.connectors and self.scheduler.is_waited_for():
            raise EngineDead("requests are waiting, but the scheduler cannot plan a step")

    def _add_masks(self) -> None:
        for mask in self.scheduler.take_masks():
            self._runner.add_mask(mask)

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
        self.worker.close()
        self._has_reports.set()
        if not self._is_closed:
            self._is_closed = True
            self.scheduler.shutdown()
            if self._trace_file is not None:
                self._trace_file.close()


def _connector(
    plan: EnginePlan, worker: "Worker"
) -> tuple[SchedulerConnector | None, WorkerConnector[Any] | None]:
    """Both halves of the connector. Raises ConfigError if one cannot be built."""
    name = plan.options.kv_connector
    if name is None:
        return None, None
    fields = engine_fields(
        plan.identity,
        worker.kv_cache,
        options=plan.connector_options,
        rank_block_bytes=(worker.kv_cache.largest_block_bytes,),
        engine_id="in-process",
        epoch=1,
    )
    hash_block_size = plan.cache.tokens_per_hash
    return (
        load_scheduler_connector(name, ConnectorConfig(**fields, hash_block_size=hash_block_size)),
        load_worker_connector(
            name,
            WorkerConnectorConfig(
                **fields,
                model_name=plan.model.name,
                hidden_size=worker.model_config.hidden_size,
                state_dir=str(plan.state_dir),
            ),
        ),
    )


def _encoder_connector(
    plan: EnginePlan, worker: "Worker"
) -> tuple[EncoderConnector | None, EncoderWorker[Any] | None]:
    """Both halves of the encoder connector. Raises ConfigError if one cannot be built."""
    transfer = plan.ec_transfer
    if transfer is None:
        return None, None
    fields: dict[str, Any] = {
        "options": parse_options(transfer.options),
        "role": transfer.role,
        "num_ranks": 1,
        "engine_id": "in-process.1",
        "identity": plan.identity,
    }
    config = EncoderConnectorConfig(**fields)
    return (
        load_encoder_connector(transfer.connector, config),
        load_encoder_worker(transfer.connector, worker.encoder_config(fields)),
    )
