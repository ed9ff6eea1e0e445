"""The scheduler as a real process: handshake, requests, failures, shutdown."""

import time
from collections.abc import Iterator

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from longshore.protocol.errors import MessagesLost
from longshore.protocol.handshake import (
    EngineReady,
    Feature,
    Rejected,
    ToClient,
    WorkerAccepted,
    WorkerReady,
)
from longshore.protocol.outputs import (
    EngineFailed,
    EngineOutputs,
    FinishReason,
    ModelRunnerOutput,
    WorkerFailed,
)
from longshore.protocol.requests import AbortRequests, AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.transport.channel import ClientChannel
from longshore.protocol.transport.lifeline import (
    EXIT_SUPERVISOR_GONE,
    STOP_SIGNAL,
    Failed,
    Progress,
    Ready,
)
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.process.operator_commands import WORK_PER_TURN
from tests.harness.sockets import sending
from tests.integration.engine_process import (
    IDENTITY,
    TIMEOUT_S,
    EngineProcess,
    ScriptedWorker,
    ready_engine,
    running_engine,
)
from tests.scheduler.worker_reports import report


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    with running_engine() as process:
        yield process


@pytest.mark.req("SYS-01")
def test_engine_reports_progress_then_ready_with_its_blocks(engine: EngineProcess) -> None:
    assert isinstance(engine.next_report(), Progress)
    assert engine.start_worker(num_blocks=500) == WorkerAccepted(epoch=1, num_blocks=500)
    assert engine.next_report() == Progress("waiting for the worker to warm up")
    engine.worker.send(WorkerReady(0))
    assert engine.next_report() == Ready(
        {"num_blocks": "500", "block_sizes": "16", "kv_cache_tokens": "7984"}
    )
    loaded = {path.path for path in psutil.Process(engine.process.pid).memory_maps()}
    assert not [path for path in loaded if "torch" in path or "cuda" in path]


def test_configured_number_of_blocks_caps_what_the_worker_offers() -> None:
    with running_engine(cache=CacheConfig(num_blocks=300)) as engine:
        assert engine.start_worker(num_blocks=500) == WorkerAccepted(epoch=1, num_blocks=300)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol_version", 99),
        ("model_fingerprint", "another model"),
        ("dtype", "bfloat16"),
        ("hash_seed_digest", "another seed"),
        ("max_num_seqs", 7),
    ],
)
def test_worker_that_differs_is_rejected_with_both_values(
    engine: EngineProcess, field: str, value: object
) -> None:
    answer = engine.start_worker(identity=msgspec.structs.replace(IDENTITY, **{field: value}))
    assert isinstance(answer, Rejected)
    for part in (field, repr(value), repr(getattr(IDENTITY, field))):
        assert part in answer.reason
    assert engine.wait() == 1


def test_pool_that_cannot_hold_the_longest_request_is_rejected_at_start(
    engine: EngineProcess,
) -> None:
    answer = engine.start_worker(num_blocks=128)
    assert isinstance(answer, Rejected)
    assert "max_model_len=2048" in answer.reason
    assert "num_blocks=128 are too few" in answer.reason
    assert isinstance(engine.next_report(), Progress)
    report = engine.next_report()
    assert isinstance(report, Failed)
    assert report.reason == answer.reason


@pytest.mark.req("SYS-03")
def test_requests_are_answered_token_by_token(engine: EngineProcess) -> None:
    client = ready_engine(engine)
    ScriptedWorker(engine)
    client.add(1, prompt_len=40, max_tokens=5)
    client.add(2, prompt_len=7, max_tokens=3)
    client.receive_until(lambda: len(client.finished) == 2)
    assert client.tokens == {1: [40, 41, 42, 43, 44], 2: [7, 8, 9]}
    assert client.finished[1].reason is FinishReason.LENGTH_CAPPED
    assert client.finished[1].num_output_tokens == 5


@pytest.mark.req("SYS-06")
def test_each_client_gets_its_own_tokens_under_its_own_handles(engine: EngineProcess) -> None:
    first = ready_engine(engine)
    second, answer = engine.connect()
    assert isinstance(answer, EngineReady)
    ScriptedWorker(engine)
    first.channel.send(_request("a", 5, prompt_len=10))
    second.channel.send(_request("b", 5, prompt_len=20))
    first.receive_until(lambda: 5 in first.finished)
    second.receive_until(lambda: 5 in second.finished)
    assert first.tokens == {5: [10, 11]}
    assert second.tokens == {5: [20, 21]}


