"""Commands of an operator to a real scheduler process with a scripted worker."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from longshore.protocol.commands import (
    DescribeState,
    DrainEngine,
    Pause,
    ResetCache,
    Resume,
    SetLogLevel,
    WriteKVSnapshot,
)
from longshore.protocol.handshake import EngineReady
from longshore.protocol.outputs import AdmissionChanged, FinishReason
from longshore.protocol.plan import SchedulerOutput
from tests.integration.deployment import wait_until
from tests.integration.engine_process import (
    TIMEOUT_S,
    Client,
    EngineProcess,
    ScriptedWorker,
    ready_engine,
    running_engine,
)

LONG = 400


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    with running_engine() as process:
        yield process


class Gate:
    """Lets a scripted worker answer only while it is open."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def __call__(self, plan: SchedulerOutput) -> None:
        assert self._open.wait(TIMEOUT_S)

    def open(self) -> None:
        self._open.set()


def running_request(engine: EngineProcess, gate: Gate | None = None) -> tuple[Client, Gate]:
    """Request 1 runs; its worker answers when the gate opens."""
    client, gate = ready_engine(engine), gate or Gate()
    ScriptedWorker(engine, before_answer=gate)
    client.add(1, max_tokens=LONG)
    wait_until(lambda: engine.command(DescribeState()).values["running"] == 1)
    return client, gate


def test_a_paused_engine_lets_running_requests_finish_and_admits_none(
    engine: EngineProcess,
) -> None:
    client, gate = running_request(engine)
    engine.send_command(Pause("wait", timeout_s=TIMEOUT_S))
    client.receive_until(lambda: client.closed_reasons == ["paused by the operator"])
    client.add(2)
    gate.open()
    answer = engine.next_answer()  # once the first request has finished
    assert answer.ok
    assert (answer.values["pause"], answer.values["running"]) == ("paused_new", 0)
    client.receive_until(lambda: 1 in client.finished)
    wait_until(lambda: engine.command(DescribeState()).values["waiting"] == 1)
    assert 2 not in client.tokens
    assert engine.command(Resume()).ok
    client.receive_until(lambda: 2 in client.finished)
    assert client.closed_reasons == ["paused by the operator", None]
    assert len(client.tokens[1]) == LONG


def test_a_pause_that_waits_in_vain_says_so_and_stays(engine: EngineProcess) -> None:
    client, gate = running_request(engine)
    answer = engine.command(Pause("wait", timeout_s=0.1))
    assert not answer.ok
    assert answer.message == "paused by the operator; 1 requests run and 0 wait after 0.1 s"
    gate.open()
    client.receive_until(lambda: 1 in client.finished)
    assert engine.command(DescribeState()).values["pause"] == "paused_new"


def test_a_pause_that_keeps_requests_stops_them_where_they_are(engine: EngineProcess) -> None:
    client, gate = running_request(engine)
    answer = engine.command(Pause("keep"))
    assert answer.ok
    assert (answer.values["pause"], answer.values["running"]) == ("paused_all", 1)
    gate.open()  # for the plans in flight
    client.receive_until(lambda: 1 in client.tokens)
    with pytest.raises(TimeoutError):
        client.receive_until(lambda: 1 in client.finished, patience_s=1.0)
    assert len(client.tokens[1]) <= 2
    assert engine.command(DescribeState()).values["running"] == 1
    assert engine.command(Resume()).ok
    client.receive_until(lambda: 1 in client.finished)
    assert len(client.tokens[1]) == LONG


def test_a_pause_that_aborts_ends_all_requests(engine: EngineProcess) -> None:
    client, gate = running_request(engine)
    client.add(2, max_tokens=LONG)
    wait_until(
        lambda: (
            sum(int(engine.command(DescribeState()).values[n]) for n in ("running", "waiting")) == 2
        )
    )
    assert engine.command(Pause("abort")).ok
    gate.open()
    client.receive_until(lambda: len(client.finished) == 2)
    assert {end.reason for end in client.finished.values()} == {FinishReason.ABORTED}
    answer = engine.command(DescribeState())
    assert (answer.values["running"], answer.values["waiting"]) == (0, 0)


def test_a_client_that_connects_to_a_paused_engine_is_told(engine: EngineProcess) -> None:
    ready_engine(engine)
    assert engine.command(Pause("keep")).ok
    second, answer = engine.connect()
    assert isinstance(answer, EngineReady)
    assert second.receive() == AdmissionChanged("paused by the operator")


