"""Several models behind one gateway: a request names the one that it is for."""

import asyncio
import json
from typing import Any

import pytest

from longshore.deploy.gateway import idle_sleep
from longshore.deploy.gateway.idle_sleep import IdleSleep
from longshore.deploy.model.embedding import EmbeddingModel
from longshore.deploy.requests.errors import Unavailable
from tests.deploy.gateway.conftest import PATIENCE_S, StartGateway
from tests.deploy.span_receiver import span_receiver

HI = [{"role": "user", "content": "Hi"}]
LARGE: dict[str, Any] = {"name": "large", "aliases": ("big",), "max_model_len": 32}
VECTORS: dict[str, Any] = {"name": "vectors", "embedding": EmbeddingModel(4, is_only=True)}
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": HI, "max_tokens": 2}),
    ("/api/chat", {"messages": HI, "stream": False, "options": {"num_predict": 2}}),
    ("/api/generate", {"prompt": "Hi", "stream": False, "options": {"num_predict": 2}}),
)


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_a_request_goes_to_the_model_that_it_names(
    start_gateway: StartGateway, path: str, body: dict[str, Any]
) -> None:
    async with start_gateway(further=[LARGE]) as gateway:
        small, large = gateway.engines
        for name, served, engine in (
            ("tiny", "tiny", small),
            ("large", "large", large),
            ("big", "large", large),
        ):
            before = len(engine.requests)
            answer = await gateway.post(path, {"model": name, **body})
            assert answer.status == 200, answer.body
            assert json.loads(answer.body)["model"] == served
            assert len(engine.requests) == before + 1
        assert (len(small.requests), len(large.requests)) == (1, 2)
        answer = await gateway.post(path, {"model": "huge", **body})
        assert answer.status == 404
        assert "this server serves 'tiny', 'large'" in answer.body.decode()


