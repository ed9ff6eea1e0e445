"""The worker's loop over a real channel, with its scheduler in the test."""

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from longshore.protocol.arrays import UInt8Array, int32_array
from longshore.protocol.errors import EngineDead, LongshoreError, PlanMismatch
from longshore.protocol.handshake import FromWorker, ToWorker, WorkerAccepted
from longshore.protocol.outputs import ModelRunnerOutput, WorkerFailed
from longshore.protocol.plan import SampleMask, Shutdown
from longshore.protocol.statistics import WorkerStats
from longshore.protocol.transport.channel import (
    Channel,
    Endpoint,
    open_socket,
)
from longshore.worker.config import WorkerConfig
from longshore.worker.process.engine_loop import WorkerEngine
from longshore.worker.step.compute_queue import CpuComputeQueue
from longshore.worker.worker import Worker
from tests.worker.plans import Entry, Planner

TIMEOUT_S = 60.0
EPOCH = 3
DEVICE_BYTES = 4096


class EngineThread:
    """A WorkerEngine in a thread, and the scheduler's end of its channel."""

    def __init__(self, model: Path, *, sends_outputs: bool = True) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="longshore-test-"))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoint = Endpoint(f"ipc://{self.directory}/worker-0")
        self.scheduler: Channel[ToWorker, FromWorker] = Channel(
            open_socket(self.context, zmq.DEALER, endpoint, bind=True), FromWorker
        )
        self._channel: Channel[FromWorker, ToWorker] = Channel(
            open_socket(self.context, zmq.DEALER, endpoint, bind=False), ToWorker
        )
        config = WorkerConfig(model=str(model), num_blocks=40, max_num_seqs=8, show_progress=False)
        self.gate = threading.Event()
        self.gate.set()
        self._worker = Worker(config)
        queue = CpuComputeQueue(before_each=lambda: assert_opens(self.gate))
        runner = self._worker.start(epoch=EPOCH, queue=queue)
        self.plans = Planner(num_blocks=40, block_size=16, epoch=EPOCH)
        self.error: LongshoreError | None = None
        engine = WorkerEngine(
            self._channel,
            runner,
            epoch=EPOCH,
            rank=0,
            sends_outputs=sends_outputs,
            device_bytes=lambda: DEVICE_BYTES,
        )
        self._thread = threading.Thread(target=self._run, args=(engine,))
        self._thread.start()

    def _run(self, engine: WorkerEngine) -> None:
        try:
            engine.run()
        except LongshoreError as error:
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
        self._channel.close()
        self.context.term()
        shutil.rmtree(self.directory)


def assert_opens(gate: threading.Event) -> None:
    assert gate.wait(TIMEOUT_S)


@pytest.fixture
def engine(checkpoint: tuple[Path, Any]) -> Iterator[EngineThread]:
    engine = EngineThread(checkpoint[0])
    yield engine
    engine.close()


def first_plan(engine: EngineThread) -> Any:
    return engine.plans.plan({0: 20}, added=[Entry(0, range(3, 23))])


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
        (SampleMask(EPOCH, 1, int32_array([0]), BITS), "structured output"),
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
