"""The engine in the caller's own process."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from longshore.deploy.llm import in_process_engine
from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.settings.options import EngineOptions, engine_options
from longshore.deploy.supervisor.engine_plan import plan_engine
from longshore.deploy.trace.reading import read_trace
from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import EngineDead
from longshore.protocol.outputs import EngineOutputs, FinishedRequest, FinishReason
from longshore.protocol.requests import AbortRequests, AddRequest, ContinueSession, RequestOptions
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.features.connector_hooks import ConnectorFailed
from tests.deploy.llm.fake_connector import FakeConnector
from tests.models import make_tiny_llama


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(path)
    return path


def test_an_engine_with_sessions_whose_client_has_the_next_word_is_not_stuck(
    model_dir: Path,
) -> None:
    options = EngineOptions(device="cpu", num_blocks=40, threads=1)
    engine = InProcessEngine(plan_engine(options, read_model_folder(model_dir)))
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)

    def end_of_output() -> FinishedRequest:
        while True:
            outputs = engine.receive()
            if outputs is not None and outputs.finished:
                return outputs.finished[0]

    try:
        engine.send(
            AddRequest(
                "talk", 1, int32_array([5, 6, 7]), sampling, options=RequestOptions(resumable=True)
            )
        )
        assert end_of_output().session_continues
        for _ in range(5):
            assert engine.receive() is None
        engine.send(ContinueSession(1, int32_array([8]), sampling, resumable=False))
        assert not end_of_output().session_continues
    finally:
        engine.close()


def test_an_engine_writes_its_trace(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    settings = {"device": "cpu", "num_blocks": 40, "threads": 1, "sched_trace_path": str(path)}
    engine = InProcessEngine(plan_engine(engine_options(settings), read_model_folder(model_dir)))
    try:
        engine.send(AddRequest("r", 1, int32_array([5, 6, 7]), GREEDY))
        while (outputs := engine.receive()) is None or not outputs.finished:
            pass
    finally:
        engine.close()
    (life,) = read_trace(path).requests
    assert life.request == "r"
    assert life.end is not None
    assert life.end.output_tokens == 3


# With a connector


GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
PROMPT = int32_array(list(range(5, 45)))
Connected = Callable[..., InProcessEngine]


@pytest.fixture
def connected(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connected]:
    """`connected(**options)` opens an engine with the fake connector. Nothing but an event or the
    connector's own interval ends its waits."""
    monkeypatch.setattr(in_process_engine, "TRANSFER_POLL_S", math.inf)
    monkeypatch.setattr(FakeConnector, "num_shutdowns", 0)
    opened: list[InProcessEngine] = []

    def open_(**options: Any) -> InProcessEngine:
        settings = EngineOptions(
            device="cpu",
            num_blocks=40,
            threads=1,
            kv_connector="tests.deploy.llm.fake_connector:FakeConnector",
            kv_connector_config=msgspec.json.encode(options).decode(),
        )
        opened.append(InProcessEngine(plan_engine(settings, read_model_folder(model_dir))))
        return opened[-1]

    yield open_
    for engine in opened:
        engine.close()


def add(engine: InProcessEngine, handle: int = 1) -> None:
    engine.send(AddRequest(f"r{handle}", handle, PROMPT, GREEDY))


def finished(engine: InProcessEngine) -> FinishedRequest:
    while not (isinstance(outputs := engine.receive(), EngineOutputs) and outputs.finished):
        pass
    return outputs.finished[0]


def test_a_request_for_an_idle_engine_with_a_connector_is_planned_at_once(
    connected: Connected,
) -> None:
    engine = connected()
    for handle in (1, 2):
        add(engine, handle)
        assert finished(engine).reason is FinishReason.LENGTH_CAPPED


def test_an_idle_engine_asks_its_connector_at_the_interval_that_it_wants(
    connected: Connected,
) -> None:
    engine = connected(loads=True)
    add(engine)
    assert finished(engine).num_output_tokens == 3


@pytest.mark.parametrize("hook", ["on_new_request", "load_abandoned"])
def test_an_engine_whose_connector_has_failed_in_a_message_is_dead(
    hook: str, connected: Connected
) -> None:
    engine = connected(loads=True, raising=hook)

    def add_and_abort() -> None:
        add(engine)
        assert engine.receive() is None  # the load begins
        engine.send(AbortRequests(int32_array([1])))

    with pytest.raises(ConnectorFailed, match=f"^{hook} of the connector FakeConnector raised"):
        add_and_abort()
    with pytest.raises(EngineDead, match=hook):
        engine.receive()


def test_a_closed_engine_has_shut_down_both_halves_once(connected: Connected) -> None:
    engine = connected()
    engine.close()
    engine.close()
    assert FakeConnector.num_shutdowns == 1
    assert engine.worker.connector is None