def _request(request_id: str, handle: int, *, prompt_len: int) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        handle=handle,
        prompt_token_ids=np.arange(prompt_len, dtype=np.int32),
        sampling=SamplingParams(temperature=0, max_tokens=2),
    )


def test_steady_decode_keeps_two_steps_in_flight(engine: EngineProcess) -> None:
    client = ready_engine(engine)
    ScriptedWorker(engine, before_answer=lambda plan: time.sleep(0.002))
    client.add(1, prompt_len=20, max_tokens=1500)
    client.receive_until(lambda: len(client.steps_in_flight) >= 3)
    assert client.steps_in_flight[1] == pytest.approx(2.0, abs=0.01)


def test_garbage_from_a_client_is_dropped_and_the_next_message_served(
    engine: EngineProcess,
) -> None:
    client = ready_engine(engine)
    ScriptedWorker(engine)
    for garbage in ([b""], [b"\xc1\xff"], [b"a"] * 9):
        client.channel.socket.send_multipart(garbage)
    client.send_raw({"type": "reboot"})
    client.add(1, max_tokens=2)
    client.receive_until(lambda: 1 in client.finished)
    assert client.tokens[1] == [40, 41]


def test_a_request_that_cannot_be_read_is_rejected_under_its_handle(engine: EngineProcess) -> None:
    client = ready_engine(engine)
    ScriptedWorker(engine)
    add = msgspec.to_builtins(_request("a", 3, prompt_len=0), builtin_types=(np.ndarray,))
    add |= {"type": "add", "prompt_token_ids": ("<i4", b"")}
    for handle, change in (
        (3, {"colour": "red"}),
        (4, {"prompt_token_ids": ("<i4", 7)}),
        (5, {"request_id": 5, "sampling": {"temperature": -1}}),
    ):
        client.send_raw(add | {"handle": handle} | change)
    for unanswered in ({"handle": "six", "colour": "red"}, {"handle": -1, "colour": "red"}):
        client.send_raw(add | unanswered)
    client.add(7, max_tokens=2)
    client.receive_until(lambda: 7 in client.finished)
    assert set(client.finished) == {3, 4, 5, 7}
    for handle, words in ((3, "colour"), (4, "frame 7"), (5, "message 'add'")):
        assert client.finished[handle].reason is FinishReason.ERROR
        assert words in (client.finished[handle].message or "")
    engine.process.send_signal(STOP_SIGNAL)
    assert engine.wait() == 0
    assert engine.process.stderr is not None
    assert engine.process.stderr.read().count("of client 0 rejected: message 'add'") == 3


@pytest.mark.parametrize(
    "message",
    [
        {"type": "continue", "prompt_token_ids": 7},
        {"type": "stop_found", "num_tokens": "three"},
    ],
)
def test_a_message_that_cannot_be_read_ends_the_request_it_is_about(
    engine: EngineProcess, message: dict[str, object]
) -> None:
    client = ready_engine(engine)
    ScriptedWorker(engine, before_answer=lambda plan: time.sleep(0.001))
    client.add(1, max_tokens=1500)
    client.receive_until(lambda: len(client.tokens.get(1, [])) > 3)
    for handle in (1, 2):  # no client has the second one
        client.send_raw(message | {"handle": handle})
    client.receive_until(lambda: 1 in client.finished)
    assert client.finished[1].reason is FinishReason.ERROR
    assert f"message '{message['type']}'" in (client.finished[1].message or "")
    client.add(3, max_tokens=2)
    client.receive_until(lambda: 3 in client.finished)
    assert set(client.finished) == {1, 3}


def test_a_malformed_request_of_a_stranger_is_dropped(engine: EngineProcess) -> None:
    client = ready_engine(engine)
    with engine.context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"ipc://{engine.runtime_dir}/clients")
        client.channel = ClientChannel(stranger, ToClient)
        client.send_raw({"type": "add", "handle": 1})
        client.add(2)
        assert isinstance(client.receive(), Rejected)  # of the second
        with pytest.raises(MessagesLost):
            client.receive()


