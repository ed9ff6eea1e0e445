"""The scheduler process: a thin uvloop loop around the sans-I/O `Scheduler`.

It decodes messages from clients and workers, calls the scheduler, and sends plans and outputs. All
ranks get every plan; one of them sends the outputs.
"""

import asyncio
import contextlib
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, assert_never

from longshore.protocol.arrays import EMPTY_INT32, Int32Array
from longshore.protocol.commands import EngineCommand
from longshore.protocol.errors import EngineDead, LongshoreError, MessagesLost
from longshore.protocol.handshake import (
    ClientHello,
    EngineReady,
    FromWorker,
    ToClient,
    ToEngine,
    ToWorker,
    WorkerAsleep,
    WorkerHello,
    WorkerReady,
)
from longshore.protocol.logs.records import fields
from longshore.protocol.outputs import (
    AdmissionChanged,
    EngineContinues,
    EngineFailed,
    EngineOutputs,
    EnginePaused,
    ModelRunnerOutput,
    TransferReport,
    WorkerFailed,
)
from longshore.protocol.plan import BeginSleep, EndSleep, Shutdown
from longshore.protocol.requests import (
    AbortRequests,
    AddRequest,
    ContinueSession,
    Malformed,
    StopFound,
)
from longshore.protocol.statistics import DescribeBlocks, DescribeEngine, WorkerStats
from longshore.protocol.transport.channel import ServerChannel, SocketWatcher
from longshore.protocol.transport.lifeline import (
    Acknowledged,
    Lifeline,
    Progress,
    Ready,
    Restarting,
    stop_signals,
)
from longshore.scheduler.config import SchedulerProcessConfig
from longshore.scheduler.inspect.stall_log import StallLog
from longshore.scheduler.inspect.worker_statistics import WorkerStatistics
from longshore.scheduler.process.clients import Clients
from longshore.scheduler.process.kv_event_publisher import EventPublisher
from longshore.scheduler.process.operator_commands import (
    ASLEEP,
    WORK_PER_TURN,
    OperatorCommands,
)
from longshore.scheduler.process.structured_output.client import GrammarProcess
from longshore.scheduler.process.worker_handshake import (
    AcceptedWorkers,
    WorkerChannel,
    WorkerHandshake,
)
from longshore.scheduler.recorder.recorder import Recorder
from longshore.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 1.0
POLL_INTERVAL_S = 0.02
DISCONNECT_POLL_S = 0.002
DISCONNECT_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 1.0
CAUSE_TIMEOUT_S = 2.0
RESTART_TIMEOUT_S = 30.0
"""For the supervisor to notice the end of a worker, and to end the others."""


class EngineError(LongshoreError):
    """The engine cannot continue; the message is for the operator."""


