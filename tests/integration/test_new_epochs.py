"""A real scheduler process whose workers end and are replaced."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from longshore.protocol.commands import DescribeState, Sleep, Wake
from longshore.protocol.handshake import EngineReady, WorkerAccepted, WorkerAsleep, WorkerReady
from longshore.protocol.outputs import (
    EngineContinues,
    EnginePaused,
    FinishReason,
    ModelRunnerOutput,
    WorkerFailed,
)
from longshore.protocol.plan import BeginSleep, EndSleep, SchedulerOutput
from longshore.protocol.requests import AbortRequests
from longshore.protocol.transport.lifeline import STOP_SIGNAL, Alive, Failed, Progress, Ready
from longshore.scheduler.step.token_budget import MIN_TOKENS
from tests.integration.engine_process import (
    IDENTITY,
    TIMEOUT_S,
    Client,
    EngineProcess,
    ScriptedWorker,
    ready_engine,
    running_engine,
)

WHY = "worker 0 was killed (SIGKILL)."


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    with running_engine(outlives_workers=True) as process:
        yield process


def slowly(plan: SchedulerOutput) -> None:
    time.sleep(0.002)


def next_worker(engine: EngineProcess, epoch: int, **settings: Any) -> ScriptedWorker:
    """A worker in place of one that has ended, once it is accepted."""
    answer = engine.start_worker(**settings)
    assert answer == WorkerAccepted(epoch=epoch, num_blocks=1000)
    engine.worker.send(WorkerReady(0))
    return ScriptedWorker(engine, epoch=epoch)


def started(engine: EngineProcess, num_requests: int = 3) -> Client:
    """An engine with running requests, each of which has some tokens."""
    client = ready_engine(engine)
    ScriptedWorker(engine, before_answer=slowly)
    for handle in range(num_requests):
        client.add(handle, prompt_len=40 + handle, max_tokens=600)
    client.receive_until(
        lambda: all(len(client.tokens.get(handle, [])) > 3 for handle in range(num_requests))
    )
    return client


def assert_whole(client: Client, handle: int, num_tokens: int = 600) -> None:
    """The tokens of a scripted worker show where they were sampled."""
    first = 40 + handle
    assert client.tokens[handle] == [n % 1000 for n in range(first, first + num_tokens)]


@pytest.mark.parametrize("has_noticed", [False, True])
def test_requests_go_on_with_a_new_worker_and_no_token_is_lost_or_repeated(
    engine: EngineProcess, has_noticed: bool
) -> None:
    """The scheduler may hear of the end from the worker, from its socket or from the supervisor."""
    client = started(engine)
    if has_noticed:
        engine.worker.send(WorkerFailed(epoch=1, rank=0, reason="the device caught fire"))
    engine.end_workers(WHY)
    worker = next_worker(engine, 2, num_blocks=1200)
    client.receive_until(lambda: len(client.finished) == 3)
    for handle in range(3):
        assert_whole(client, handle)
    assert client.pauses == [EnginePaused(WHY), EngineContinues("engine-0.2")]
    first = worker.plans[0]
    assert (first.epoch, first.step, first.previous_step) == (2, 1, 0)
    started_ids = [start.request_id for start in first.added]
    assert started_ids == ["request-0", "request-1", "request-2"], "in admission order"


def test_workers_that_lack_memory_get_smaller_steps_and_at_last_fewer_requests(
    engine: EngineProcess,
) -> None:
    client = started(engine)
    budget, epoch = IDENTITY.max_num_batched_tokens, 1
    while budget > MIN_TOKENS:
        budget, epoch = max(MIN_TOKENS, budget // 2), epoch + 1
        engine.end_workers("worker 0: no memory", is_out_of_memory=True)
        worker = next_worker(engine, epoch)
        client.receive_until(lambda: bool(worker.plans))  # noqa: B023
        assert max(plan.num_scheduled_tokens for plan in worker.plans) <= budget
    client.receive_until(lambda: len(engine.workers[0].rows.num_computed.nonzero()[0]) == 3)
    engine.end_workers("worker 0: no memory", is_out_of_memory=True)
    client.receive_until(lambda: 2 in client.finished)
    assert client.finished[2].reason is FinishReason.ERROR
    next_worker(engine, epoch + 1)
    client.receive_until(lambda: len(client.finished) == 3)
    for handle in (0, 1):
        assert_whole(client, handle)


def test_the_supervisor_hears_that_the_scheduler_waits_and_lives(engine: EngineProcess) -> None:
    started(engine)
    engine.end_workers(WHY)
    reports = [engine.next_report()]
    while not reports.count(Alive()) >= 2 or not isinstance(reports[-1], Alive):
        reports.append(engine.next_report())
    assert Progress("waiting for the worker to load the model") in reports
    next_worker(engine, 2)
    while not isinstance(report := engine.next_report(), Ready):
        assert report in (Progress("waiting for the worker to warm up"), Alive())


def test_during_the_pause_requests_are_aborted_and_queued_and_clients_welcomed(
    engine: EngineProcess,
) -> None:
    client = started(engine)
    engine.end_workers(WHY)
    client.receive_until(lambda: bool(client.pauses))
    client.channel.send(AbortRequests(np.array([1], np.int32)))
    client.receive_until(lambda: 1 in client.finished)
    assert client.finished[1].reason is FinishReason.ABORTED
    client.add(3, prompt_len=43, max_tokens=600)
    newcomer, answer = engine.connect()
    assert isinstance(answer, EngineReady)
    assert answer.engine_id == "engine-0.2"
    assert newcomer.receive() == EnginePaused(WHY)
    next_worker(engine, 2)
    client.receive_until(lambda: len(client.finished) == 4)
    for handle in (0, 2, 3):
        assert_whole(client, handle)
    assert newcomer.receive() == EngineContinues("engine-0.2")


def test_a_new_worker_that_ends_during_the_handshake_is_replaced_too(
    engine: EngineProcess,
) -> None:
    client = started(engine)
    engine.end_workers(WHY)
    assert isinstance(engine.start_worker(), WorkerAccepted)
    engine.worker.send(WorkerFailed(epoch=2, rank=0, reason="no memory"))
    engine.end_workers("worker 0: no memory")
    next_worker(engine, 3)
    client.receive_until(lambda: len(client.finished) == 3)
    for handle in range(3):
        assert_whole(client, handle)
    assert client.pauses[-1] == EngineContinues("engine-0.3")


def test_what_a_former_worker_has_sent_does_not_disturb_the_handshake(
    engine: EngineProcess,
) -> None:
    """A hello may be that of a process that has died since, so that a second one may follow."""
    client = started(engine, num_requests=1)
    engine.end_workers(WHY)
    engine.worker.send(WorkerReady(0))
    engine.worker.send(ModelRunnerOutput(1, 900, sampled_tokens=np.array([9], np.int32)))
    engine.worker.send(WorkerFailed(epoch=1, rank=0, reason="the device caught fire"))
    assert isinstance(engine.start_worker(), WorkerAccepted)
    next_worker(engine, 2)
    client.receive_until(lambda: 0 in client.finished)
    assert_whole(client, 0)


@pytest.mark.parametrize("end", ["stopped", "rejected"])
def test_an_engine_that_ends_during_the_pause_says_why(engine: EngineProcess, end: str) -> None:
    started(engine)
    engine.end_workers(WHY)
    if end == "stopped":
        engine.process.send_signal(STOP_SIGNAL)
        assert engine.wait() == 0
        return
    engine.start_worker(identity=msgspec.structs.replace(IDENTITY, model_fingerprint="another"))
    assert engine.wait() == 1
    while not isinstance(report := engine.next_report(), Failed):
        continue
    assert "model_fingerprint='another'" in report.reason


def test_new_workers_with_another_layout_are_not_taken_for_the_former_ones(
    engine: EngineProcess,
) -> None:
    started(engine)
    engine.end_workers(WHY)
    engine.say_hello(block_size=32)
    assert engine.wait() == 1
    while not isinstance(report := engine.next_report(), Failed):
        continue
    assert report.reason.startswith("the restarted workers have kv_cache ")
    assert engine.process.stderr is not None
    assert "Traceback" not in engine.process.stderr.read()


ASLEEP = EnginePaused("put to sleep", is_asleep=True)


def wake(engine: EngineProcess, epoch: int) -> ScriptedWorker:
    """Wake the engine; its worker has as many blocks as before, whatever it offers."""
    engine.send_command(Wake())
    assert engine.worker.receive(TIMEOUT_S) == EndSleep()
    worker = next_worker(engine, epoch, num_blocks=1300)
    assert engine.next_answer().ok
    return worker


def test_a_sleep_ends_an_epoch_and_requests_go_on_in_the_next_one(engine: EngineProcess) -> None:
    client = started(engine)
    asleep = engine.command(Sleep(0.0))
    assert asleep.ok
    assert (asleep.values["running"], asleep.values["waiting"]) == (0, 3)
    assert (asleep.values["is_sleeping"], asleep.values["epoch"]) == (True, 2)
    num_tokens = {handle: len(tokens) for handle, tokens in client.tokens.items()}
    client.add(3, prompt_len=43, max_tokens=600)
    worker = wake(engine, 2)
    client.receive_until(lambda: len(client.finished) == 4)
    for handle in range(4):
        assert_whole(client, handle)
    assert all(count < 600 for count in num_tokens.values()), "they were interrupted"
    assert client.pauses == [ASLEEP, EngineContinues("engine-0.2")]
    assert client.closed_reasons == ["put to sleep", None]
    first = worker.plans[0]
    assert (first.epoch, first.step, first.previous_step) == (2, 1, 0)


def test_a_worker_that_ends_while_it_sleeps_is_put_to_sleep_again(engine: EngineProcess) -> None:
    client = started(engine)
    assert engine.command(Sleep(0.0)).ok
    engine.end_workers(WHY)
    assert engine.start_worker() == BeginSleep()
    engine.worker.send(WorkerAsleep(0))
    while not isinstance(engine.next_report(), Ready):
        pass
    assert engine.command(DescribeState()).values["is_sleeping"] is True
    wake(engine, 3)
    client.receive_until(lambda: len(client.finished) == 3)
    for handle in range(3):
        assert_whole(client, handle)
    assert client.pauses == [ASLEEP, ASLEEP, EngineContinues("engine-0.3")]


def test_a_worker_that_ends_while_it_wakes_is_replaced(engine: EngineProcess) -> None:
    client = started(engine)
    assert engine.command(Sleep(0.0)).ok
    engine.send_command(Wake())
    assert engine.worker.receive(TIMEOUT_S) == EndSleep()
    engine.end_workers(WHY)
    next_worker(engine, 3)
    assert engine.next_answer().ok
    client.receive_until(lambda: len(client.finished) == 3)
    for handle in range(3):
        assert_whole(client, handle)


def test_nothing_is_adopted_from_a_worker_that_is_killed_before_it_sleeps() -> None:
    """Its memory is freed when the one that takes its place sleeps."""
    with running_engine(outlives_workers=True, adopts_kv=True) as engine:
        client = started(engine)
        engine.send_command(Sleep(TIMEOUT_S))  # which waits for the requests
        client.receive_until(lambda: bool(client.closed_reasons))
        engine.end_workers(WHY, were_killed=True)
        assert engine.start_worker() == BeginSleep()
        engine.worker.send(WorkerAsleep(0))
        assert engine.next_answer().ok
        worker = wake(engine, 2)
        client.receive_until(lambda: len(client.finished) == 3)
        for handle in range(3):
            assert_whole(client, handle)
        first = worker.plans[0].added[0]  # the others share its prefix
        assert first.num_computed_tokens == 0


def test_an_engine_that_is_started_asleep_sleeps_until_it_is_woken() -> None:
    with running_engine(is_asleep=True, outlives_workers=True) as engine:
        assert engine.start_worker() == BeginSleep()
        engine.worker.send(WorkerAsleep(0))
        client, answer = engine.connect()
        assert isinstance(answer, EngineReady)
        assert client.receive() == ASLEEP
        client.add(0, prompt_len=40, max_tokens=600)
        wake(engine, 1)
        client.receive_until(lambda: 0 in client.finished)
        assert_whole(client, 0)


def test_an_engine_that_sleeps_shuts_down(engine: EngineProcess) -> None:
    started(engine)
    assert engine.command(Sleep(0.0)).ok
    engine.process.send_signal(STOP_SIGNAL)
    assert engine.wait() == 0