def test_a_client_that_lost_a_message_is_disconnected_and_its_requests_end(
    engine: EngineProcess,
) -> None:
    first, second = ready_engine(engine), engine.connect()[0]
    ScriptedWorker(engine, before_answer=lambda plan: time.sleep(0.002))
    for handle, client in enumerate((first, second)):
        client.add(handle, max_tokens=1500)
        client.receive_until(lambda c=client, h=handle: len(c.tokens.get(h, [])) > 3)
    with sending(first.channel, times=0):
        first.add(2)
    first.channel.ping()
    with pytest.raises(MessagesLost):
        first.receive_until(lambda: False)
    second.receive_until(lambda: second.stats is not None and second.stats.num_running == 1)
    again, answer = engine.connect()
    assert isinstance(answer, EngineReady)
    again.add(2, max_tokens=2)
    again.receive_until(lambda: 2 in again.finished)
    assert again.tokens[2] == [40, 41]


def test_request_before_the_hello_is_rejected(engine: EngineProcess) -> None:
    client = ready_engine(engine)
    with engine.context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"ipc://{engine.runtime_dir}/clients")
        client.channel = ClientChannel(stranger, ToClient)
        client.add(1)
        answer = client.receive()
    assert isinstance(answer, Rejected)
    assert "ClientHello" in answer.reason


def test_client_of_another_model_is_rejected_with_both_fingerprints(engine: EngineProcess) -> None:
    ready_engine(engine)
    _, answer = engine.connect(model_fingerprint="another model")
    assert isinstance(answer, Rejected)
    assert "another model" in answer.reason
    assert IDENTITY.model_fingerprint in answer.reason


def test_abort_leaves_the_row_in_the_next_plan(engine: EngineProcess) -> None:
    client = ready_engine(engine)
    worker = ScriptedWorker(engine, before_answer=lambda plan: time.sleep(0.001))
    client.add(1, max_tokens=1500)
    client.receive_until(lambda: len(client.tokens.get(1, [])) > 3)
    client.channel.send(AbortRequests(np.array([1], np.int32)))
    client.receive_until(lambda: 1 in client.finished)
    assert client.finished[1].reason is FinishReason.ABORTED
    deadline = time.monotonic() + TIMEOUT_S
    while worker.rows.num_rows and time.monotonic() < deadline:
        time.sleep(0.005)
    assert worker.plans[-1].finished_rows.tolist() == [0]


def test_requests_of_a_client_that_vanished_are_aborted(engine: EngineProcess) -> None:
    client = ready_engine(engine)
    worker = ScriptedWorker(engine, before_answer=lambda plan: time.sleep(0.001))
    client.add(1, max_tokens=1900)
    client.receive_until(lambda: len(client.tokens.get(1, [])) > 3)
    client.channel.socket.close(linger=0)
    deadline = time.monotonic() + TIMEOUT_S
    while (not worker.plans or worker.rows.num_rows) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert worker.rows.num_rows == 0
    assert worker.plans[-1].step < 1900


def test_aborts_of_many_requests_leave_turns_to_the_streams_of_others(
    engine: EngineProcess,
) -> None:
    """One message aborts 3,000 requests. No turn of the loop ends more than WORK_PER_TURN, and the
    stream of another client gets tokens in between."""
    streaming = ready_engine(engine)
    leaving, _ = engine.connect()
    worker = ScriptedWorker(engine, before_answer=lambda plan: time.sleep(0.005))
    streaming.add(3000, max_tokens=500)
    streaming.receive_until(lambda: bool(streaming.tokens))
    for handle in range(3000):
        leaving.add(handle, max_tokens=100)
    leaving.receive_until(lambda: leaving.stats is not None and leaving.stats.num_waiting > 2800)
    leaving.channel.send(AbortRequests(np.arange(3000, dtype=np.int32)))
    plans_at_ends = []
    num_left = 3000 - len(leaving.finished)
    while num_left:
        message = leaving.receive()
        assert isinstance(message, EngineOutputs)
        assert len(message.finished) <= 2 * WORK_PER_TURN  # of a turn, and of a step
        num_left -= len(message.finished)
        if message.finished:
            plans_at_ends.append(len(worker.plans))
    assert len(plans_at_ends) >= 2800 // (2 * WORK_PER_TURN)
    assert plans_at_ends[-1] > plans_at_ends[0]  # how many more depends on the machine's load
    streaming.receive_until(lambda: len(streaming.finished) == 1)