async def test_the_first_model_gets_what_names_none_and_what_is_no_request(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(further=[LARGE]) as gateway:
        body = {"prompt": "Hi", "max_tokens": 2}
        assert json.loads((await gateway.post("/v1/completions", body)).body)["model"] == "tiny"
        for broken in (b"{", b'{"model": 7, "prompt": "Hi"}', b"[]", b'{"model": "\xff"}'):
            answer = await gateway.post("/v1/completions", broken)
            assert answer.status == 400, broken
        assert gateway.engines[1].requests == []


async def test_each_model_has_its_own_kind_tokens_and_limits(start_gateway: StartGateway) -> None:
    async with start_gateway(further=[LARGE, VECTORS]) as gateway:
        answer = await gateway.post("/v1/completions", {"model": "vectors", "prompt": "Hi"})
        assert b"vectors has no output head" in answer.body
        answer = await gateway.post("/v1/embeddings", {"model": "tiny", "input": "Hi"})
        assert answer.status == 400
        answer = await gateway.post("/tokenize", {"model": "large", "prompt": "Hi"})
        assert json.loads(answer.body)["max_model_len"] == 64  # as the engine says
        shown = await gateway.post("/api/show", {"name": "big:latest"})
        assert json.loads(shown.body)["model_info"]["unknown.context_length"] == 32
        assert b"completion" not in (await gateway.post("/api/show", {"model": "vectors"})).body


async def test_all_models_are_listed_by_their_names(start_gateway: StartGateway) -> None:
    async with start_gateway(further=[LARGE]) as gateway:
        listed = json.loads((await gateway.get("/v1/models")).body)["data"]
        assert [(each["id"], each["max_model_len"]) for each in listed] == [
            ("tiny", 64),
            ("large", 32),
            ("big", 32),
        ]
        assert json.loads((await gateway.get("/v1/models/big")).body)["id"] == "big"
        assert (await gateway.get("/v1/models/huge")).status == 404
        for path in ("/api/tags", "/api/ps"):
            models = json.loads((await gateway.get(path)).body)["models"]
            assert [each["name"] for each in models] == ["tiny", "large", "big"]


async def test_metrics_and_reports_have_all_models(start_gateway: StartGateway) -> None:
    async with start_gateway(further=[LARGE]) as gateway:
        for name, count in (("tiny", 1), ("big", 2)):
            body = {"model": name, "prompt": "Hi", "max_tokens": count}
            assert (await gateway.post("/v1/completions", body)).status == 200
        text = (await gateway.get("/metrics")).body.decode()
        for name, count in (("tiny", 1), ("large", 2)):
            assert f'longshore_generated_tokens_total{{model_name="{name}"}} {count}' in text
            assert f'longshore_ready{{model_name="{name}"}} 1' in text
        heads = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(heads) == len(set(heads))
        assert text.count("\nprocess_cpu_seconds_total ") == 1
        reports = json.loads((await gateway.get("/engine/report")).body)
        assert len(reports) == 2
        assert (await gateway.get("/engine/report?engine=1")).status == 200
        assert (await gateway.get("/engine/report?engine=2")).status == 404
        state = json.loads((await gateway.get("/dashboard/state?engine=1")).body)
        assert (state["model"], state["engines"]) == ("large", [0, 1])


async def test_a_lost_engine_is_named_with_its_model(start_gateway: StartGateway) -> None:
    async with start_gateway(further=[LARGE]) as gateway:
        gateway.engines[1].fail("out of luck")
        async with asyncio.timeout(PATIENCE_S):
            while (answer := await gateway.get("/ready")).status == 200:
                await asyncio.sleep(0.01)
        assert answer.body.startswith(b"large: ")
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
        assert (await gateway.post("/v1/completions", body)).status == 200


class _Engines:
    """Those of a model, and the supervisor that they obey. refuses: the next action is refused."""

    def __init__(self) -> None:
        self.clients = {3: None, 5: None}
        self.num_live_requests = 0
        self.is_asleep = False
        self.actions: list[tuple[str, int]] = []
        self.refuses = False

    async def perform(self, action: dict[str, Any]) -> bool:
        self.actions.append((action["action"], action["engine"]))
        if self.refuses:
            raise Unavailable("the supervisor does not answer")
        self.is_asleep = action["action"] == "sleep"
        return True


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> _Engines:
    monkeypatch.setattr(idle_sleep, "POLL_S", 0.01)
    monkeypatch.setattr(idle_sleep, "RETRY_S", 0.01)
    return _Engines()


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_engines_sleep_when_idle_and_wake_for_a_request(engines: _Engines) -> None:
    idle: Any = IdleSleep("tiny", engines, 0.1, engines.perform)  # type: ignore[arg-type]
    task = asyncio.create_task(idle.run())
    engines.num_live_requests = 1
    await asyncio.sleep(0.25)
    assert engines.actions == []
    engines.num_live_requests = 0
    await until(lambda: engines.is_asleep)
    assert engines.actions == [("sleep", 3), ("sleep", 5)]
    idle.note_request()
    await until(lambda: not engines.is_asleep)
    assert engines.actions[2:] == [("wake", 3), ("wake", 5)]
    await until(lambda: engines.is_asleep)
    task.cancel()


async def test_a_client_says_how_long_a_model_stays_awake(engines: _Engines) -> None:
    idle: Any = IdleSleep("tiny", engines, 0.05, engines.perform)  # type: ignore[arg-type]
    idle.keep_for(float("inf"))
    task = asyncio.create_task(idle.run())
    await asyncio.sleep(0.2)
    assert engines.actions == []
    idle.keep_for(0)
    await until(lambda: engines.is_asleep)
    assert idle.sleeps_in_s == 0
    idle.note_request()
    assert 0 < idle.sleeps_in_s <= 0.05  # from now on as at the beginning
    task.cancel()


async def test_what_the_supervisor_refuses_is_tried_again(engines: _Engines) -> None:
    idle: Any = IdleSleep("tiny", engines, 0.01, engines.perform)  # type: ignore[arg-type]
    engines.refuses = True
    task = asyncio.create_task(idle.run())
    await until(lambda: len(engines.actions) > 4)
    assert not engines.is_asleep
    engines.refuses = False
    await until(lambda: engines.is_asleep)
    engines.refuses = True
    engines.num_live_requests = 1
    num_actions = len(engines.actions)
    await until(lambda: len(engines.actions) > num_actions + 4)
    engines.refuses = False
    await until(lambda: not engines.is_asleep)
    task.cancel()


async def test_spans_name_the_model_of_their_request(start_gateway: StartGateway) -> None:
    with span_receiver() as collector:
        url = f"{collector.url}/v1/traces"
        async with start_gateway(further=[LARGE], otlp_traces_endpoint=url) as gateway:
            for name in ("large", "tiny"):
                body = {"model": name, "prompt": "Hi", "max_tokens": 2}
                assert (await gateway.post("/v1/completions", body)).status == 200
    spans = sorted(collector.named("llm_request"), key=lambda span: span.begin_s)
    models = [span.attributes["gen_ai.response.model"] for span in spans]
    assert models == ["large", "tiny"]