@pytest.mark.parametrize("holds_new", [False, True])
def test_a_drain_ends_when_no_request_is_left_that_the_engine_must_finish(
    engine: EngineProcess, holds_new: bool
) -> None:
    client, gate = running_request(engine)
    engine.send_command(DrainEngine(timeout_s=TIMEOUT_S, holds_new=holds_new))
    client.receive_until(lambda: bool(client.closed_reasons))
    assert client.closed_reasons == ["draining for a restart by the operator"]
    client.add(2)  # a client may not have heard of it yet
    gate.open()
    answer = engine.next_answer()
    assert answer.ok
    client.receive_until(lambda: 1 in client.finished and (holds_new or 2 in client.finished))
    assert (2 in client.tokens) is not holds_new
    for command, after in ((Pause("keep"), "will be paused"), (Resume(), "will not be paused")):
        answer = engine.command(command)
        assert (answer.ok, answer.message) == (True, f"the engine is being restarted, and {after}")


def test_a_drain_that_is_not_final_ends_with_resume(engine: EngineProcess) -> None:
    client, gate = running_request(engine)
    late = engine.command(DrainEngine(0.1, is_final=False))
    assert not late.ok
    assert late.message.startswith("drained by the operator; 1 requests run")
    gate.open()
    assert engine.command(DrainEngine(TIMEOUT_S, is_final=False)).ok
    assert engine.command(Resume()).ok
    client.receive_until(lambda: len(client.closed_reasons) == 2)
    assert client.closed_reasons == ["drained by the operator", None]


def test_the_prefix_cache_is_reset_unless_requests_hold_blocks(engine: EngineProcess) -> None:
    client, gate = running_request(engine)
    answer = engine.command(ResetCache("prefix"))
    assert not answer.ok
    assert answer.message == "the prefix cache was not reset: requests or transfers hold blocks"
    assert engine.command(ResetCache("prefix", preempts=True)).ok
    gate.open()
    client.receive_until(lambda: 1 in client.finished)
    assert len(client.tokens[1]) == LONG  # it was computed again
    assert engine.command(ResetCache("prefix")).ok
    client.add(2)
    client.receive_until(lambda: 2 in client.finished)
    assert client.finished[2].num_cached_tokens == 0  # the same prompt


def test_the_prefix_cache_hits_without_a_reset(engine: EngineProcess) -> None:
    client, gate = running_request(engine)
    gate.open()
    client.receive_until(lambda: 1 in client.finished)
    client.add(2)
    client.receive_until(lambda: 2 in client.finished)
    assert client.finished[2].num_cached_tokens == 32


def test_other_caches_are_reset_or_it_is_said_why_not(engine: EngineProcess) -> None:
    ready_engine(engine)
    assert engine.command(ResetCache("encoder")).ok
    answer = engine.command(ResetCache("connector"))
    assert not answer.ok
    assert "there is no connector" in answer.message


def test_a_snapshot_has_the_blocks_that_a_subscriber_would_know(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.jsonl"
    with running_engine(kv_events={"engine_number": 3}) as engine:
        client, gate = running_request(engine)
        gate.open()
        client.receive_until(lambda: 1 in client.finished)
        answer = engine.command(WriteKVSnapshot(str(path)))
        assert answer.ok
        refused = engine.command(WriteKVSnapshot(str(path)))
    assert not refused.ok
    assert "File exists" in refused.message
    assert path.stat().st_mode & 0o777 == 0o600
    head, *events = map(json.loads, path.read_text().splitlines())
    assert answer.values["num_lines"] == 1 + len(events)
    assert head["engine"] == 3
    assert len(bytes.fromhex(head["publisher_id"])) == 16
    assert {event["type"] for event in events} == {"BlockStored"}
    tokens = [token for event in events for token in event["token_ids"]]
    assert tokens[:40] == list(range(40))  # the prompt
    hashes = [block_hash for event in events for block_hash in event["block_hashes"]]
    assert len(hashes) == len(tokens) // 16 == len(set(hashes))
    assert all(bytes.fromhex(block_hash) for block_hash in hashes)


def test_a_snapshot_needs_events(engine: EngineProcess, tmp_path: Path) -> None:
    ready_engine(engine)
    answer = engine.command(WriteKVSnapshot(str(tmp_path / "snapshot.jsonl")))
    assert not answer.ok
    assert "--enable-kv-cache-events" in answer.message
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_still_starts_takes_only_commands_for_any_process(
    engine: EngineProcess,
) -> None:
    answer = engine.command(DescribeState())
    assert not answer.ok
    assert "still starting" in answer.message
    assert engine.command(SetLogLevel("debug")).ok
