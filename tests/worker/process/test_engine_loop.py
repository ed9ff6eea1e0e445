"""The worker's loop over a real channel, with its scheduler in the test."""

import dataclasses
import math
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from longshore.connectors.base import FinishedTransfers
from longshore.protocol.arrays import UInt8Array, int32_array
from longshore.protocol.errors import EngineDead, LongshoreError, PlanMismatch
from longshore.protocol.handshake import FromWorker, ToWorker, WorkerAccepted
from longshore.protocol.outputs import ModelRunnerOutput, TransferReport, WorkerFailed
from longshore.protocol.plan import SampleMask, Shutdown
from longshore.protocol.statistics import WorkerStats
from longshore.protocol.transport.channel import (
    Channel,
    Endpoint,
    open_socket,
)
from longshore.worker.config import WorkerConfig
from longshore.worker.errors import OutOfMemory
from longshore.worker.process.engine_loop import Bell, WorkerEngine
from longshore.worker.process.scheduler_link import SchedulerLink, SchedulerLost
from longshore.worker.queues.compute_queue import CpuComputeQueue
from longshore.worker.transfer.connector import HookFailed
from longshore.worker.worker import Worker
from tests.worker.plans import Entry, Planner
from tests.worker.recording_connector import RecordingConnector

TIMEOUT_S = 60.0
EPOCH = 3
DEVICE_BYTES = 4096
VOCAB_SIZE = 128


class EngineThread:
    """A WorkerEngine in a thread, and the scheduler's end of its channel."""

    def __init__(
        self,
        model: Path,
        *,
        sends_outputs: bool = True,
        connector: RecordingConnector | None = None,
        step_timeout_s: float = math.inf,
    ) -> None:
        self.late: list[str | None] = []
        self.directory = Path(tempfile.mkdtemp(prefix="longshore-test-"))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoint = Endpoint(f"ipc://{self.directory}/worker-0")
        self.scheduler: Channel[ToWorker, FromWorker] = Channel(
            open_socket(self.context, zmq.DEALER, endpoint, bind=True), FromWorker
        )
        self._link = SchedulerLink(endpoint)
        config = WorkerConfig(model=str(model), num_blocks=40, max_num_seqs=8, show_progress=False)
        self.gate = threading.Event()
        self.gate.set()
        self._worker = Worker(config)
        queue = CpuComputeQueue(before_each=lambda: assert_opens(self.gate))
        bell = Bell()
        runner = self._worker.start(epoch=EPOCH, queue=queue, connector=connector, wake=bell.ring)
        self.plans = Planner(num_blocks=40, block_size=16, epoch=EPOCH)
        self.error: LongshoreError | SchedulerLost | None = None
        engine = WorkerEngine(
            self._link,
            runner,
            epoch=EPOCH,
            rank=0,
            bell=bell,
            sends_outputs=sends_outputs,
            connectors=self._worker.connectors,
            device_bytes=lambda: DEVICE_BYTES,
            report_alive=self.late.append,
            step_timeout_s=step_timeout_s,
        )
        self._thread = threading.Thread(target=self._run, args=(engine,))
        self._thread.start()

    def _run(self, engine: WorkerEngine) -> None:
        try:
            engine.run()
        except (LongshoreError, SchedulerLost) as error:
            self.error = error

    def receive(self) -> FromWorker:
        """The next message that is not statistics."""
        while isinstance(message := self.scheduler.receive(TIMEOUT_S), WorkerStats):
            pass
        assert message is not None, "the worker said nothing"
        return message

    def receive_statistics(self) -> WorkerStats:
        """The next statistics; other messages are skipped."""
        while not isinstance(message := self.scheduler.receive(TIMEOUT_S), WorkerStats):
            assert message is not None, "the worker said nothing"
        return message

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.gate.set()
        if self._thread.is_alive():
            self.scheduler.send(Shutdown("the test is over"))
            self._thread.join(TIMEOUT_S)
        self._worker.close()
        self.scheduler.close()
        self._link.__exit__(None, None, None)
        self.context.term()
        shutil.rmtree(self.directory)


def assert_opens(gate: threading.Event) -> None:
    assert gate.wait(TIMEOUT_S)


@pytest.fixture
def engine(checkpoint: tuple[Path, Any]) -> Iterator[EngineThread]:
    engine = EngineThread(checkpoint[0])
    yield engine
    engine.close()


def first_plan(engine: EngineThread, **fields: Any) -> Any:
    return engine.plans.plan({0: 20}, added=[Entry(0, range(3, 23))], **fields)