class Engine:
    """One scheduler, its workers (by rank) and its clients. `run` returns when the process is
    stopped, or raises EngineError.

    When the supervisor reports that the workers have ended, a new epoch begins: nothing is planned
    until the next ones are ready, and everything else goes on. So it is when an operator lets the
    workers sleep, until they are awake again.

    accepted: what the workers have agreed on.
    events:   None: KV events are not published.
    grammars: what the scheduler compiles grammars with.
    recorder: records the scheduler; None: nothing does.
    """

    def __init__(
        self,
        config: SchedulerProcessConfig,
        scheduler: Scheduler,
        workers: Sequence[WorkerChannel],
        clients: ServerChannel[ToClient, ToEngine],
        lifeline: Lifeline,
        accepted: AcceptedWorkers,
        events: EventPublisher | None = None,
        grammars: GrammarProcess | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._workers = workers
        self._clients = Clients(clients, model_fingerprint=config.identity.model_fingerprint)
        self._events = events
        self._grammars = grammars
        self._recorder = recorder
        self._lifeline = lifeline
        self._accepted = accepted
        self._epoch = config.epoch
        self._handshake: WorkerHandshake | None = None  # while the workers are replaced
        self._sleepers = set(range(len(workers))) if config.is_asleep else None
        self._has_kv = not config.is_asleep  # the memory of the workers' KV, if it outlives them
        self._pause = EnginePaused(ASLEEP, is_asleep=True)
        self._commands = OperatorCommands(
            scheduler,
            events,
            clients=self._clients,
            answer=lifeline.report,
            announce=self._announce_admission,
            advance=self._advance,
            sleeper=self,
            paused=config.paused,
            is_drained=config.is_drained,
            is_asleep=config.is_asleep,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._statistics = WorkerStatistics(config.epoch)
        self._reported_state: tuple[int, ...] = ()
        self._failure: BaseException | None = None
        self._failing: asyncio.TimerHandle | None = None
        self._stalls = StallLog(scheduler)
        self._unanswered_since_s = 0.0
        self._poll: asyncio.TimerHandle | None = None
        # Requests to abort before another message of a client is read: all those of clients that
        # are gone, then these of one client.
        self._gone: deque[int] = deque()
        self._aborted: tuple[int, Int32Array] = (0, EMPTY_INT32)
        self._is_aborting = False

    async def run(self) -> None:
        """Serve until the process is stopped. Workers get `Shutdown` in every case."""
        self._loop = loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        for number in stop_signals(self._config.lifeline_fd):
            loop.add_signal_handler(number, self._stopping.set)
        self._watchers = [
            *(
                SocketWatcher(worker.socket, self._guarded(partial(self._on_worker, rank)))
                for rank, worker in enumerate(self._workers)
            ),
            SocketWatcher(self._clients.socket, self._guarded(self._on_clients)),
        ]
        loop.add_reader(self._lifeline.fileno(), self._guarded(self._on_lifeline))
        tasks = [asyncio.create_task(self._run_task(self._report_regularly()))]
        if self._grammars is not None:
            self._grammars.attach(self._guarded(self._advance))
        if self._events is not None:
            watcher = SocketWatcher(self._events.requests, self._events.on_readable)
            self._watchers.append(watcher)
            tasks.append(asyncio.create_task(self._run_task(self._events.serve_requests())))
        # Objects built so far live as long as the process: the garbage collector can skip them.
        gc.freeze()
        gc.enable()
        try:
            await self._stopping.wait()
            await self._finish_transfers()
        finally:
            self._loop = None
            self._commands.close()
            for task in tasks:
                task.cancel()
            if self._poll is not None:
                self._poll.cancel()
            loop.remove_reader(self._lifeline.fileno())
            for watcher in self._watchers:
                watcher.close()
            reason = str(self._failure or "the engine is shutting down")
            for index in self._clients:
                self._clients.send(index, EngineFailed(reason))
            if self._failure is None:
                self._publish_events()
            self._scheduler.shutdown()
            for worker in self._workers:
                with contextlib.suppress(EngineDead):  # the worker has already ended
                    worker.send(Shutdown(reason))
        if self._failure is not None:
            raise EngineError(str(self._failure)) from self._failure

    async def _finish_transfers(self) -> None:
        """Give the connector some time to store in its tiers what is left to store. Workers end
        what they have begun."""
        deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
        while (
            self._failure is None
            and self.is_awake
            and self._scheduler.has_transfers()
            and time.monotonic() < deadline_s
        ):
            await asyncio.sleep(POLL_INTERVAL_S)

    def command(self, number: int, command: EngineCommand) -> None:
        """Carry out an operator's command soon. May be called on any thread; ignored unless the
        engine runs."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(
                    self._guarded(partial(self._commands.execute, number, command))
                )

    def _announce_admission(self) -> None:
        self._tell_clients(AdmissionChanged(self._commands.closed_reason))

    def _guarded(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Wrap a callback: after an exception the tables may be wrong, so the engine stops."""

        def guarded() -> None:
            try:
                callback()
            except Exception as error:
                self._fail(error)

        return guarded

    @property
    def _engine_id(self) -> str:
        return f"{self._config.engine_id}.{self._epoch}"

    def _fail_soon(self, error: EngineError, timeout_s: float = CAUSE_TIMEOUT_S) -> None:
        """Stop soon because a rank was lost for an unknown reason. Until then another rank may
        report the reason, or the supervisor, which knows it, may stop or replace the processes."""
        if self._failing is None:
            logger.warning("%s", error, extra=fields(step_id=self._scheduler.num_steps))
            loop = asyncio.get_running_loop()
            self._failing = loop.call_later(timeout_s, self._fail, error)

    def _lose_worker(self, error: EngineError) -> None:
        """A worker has ended or is about to: wait for the supervisor to replace all of them, or
        stop."""
        outlives = self._config.outlives_workers
        self._fail_soon(error, RESTART_TIMEOUT_S if outlives else CAUSE_TIMEOUT_S)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, LongshoreError):
            about = fields(step_id=self._scheduler.num_steps, epoch=self._epoch)
            logger.error("internal error; the engine stops", exc_info=error, extra=about)
            if self._recorder is not None:
                self._recorder.flush(waits=True)
                path = self._recorder.path
                logger.error(
                    "what led to it is recorded in %s; repeat it with: longshore replay %s",
                    path,
                    path,
                )
        self._failure = error
        self._stopping.set()

    def _on_worker(self, rank: int) -> None:
        for message in self._workers[rank].drain():
            if self._handshake is None:
                self._take(rank, message)
            else:
                self._handshake.receive(rank, message)
                if self._handshake.is_over:
                    self._end_pause(self._handshake)
        self._check_sockets()

    def _take(self, rank: int, message: FromWorker) -> None:
        match message:
            case ModelRunnerOutput() if rank != self._config.sampling_rank:
                raise EngineError(
                    f"worker {rank} sent an output of step {message.step}, but only worker "
                    f"{self._config.sampling_rank} samples"
                )
            case ModelRunnerOutput() | TransferReport():
                self._apply(message)
                self._send_outputs_and_plans()
            case WorkerStats():
                self._statistics.update(rank, message)
            case WorkerFailed():
                error = EngineError(f"worker {message.rank} failed: {message.reason}")
                if not message.is_consequence and not self._config.outlives_workers:
                    raise error
                self._lose_worker(error)
            case WorkerAsleep() if self._sleepers is not None:
                self._sleepers.add(rank)
                if self.is_asleep:
                    self._begin_sleep()
            case WorkerHello() | WorkerReady() | WorkerAsleep():
                raise EngineError(f"worker {rank} has restarted and lost its rows")
            case _:
                assert_never(message)

    def _apply(self, message: FromWorker) -> None:
        """Apply what a rank has computed or moved, if the message is about that."""
        now = time.monotonic()
        match message:
            case ModelRunnerOutput():
                self._unanswered_since_s = now
                self._scheduler.update_from_output(message, now)
            case TransferReport():
                self._scheduler.update_from_transfers(message, now)

    # New workers

    def _on_lifeline(self) -> None:
        for message in self._lifeline.take_received():
            self._await_disconnects(message, time.monotonic() + DISCONNECT_TIMEOUT_S)

    def _await_disconnects(self, message: Restarting, deadline_s: float) -> None:
        """The workers have ended, but this process may not have read all that they sent."""
        if any(worker.has_peer for worker in self._workers) and time.monotonic() < deadline_s:
            again = self._guarded(partial(self._await_disconnects, message, deadline_s))
            asyncio.get_running_loop().call_later(DISCONNECT_POLL_S, again)
            self._check_sockets()
        else:
            self._begin_epoch(message)

    def _begin_epoch(self, restarting: Restarting) -> None:
        """All workers have ended, and others are started as soon as this is acknowledged. What the
        former ones have sent is applied first; it is as valid as before. If they were killed, so is
        what they have computed, which the next ones may adopt."""
        sleeps = self._commands.is_to_sleep  # workers that sleep adopt nothing
        may_adopt = self._config.adopts_kv and self._has_kv and not sleeps
        keeps_kv = restarting.were_killed and may_adopt
        for worker in self._workers:
            for message in worker.drain(max_messages=None):
                if self._handshake is None:  # else none of them has had a plan
                    self._apply(message)
        if self._failing is not None:
            self._failing.cancel()
            self._failing = None
        self._lifeline.report(Acknowledged())
        if restarting.is_out_of_memory:
            self._scheduler.lower_demand(time.monotonic())
        self._sleepers = None
        self._change_epoch(keeps_kv=keeps_kv)
        adopted = self._scheduler.kv_cache.pool.cached_block_ids() if keeps_kv else None
        num_running, num_waiting = self._scheduler.get_request_counts()
        logger.warning(
            "the workers are replaced, epoch %d begins; %d requests wait, %d blocks are kept",
            self._epoch,
            num_running + num_waiting,
            0 if adopted is None else len(adopted),
        )
        self._await_workers(adopted_block_ids=adopted, sleeps=sleeps)
        self._tell_pause(EnginePaused(ASLEEP if sleeps else restarting.reason, is_asleep=sleeps))

    def _change_epoch(self, *, keeps_kv: bool = False) -> None:
        self._epoch += 1
        self._scheduler.begin_epoch(self._epoch, time.monotonic(), keeps_kv=keeps_kv)
        self._statistics = WorkerStatistics(self._epoch)

    def _await_workers(self, **settings: Any) -> None:
        """Begin a handshake with workers in place of the former ones."""
        self._handshake = WorkerHandshake(
            self._workers,
            self._config,
            epoch=self._epoch,
            former=self._accepted,
            on_progress=lambda doing: self._lifeline.report(Progress(doing)),
            **settings,
        )

    def _tell_pause(self, pause: EnginePaused) -> None:
        self._pause = pause
        self._tell_clients(pause)
        self._advance()

    def _end_pause(self, handshake: WorkerHandshake) -> None:
        """All new workers are ready, or asleep."""
        self._handshake = None
        self._lifeline.report(Ready())
        if handshake.sleeps:
            self._sleepers = set(range(len(self._workers)))
            self._has_kv = False
            return
        self._has_kv = True
        logger.info("the workers are ready again")
        for rank, message in handshake.early:
            self._take(rank, message)
        self._tell_clients(EngineContinues(self._engine_id))
        self._send_outputs_and_plans()

    # Sleep

    @property
    def is_awake(self) -> bool:
        """The workers serve plans."""
        return self._handshake is None and self._sleepers is None

    @property
    def is_asleep(self) -> bool:
        """All workers have freed their memory."""
        return self._sleepers is not None and len(self._sleepers) == len(self._workers)

    def fall_asleep(self) -> None:
        """Let the workers sleep, when all plans are answered: the next epoch begins as if others
        took their place, except that they end their transfers first."""
        assert self.is_awake
        assert not self._scheduler.num_steps_in_flight
        if self._failing is None:
            self._sleepers = set()
            self._has_kv = False  # from now on, a worker may have freed it
            self._send_to_workers(BeginSleep())

    def _begin_sleep(self) -> None:
        self._change_epoch()
        logger.info("asleep; epoch %d begins when it wakes", self._epoch)
        self._tell_pause(EnginePaused(ASLEEP, is_asleep=True))

    def wake(self) -> None:
        """Wake the workers. They have as many blocks as before."""
        assert self.is_asleep
        self._sleepers = None
        self._await_workers()
        self._send_to_workers(EndSleep())

    # Clients

    def _on_clients(self) -> None:
        """Do what clients want, in this order, up to a limit of work per turn of the loop."""
        num_left = self._abort(WORK_PER_TURN)
        if num_left:
            for index, message in self._clients.drain(self._reject_request, num_left):
                self._take_client_message(index, message)
                num_left -= 1
                if self._has_aborts and not (num_left := self._abort(num_left)):
                    break
        self._send_outputs_and_plans()
        self._check_sockets()

    def _take_client_message(self, index: int, message: ToEngine | MessagesLost) -> None:
        now = time.monotonic()
        match message:
            case ClientHello():
                self._greet(index)
            case MessagesLost():
                self._drop_client(index, str(message))
            case AddRequest():
                self._scheduler.add_request(message, client=index, now=now)
            case AbortRequests():
                self._aborted = index, message.handles
                self._scheduler.release_transfers(message.transfer_ids)
            case StopFound():
                self._scheduler.stop_found(index, message, now)
            case ContinueSession():
                self._scheduler.continue_session(index, message, now)
            case DescribeEngine():
                self._send(index, self._scheduler.make_report(now, self._engine_id))
            case DescribeBlocks():
                self._send(index, self._scheduler.make_block_snapshot(now, self._engine_id))
            case _:
                assert_never(message)

    @property
    def _has_aborts(self) -> bool:
        return bool(self._gone) or len(self._aborted[1]) > 0

    def _abort(self, num_left: int) -> int:
        """Abort up to `num_left` of the requests that are to be; returns how many more could have
        been. If others are left, they follow in the next turn."""
        while self._gone and num_left:
            num_left -= self._scheduler.abort_client(self._gone[0], time.monotonic(), num_left)
            if num_left:
                self._gone.popleft()
        index, handles = self._aborted
        if num_left and len(handles):
            self._scheduler.abort_requests(index, handles[:num_left], time.monotonic())
            self._aborted = index, handles[num_left:]
            num_left = max(num_left - len(handles), 0)
        if self._has_aborts:
            self._abort_soon()
        return num_left

    def _abort_soon(self) -> None:
        if not self._is_aborting:
            self._is_aborting = True
            asyncio.get_running_loop().call_soon(self._guarded(self._abort_more))

    def _abort_more(self) -> None:
        self._is_aborting = False
        self._on_clients()

    def _reject_request(self, index: int, malformed: Malformed, reason: str) -> None:
        self._scheduler.reject_message(malformed, reason, client=index, now=time.monotonic())

    def _greet(self, index: int) -> None:
        """The client gets the engine's state, and at once the statistics, so that a gateway that
        is ready has its metrics."""
        scheduler = self._scheduler
        ready = EngineReady(
            self._engine_id,
            self._config.identity,
            scheduler.kv_cache.num_blocks,
            scheduler.capacity,
        )
        self._send(index, ready)
        self._report(self._statistics.latest())
        if not self.is_awake:
            self._send(index, self._pause)
        if self._commands.closed_reason is not None:
            self._send(index, AdmissionChanged(self._commands.closed_reason))

    def _send_outputs_and_plans(self) -> None:
        """Send plans first if no step is in flight, because the device is idle; otherwise send
        outputs first, because clients are waiting."""
        if not self._scheduler.num_steps_in_flight:
            self._send_plans()
        for index, outputs in self._scheduler.take_outputs():
            self._send(index, outputs)
        self._send_plans()
        self._publish_events()
        self._poll_if_idle()

    def _publish_events(self) -> None:
        if self._events is not None:
            self._events.publish(self._scheduler.take_kv_events())

    async def _run_task(self, task: Coroutine[Any, Any, None]) -> None:
        try:
            await task
        except Exception as error:
            self._fail(error)

    def _poll_if_idle(self) -> None:
        """Schedule again soon if a request waits for an event without a message (a grammar, a
        connector, a deadline) and no output is due that would wake this loop."""
        scheduler = self._scheduler
        is_idle = not scheduler.num_steps_in_flight and scheduler.is_waited_for()
        if is_idle and self._poll is None and self.is_awake:
            loop = asyncio.get_running_loop()
            delay_s = 0.0 if scheduler.has_untried else POLL_INTERVAL_S
            self._poll = loop.call_later(delay_s, self._guarded(self._on_poll))

    def _on_poll(self) -> None:
        self._poll = None
        self._advance()

    def _advance(self) -> None:
        self._send_outputs_and_plans()
        self._check_sockets()

    def _send_plans(self) -> None:
        if not self._scheduler.num_steps_in_flight:
            self._unanswered_since_s = time.monotonic()
        self._send_masks()  # first: the device waits for them
        while (
            self._failing is None
            and self.is_awake
            and (plan := self._scheduler.schedule(time.monotonic())) is not None
        ):
            self._send_to_workers(plan)
        self._send_masks()

    def _send_masks(self) -> None:
        for mask in self._scheduler.take_masks():
            self._send_to_workers(mask)

    def _send_to_workers(self, message: ToWorker) -> None:
        for rank, worker in enumerate(self._workers):
            try:
                worker.send(message)
            except EngineDead as error:
                self._lose_worker(EngineError(f"worker {rank}: {error}"))

    def _check_sockets(self) -> None:
        for watcher in self._watchers:
            watcher.check()

    def _send(self, index: int, message: ToClient) -> None:
        if index in self._clients and not self._clients.send(index, message):
            self._drop_client(index, "it is gone, or has stopped reading")

    def _tell_clients(self, message: ToClient) -> None:
        for index in self._clients:
            self._send(index, message)

    def _drop_client(self, index: int, reason: str) -> None:
        self._clients.forget(index)
        logger.info("client %d disconnected; aborting its requests: %s", index, reason)
        self._gone.append(index)
        self._abort_soon()

    def _check_answers(self) -> None:
        """Stop the engine if an output is overdue. Ranks report a peer that hangs only if they
        wait for it."""
        unanswered_s = time.monotonic() - self._unanswered_since_s
        timeout_s = self._config.rank_timeout_s
        is_late = self._scheduler.num_steps_in_flight and unanswered_s > timeout_s + CAUSE_TIMEOUT_S
        if is_late and len(self._workers) > 1:
            self._fail_soon(
                EngineError(
                    f"no step was answered for {unanswered_s:.0f} s; one of the "
                    f"{len(self._workers)} workers hangs, or a step takes longer than "
                    f"rank_timeout_s={timeout_s:g}"
                )
            )

    async def _report_regularly(self) -> None:
        while True:
            self._lifeline.report_alive()
            await asyncio.sleep(STATS_INTERVAL_S)
            self._check_answers()
            if self._recorder is not None:
                self._recorder.flush()
            now = time.monotonic()
            if self.is_awake:
                self._stalls.check(now, self._engine_id)
            if self._grammars is not None:
                self._grammars.check(now)
            workers = self._statistics.latest()
            num_worker_steps = sum(stats.num_steps for stats in workers)
            counts = self._scheduler.get_request_counts()
            transfers = (self._scheduler.num_transfer_operations, self._scheduler.num_transfers)
            state = (self._scheduler.num_steps, num_worker_steps, *transfers, *counts)
            if state == self._reported_state:
                continue
            self._reported_state = state
            self._report(workers)
            # Sending may have consumed the socket event that announced a request.
            self._check_sockets()

    def _report(self, workers: tuple[WorkerStats, ...]) -> None:
        """Send the statistics to all clients."""
        num_bad = self._clients.num_bad
        num_bad += sum(worker.num_bad.total() for worker in self._workers)
        num_bad += self._statistics.num_dropped
        num_bad += 0 if self._events is None else self._events.num_bad.total()
        self._tell_clients(EngineOutputs(stats=self._scheduler.make_stats(num_bad, workers)))