def test_requests_of_a_lost_connection_can_be_sent_again_at_once(engine: EngineProcess) -> None:
    """The requests of the old connection end in several turns; none of them is read before that."""
    client = ready_engine(engine)
    worker = ScriptedWorker(engine, answers=False)
    for handle in range(1000):
        client.add(handle, prompt_len=200)
    with sending(client.channel, times=0):
        client.add(1000)
    client.channel.ping()
    with pytest.raises(MessagesLost):
        client.receive_until(lambda: False)
    again, answer = engine.connect()
    assert isinstance(answer, EngineReady)
    for handle in range(1000):
        again.add(handle, prompt_len=200)
    again.receive_until(
        lambda: (
            again.stats is not None and again.stats.num_running + again.stats.num_waiting == 1000
        )
    )
    assert not again.finished  # a request that is live already would have been rejected
    assert worker.plans


def test_failing_worker_fails_the_engine_and_tells_the_clients_why(engine: EngineProcess) -> None:
    client = ready_engine(engine)
    engine.worker.send(WorkerFailed(epoch=1, rank=0, reason="the device caught fire"))
    answer = client.receive()
    assert isinstance(answer, EngineFailed)
    assert "caught fire" in answer.reason
    assert engine.wait() == 1


def test_answer_to_a_step_never_planned_fails_the_engine(engine: EngineProcess) -> None:
    client = ready_engine(engine)
    engine.worker.send(ModelRunnerOutput(epoch=1, step=5))
    answer = client.receive()
    assert isinstance(answer, EngineFailed)
    assert "step 5" in answer.reason


def test_answer_of_another_epoch_is_dropped() -> None:
    with running_engine(epoch=4) as engine:
        client = ready_engine(engine)
        engine.worker.send(
            ModelRunnerOutput(epoch=3, step=1, sampled_tokens=np.array([9], np.int32))
        )
        ScriptedWorker(engine, epoch=4)
        client.add(1, max_tokens=2)
        client.receive_until(lambda: 1 in client.finished)
        assert client.tokens[1] == [40, 41]


def test_clients_get_the_statistics_of_the_rank_that_sent_them(engine: EngineProcess) -> None:
    client = ready_engine(engine)
    engine.worker.send(report(epoch=1, num_steps=5))
    for stranger in (report(epoch=1, rank=1), report(epoch=2, num_steps=6)):
        engine.worker.send(stranger)
    engine.worker.socket.send(msgspec.msgpack.encode({"type": "stats", "epoch": 1}))
    ScriptedWorker(engine)
    client.add(1)
    client.receive_until(lambda: client.stats is not None and client.stats.num_bad_messages == 3)
    assert client.stats is not None
    assert client.stats.workers == (report(epoch=1, num_steps=5),)


def test_a_client_that_comes_to_an_idle_engine_gets_its_statistics(engine: EngineProcess) -> None:
    first = ready_engine(engine)
    first.receive_until(lambda: first.stats is not None)
    second, _ = engine.connect()
    second.receive_until(lambda: second.stats is not None)
    assert second.stats == first.stats


def test_being_told_to_stop_shuts_the_worker_down_and_exits_with_zero(
    engine: EngineProcess,
) -> None:
    ready_engine(engine)
    worker = ScriptedWorker(engine)
    engine.process.send_signal(STOP_SIGNAL)
    assert engine.wait() == 0
    worker.thread.join(TIMEOUT_S)
    assert worker.shutdown is not None


def test_a_connector_stores_what_is_left_before_the_process_stops() -> None:
    connector = "tests.integration.closing_tier:LateStores"
    with running_engine(kv_connector=connector) as engine:
        client = ready_engine(engine, features=(Feature.KV_CONNECTOR,))
        ScriptedWorker(engine, before_answer=lambda plan: time.sleep(0.01))
        client.add(1, prompt_len=3, max_tokens=1)
        client.receive_until(lambda: bool(client.finished))
        engine.process.send_signal(STOP_SIGNAL)
        assert engine.wait() == 0
        assert engine.process.stderr is not None
        assert "0 plans are left" in engine.process.stderr.read().splitlines()[-1]


def test_process_ends_and_cleans_up_when_its_supervisor_is_gone(engine: EngineProcess) -> None:
    ready_engine(engine)
    engine.drop_lifeline()
    assert engine.wait() == EXIT_SUPERVISOR_GONE
    assert not engine.runtime_dir.exists()