def test_every_plan_is_answered_in_order_with_its_epoch_and_step(engine: EngineThread) -> None:
    engine.scheduler.send(engine.plans.plan())
    engine.scheduler.send(first_plan(engine))
    for _ in range(6):
        engine.scheduler.send(engine.plans.plan())
    for step in range(1, 9):
        output = engine.receive()
        assert isinstance(output, ModelRunnerOutput)
        assert (output.epoch, output.step) == (EPOCH, step)
        assert len(output.sampled_tokens) == (0 if step == 1 else 1)


def test_a_plan_is_prepared_while_the_previous_one_still_computes(engine: EngineThread) -> None:
    engine.gate.clear()
    engine.scheduler.send(first_plan(engine))
    # The loop can notice a mismatch only by reading the second plan, which the device never
    # reached.
    engine.scheduler.send(msgspec.structs.replace(engine.plans.plan(), epoch=EPOCH + 1))
    assert isinstance(engine.receive(), WorkerFailed)
    engine.gate.set()
    engine.join()


def test_a_repeated_plan_gets_no_second_answer(engine: EngineThread) -> None:
    plan = first_plan(engine)
    for message in (plan, plan, engine.plans.plan()):
        engine.scheduler.send(message)
    outputs = [engine.receive(), engine.receive()]
    assert [output.step for output in outputs] == [1, 2]  # type: ignore[union-attr]
    assert engine.scheduler.receive(0.05) is None


def test_shutdown_comes_after_the_answers_to_the_plans_before_it(engine: EngineThread) -> None:
    engine.gate.clear()
    engine.scheduler.send(first_plan(engine))
    engine.scheduler.send(engine.plans.plan())
    engine.scheduler.send(Shutdown("enough"))
    engine.gate.set()
    assert [engine.receive().step for _ in range(2)] == [1, 2]  # type: ignore[union-attr]
    engine.join()
    assert engine.error is None


def test_a_plan_that_does_not_continue_ends_the_worker_with_a_reason(engine: EngineThread) -> None:
    engine.plans.plan()  # never sent
    engine.scheduler.send(engine.plans.plan())
    failed = engine.receive()
    assert isinstance(failed, WorkerFailed)
    assert (failed.epoch, failed.rank) == (EPOCH, 0)
    assert failed.reason == "step 2 follows step 1, but the last one here was 0"
    engine.join()
    assert isinstance(engine.error, PlanMismatch)


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_lack_of_memory_that_ends_the_worker_is_said(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*args: object, **named: object) -> None:
        raise MemoryError("no byte is left")

    assert engine._worker._runner is not None
    launcher = engine._worker._runner._launcher
    if where == "device":
        monkeypatch.setattr(engine._worker.model, "forward", fail)
        state = dataclasses.replace(launcher.state, may_repeat_steps=False)
        monkeypatch.setattr(launcher, "state", state)
    else:
        monkeypatch.setattr(launcher, "prepare", fail)
    engine.scheduler.send(first_plan(engine))
    failed = engine.receive()
    assert isinstance(failed, WorkerFailed)
    assert "no byte is left" in failed.reason
    engine.join()
    assert isinstance(engine.error, OutOfMemory)


def test_a_step_that_fails_ends_the_worker_with_a_reason(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine._worker.model, "forward", fail)
    engine.scheduler.send(first_plan(engine))
    failed = engine.receive()
    assert isinstance(failed, WorkerFailed)
    assert failed.reason == "step 1 failed on the device: RuntimeError: out of luck"
    engine.join()
    assert isinstance(engine.error, EngineDead)


BITS: UInt8Array = int32_array([0]).view("uint8")  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (SampleMask(EPOCH, 1, int32_array([0]), BITS), "a token mask for step 1 of epoch 3"),
        (WorkerAccepted(EPOCH, 40), "a second WorkerAccepted"),
    ],
    ids=["mask", "accepted"],
)
def test_a_message_that_is_not_due_ends_the_worker_with_a_reason(
    message: ToWorker, reason: str, engine: EngineThread
) -> None:
    engine.scheduler.send(message)
    failed = engine.receive()
    assert isinstance(failed, WorkerFailed)
    assert reason in failed.reason
    engine.join()


def masked_plan(engine: EngineThread) -> Any:
    entry = Entry(0, range(3, 23), has_structured_output=True)
    return engine.plans.plan({0: 20}, added=[entry])


def mask_of(engine: EngineThread, step: int, token_id: int) -> SampleMask:
    """Of row 0, which may only sample this token."""
    bits = np.packbits(np.arange(VOCAB_SIZE) == token_id, bitorder="little")
    return SampleMask(EPOCH, step, int32_array([0]), bits)


def test_a_step_with_structured_output_waits_for_its_mask_and_later_plans_for_the_step(
    engine: EngineThread,
) -> None:
    engine.scheduler.send(masked_plan(engine))
    engine.scheduler.send(engine.plans.plan())
    assert engine.scheduler.receive(0.2) is None
    for step, token_id in ((1, 77), (2, 31)):
        engine.scheduler.send(mask_of(engine, step, token_id))
        output = engine.receive()
        assert isinstance(output, ModelRunnerOutput)
        assert (output.step, output.sampled_tokens.tolist()) == (step, [token_id])


def test_a_mask_that_never_arrives_makes_its_step_late(start: "StartEngine") -> None:
    engine = start(None, step_timeout_s=0.1)
    engine.scheduler.send(masked_plan(engine))
    deadline_s = time.monotonic() + TIMEOUT_S
    while not engine.late or engine.late[-1] is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    late = engine.late[-1]
    assert late is not None
    assert late.startswith("step 1 with 20 tokens has taken ")
    assert late.endswith("; it waits for its token mask (structured output) from the scheduler")
    engine.scheduler.send(mask_of(engine, 1, 5))
    assert isinstance(engine.receive(), ModelRunnerOutput)


def test_a_worker_that_waits_for_a_mask_shuts_down(engine: EngineThread) -> None:
    engine.scheduler.send(masked_plan(engine))
    engine.scheduler.send(engine.plans.plan())
    engine.scheduler.send(Shutdown("enough"))
    engine.join()
    assert engine.error is None


def test_a_worker_that_waits_for_a_mask_outlives_its_scheduler(engine: EngineThread) -> None:
    engine.scheduler.send(masked_plan(engine))
    engine.scheduler.send(engine.plans.plan())
    assert engine.scheduler.receive(0.2) is None
    engine.scheduler.close()
    engine.join()
    assert isinstance(engine.error, SchedulerLost)


def test_a_scheduler_that_dies_without_a_shutdown_is_noticed(engine: EngineThread) -> None:
    engine.scheduler.send(first_plan(engine))
    assert isinstance(engine.receive(), ModelRunnerOutput)
    engine.scheduler.close()
    engine.join()
    assert isinstance(engine.error, SchedulerLost)


def test_a_malformed_message_is_dropped(engine: EngineThread) -> None:
    engine.scheduler.socket.send_multipart([b"\x93not a plan"])
    engine.scheduler.send(first_plan(engine))
    assert isinstance(engine.receive(), ModelRunnerOutput)


@pytest.mark.parametrize("sends_outputs", [True, False], ids=["it samples", "another rank samples"])
def test_a_rank_reports_step_statistics_even_without_further_plans(
    sends_outputs: bool, checkpoint: tuple[Path, Any]
) -> None:
    engine = EngineThread(checkpoint[0], sends_outputs=sends_outputs)
    try:
        engine.scheduler.send(first_plan(engine))
        for _ in range(3):
            engine.scheduler.send(engine.plans.plan())
        stats = engine.receive_statistics()
        while stats.num_steps < 4:  # a slow machine needs longer than one report's interval
            assert stats.longest_step_s <= stats.compute_s
            stats = engine.receive_statistics()
        assert (stats.epoch, stats.rank, stats.num_tokens) == (EPOCH, 0, 23)
        assert stats.steps_by_tokens[:6] == (3, 0, 0, 0, 0, 1)  # 20 are more than 16
        assert stats.compute_s > 0
        assert stats.resident_bytes > 1 << 20
        assert stats.device_bytes == DEVICE_BYTES
        assert engine.scheduler.receive(0.05) is None  # nothing has changed since
    finally:
        engine.close()


# With a connector


StartEngine = Callable[..., EngineThread]


@pytest.fixture
def start(checkpoint: tuple[Path, Any]) -> Iterator[StartEngine]:
    """`start(connector)` starts a rank with this worker half."""
    started: list[EngineThread] = []

    def start_(connector: RecordingConnector, **settings: Any) -> EngineThread:
        started.append(EngineThread(checkpoint[0], connector=connector, **settings))
        return started[-1]

    yield start_
    for engine in started:
        engine.close()


def test_a_step_that_takes_too_long_is_late_until_it_ends(start: StartEngine) -> None:
    engine = start(None, step_timeout_s=0.5)
    engine.gate.clear()
    engine.scheduler.send(first_plan(engine))
    deadline_s = time.monotonic() + TIMEOUT_S
    while not engine.late or engine.late[-1] is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    late = engine.late[-1]
    assert late is not None
    assert re.fullmatch(
        r"step 1 with 20 tokens has taken [0-9]+ s, more than 1 s \(--step-timeout-s=0.5\)", late
    )
    engine.gate.set()
    assert isinstance(engine.receive(), ModelRunnerOutput)
    num_reports = len(engine.late)
    while len(engine.late) < num_reports + 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert engine.late[-1] is None


def received_of(message: FromWorker) -> tuple[str, ...]:
    assert isinstance(message, TransferReport), message
    return message.finished_receiving


@pytest.mark.req("CON-09")
def test_an_idle_worker_reports_an_ended_transfer_at_once(start: StartEngine) -> None:
    connector = RecordingConnector()
    engine = start(connector)
    assert connector.queues is not None
    for name in ("first", "second"):
        connector.ended.append(FinishedTransfers(received=[name]))
        connector.queues.wake()
        report = engine.receive()
        assert isinstance(report, TransferReport)
        assert (report.epoch, report.rank, report.step) == (EPOCH, 0, 0)
        assert received_of(report) == (name,)
    assert engine.scheduler.receive(0.05) is None


@pytest.mark.req("CON-09")
def test_an_idle_worker_asks_its_connector_at_an_interval(start: StartEngine) -> None:
    connector = RecordingConnector()
    connector.poll_interval_s = 0.005
    num_calls = threading.Semaphore(0)
    connector.on_get_finished = lambda: num_calls.release() or None
    engine = start(connector)
    for _ in range(3):  # nothing wakes the worker
        assert num_calls.acquire(timeout=TIMEOUT_S)
    connector.ended.append(FinishedTransfers(received=["r"]))
    assert received_of(engine.receive()) == ("r",)


def test_an_idle_worker_without_an_interval_waits_to_be_woken(start: StartEngine) -> None:
    connector = RecordingConnector()
    connector.ended.append(FinishedTransfers(received=["r"]))
    engine = start(connector)
    assert engine.scheduler.receive(0.1) is None
    engine.scheduler.send(engine.plans.plan())
    messages = [engine.receive(), engine.receive()]
    kinds = {type(message) for message in messages}
    assert kinds == {TransferReport, ModelRunnerOutput}


@pytest.mark.req("CON-11", "MET-05")
def test_a_rank_that_does_not_sample_reports_the_loads_of_its_steps(start: StartEngine) -> None:
    connector = RecordingConnector()
    connector.failed = [8, 2]
    engine = start(connector, sends_outputs=False)
    plans = engine.plans
    engine.scheduler.send(first_plan(engine, connector_metadata=b"m", has_loads=True))
    engine.scheduler.send(plans.plan(connector_metadata=b"m"))  # it stores, but loads nothing
    engine.scheduler.send(plans.plan())
    engine.scheduler.send(plans.plan(connector_metadata=b"m", has_loads=True))
    for step in (1, 4):
        report = engine.receive()
        assert isinstance(report, TransferReport)
        assert (report.epoch, report.rank, report.step) == (EPOCH, 0, step)
        assert report.failed_block_ids.tolist() == [2, 8]
        assert report.finished_receiving == ()
    assert engine.scheduler.receive(0.05) is None


def test_the_sampling_rank_reports_the_loads_of_its_steps_in_their_outputs(
    start: StartEngine,
) -> None:
    connector = RecordingConnector()
    connector.failed = [8, 2]
    engine = start(connector)
    engine.scheduler.send(first_plan(engine, connector_metadata=b"m", has_loads=True))
    output = engine.receive()
    assert isinstance(output, ModelRunnerOutput)
    assert output.failed_block_ids.tolist() == [2, 8]
    assert engine.scheduler.receive(0.05) is None


@pytest.mark.parametrize("hook", ["start_load_kv", "wait_for_load", "get_finished"])
def test_a_hook_that_raises_ends_the_worker_and_is_named(hook: str, start: StartEngine) -> None:
    connector = RecordingConnector()
    engine = start(connector)
    connector.failing = {hook}
    engine.scheduler.send(first_plan(engine, connector_metadata=b"m"))
    while isinstance(message := engine.receive(), ModelRunnerOutput):
        pass
    assert isinstance(message, WorkerFailed)
    assert (message.epoch, message.rank, message.is_consequence) == (EPOCH, 0, False)
    assert f"{hook} of the connector RecordingConnector raised RuntimeError" in message.reason
    engine.join()
    assert isinstance(engine.error, EngineDead | HookFailed)
