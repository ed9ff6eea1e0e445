"""Anthropic's Messages API: what reaches the engine, and what the client gets."""

import json
from typing import Any

import pytest

from longshore.deploy.bench.sse_client import HttpAnswer
from longshore.deploy.gateway.api_keys import plain_keys
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest
from tests.deploy.gateway.conftest import PATIENCE_S, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine
from tests.deploy.gateway.http.test_exchange import ids_of
from tests.deploy.tiny_tokenizer import EOS_ID

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": HI}
CACHED: dict[str, Any] = {"type": "ephemeral"}


def says(text: str) -> Any:
    """The engine also reports two cached tokens."""

    def script(engine: FakeEngine, request: AddRequest) -> None:
        for token_id in ids_of(text):
            engine.send_tokens(request, [token_id])
        engine.send_tokens(request, [EOS_ID])
        engine.finish(request, FinishReason.STOPPED, num_output_tokens=len(text) + 1)

    return script


def reaches_the_limit(engine: FakeEngine, request: AddRequest) -> None:
    engine.send_tokens(request, ids_of("abc"))
    engine.finish(request, FinishReason.LENGTH_CAPPED, num_output_tokens=3)


def begins(engine: FakeEngine, request: AddRequest) -> None:
    engine.send_tokens(request, ids_of("ab"))


def events_of(answer: HttpAnswer) -> list[tuple[str, dict[str, Any]]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for _, event in answer.events:
        name, _, data = event.partition(b"\n")
        events.append(
            (name.removeprefix(b"event: ").decode(), json.loads(data.removeprefix(b"data: ")))
        )
    assert all(name == data["type"] for name, data in events)
    return events


def error_of(answer: HttpAnswer) -> dict[str, str]:
    body = json.loads(answer.body)
    assert body["type"] == "error"
    error: dict[str, str] = body["error"]
    assert error.keys() == {"type", "message"}
    return error


async def test_an_answer_is_a_message(start_gateway: StartGateway) -> None:
    async with start_gateway(says("hello")) as gateway:
        answer = await gateway.post("/v1/messages", BODY)
        (asked,) = gateway.engine.requests
    message = json.loads(answer.body)
    assert answer.status == 200
    assert message.pop("id").startswith("msg-")
    num_prompt = len(asked.prompt_token_ids)
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - 2,
            "cache_read_input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "output_tokens": 6,
        },
    }
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert asked.sampling.max_tokens == 9


async def test_a_stream_has_the_events_that_clients_expect(start_gateway: StartGateway) -> None:
    async with start_gateway(says("hey")) as gateway:
        answer = await gateway.post("/v1/messages", {**BODY, "stream": True})
        num_prompt = len(gateway.engine.requests[0].prompt_token_ids)
    events = events_of(answer)
    names = [name for name, _ in events]
    deltas = [data for name, data in events if name == "content_block_delta"]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[3 : 3 + len(deltas)] == ["content_block_delta"] * len(deltas)
    assert names[3 + len(deltas) :] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(data["delta"]["text"] for data in deltas) == "hey"
    start, end = events[0][1]["message"], events[-2][1]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == num_prompt
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["input_tokens"] == num_prompt - 2
    assert end["usage"]["cache_read_input_tokens"] == 2
    assert end["usage"]["output_tokens"] == 4


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_without_text_has_no_block(
    start_gateway: StartGateway, is_stream: bool
) -> None:
    async with start_gateway(says("")) as gateway:
        answer = await gateway.post("/v1/messages", {**BODY, "stream": is_stream})
    if is_stream:
        names = [name for name, _ in events_of(answer)]
        assert names == ["message_start", "ping", "message_delta", "message_stop"]
    else:
        assert json.loads(answer.body)["content"] == []


@pytest.mark.parametrize(
    ("script", "settings", "stop", "sequence"),
    [
        (says("hello"), {"stop_sequences": ["x", "ell"]}, "stop_sequence", "ell"),
        (reaches_the_limit, {"max_tokens": 3}, "max_tokens", None),
        (reaches_the_limit, {"max_tokens": 30}, "model_context_window_exceeded", None),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_reason_of_the_end_is_named(
    start_gateway: StartGateway,
    script: Any,
    settings: Any,
    stop: str,
    sequence: str | None,
    is_stream: bool,
) -> None:
    async with start_gateway(script) as gateway:
        answer = await gateway.post("/v1/messages", {**BODY, **settings, "stream": is_stream})
    end = events_of(answer)[-2][1]["delta"] if is_stream else json.loads(answer.body)
    assert (end["stop_reason"], end["stop_sequence"]) == (stop, sequence)


async def test_the_prompt_is_that_of_the_same_chat(start_gateway: StartGateway) -> None:
    conversation = {
        "system": [{"type": "text", "text": "Be", "cache_control": CACHED}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": CACHED}]},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
    }
    chat = [
        {"role": "system", "content": "Be"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    async with start_gateway(says("d")) as gateway:
        await gateway.post("/v1/messages", {**BODY, **conversation})
        await gateway.post("/v1/chat/completions", {"messages": chat})
        count = await gateway.post("/v1/messages/count_tokens", {"model": "tiny", **conversation})
        ours, theirs = (r.prompt_token_ids.tolist() for r in gateway.engine.requests)
    assert ours == theirs
    assert json.loads(count.body) == {"input_tokens": len(ours)}


async def test_turns_of_the_same_role_are_one(start_gateway: StartGateway) -> None:
    split = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with start_gateway(says("c")) as gateway:
        await gateway.post("/v1/messages", {**BODY, "messages": split})
        await gateway.post(
            "/v1/messages", {**BODY, "messages": [{"role": "user", "content": blocks}]}
        )
        one, other = (r.prompt_token_ids.tolist() for r in gateway.engine.requests)
    assert one == other


async def test_an_answer_continues_the_assistants_last_message(start_gateway: StartGateway) -> None:
    begun = [*HI, {"role": "assistant", "content": "It is"}]
    async with start_gateway(says(" here")) as gateway:
        answer = await gateway.post("/v1/messages", {**BODY, "messages": begun})
        (asked,) = gateway.engine.requests
    assert asked.prompt_token_ids.tolist()[-5:] == ids_of("It is")
    assert json.loads(answer.body)["content"] == [{"type": "text", "text": " here"}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "t", "input_schema": {}}]}, "tools"),
        ({"tools": [{"name": "t"}]}, "tools.0.input_schema"),
        (
            {
                "tools": [{"name": "web", "type": "web_search_20250305"}],
                "tool_choice": {"type": "tool", "name": "web"},
            },
            "tool_choice needs tools",
        ),
        ({"tool_choice": {"type": "tool", "name": "t"}}, "tool_choice"),
        ({"output_config": {"effort": 5}}, "output_config"),
        ({"thinking": {"type": "always"}}, "thinking"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format: ",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"stop": ["x"]}, "stop is not supported"),
        ({"guided_regex": "x"}, "guided_regex"),
        ({"n": 2}, "n is not supported"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"system": [{"type": "image"}]}, "system.0"),
        (
            {
                "system": [{"type": "text", "text": "a", "cache_control": CACHED}] * 4,
                "cache_control": CACHED,
            },
            "at most 4",
        ),
        ({"no_store": True, "cache_salt": "s"}, "no_store"),
        ({"deadline_s": 0}, "deadline_s"),
    ],
)
async def test_what_is_invalid_or_unsupported_is_rejected_by_name(
    start_gateway: StartGateway, change: dict[str, Any], words: str
) -> None:
    body = {key: value for key, value in {**BODY, **change}.items() if value is not None}
    async with start_gateway() as gateway:
        answer = await gateway.post("/v1/messages", body)
        assert gateway.engine.requests == []
    assert answer.status == 400
    assert error_of(answer)["type"] == "invalid_request_error"
    assert words in error_of(answer)["message"]


async def test_parameters_without_effect_are_accepted(start_gateway: StartGateway) -> None:
    neutral = {
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [],
        "service_tier": "auto",
        "n": 1,
        "frequency_penalty": 0,
        "spare": 1,
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
    }
    async with start_gateway(says("x")) as gateway:
        assert (await gateway.post("/v1/messages", {**BODY, **neutral})).status == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_errors_have_anthropics_types(start_gateway: StartGateway, path: str) -> None:
    body = {"model": "other", "messages": HI}
    if path == "/v1/messages":
        body["max_tokens"] = 1
    async with start_gateway(api_keys=plain_keys(["secret"], "all")) as gateway:

        async def ask(content: bytes, **headers: str) -> HttpAnswer:
            return await gateway.client.request(
                "POST", path, content, timeout_s=PATIENCE_S, headers=headers
            )

        unknown = await ask(b"{}", **{"x-api-key": "guess"})
        none = await ask(json.dumps(body).encode(), **{"x-api-key": "secret"})
        large = await ask(b"[" * 5000, **{"x-api-key": "secret"})
        wrong_method = await gateway.client.request(
            "GET", path, timeout_s=PATIENCE_S, headers={"authorization": "Bearer secret"}
        )
    assert (unknown.status, error_of(unknown)["type"]) == (401, "authentication_error")
    assert (none.status, error_of(none)["type"]) == (404, "not_found_error")
    assert (large.status, error_of(large)["type"]) == (413, "request_too_large")
    assert (wrong_method.status, error_of(wrong_method)["type"]) == (405, "invalid_request_error")


async def test_a_stream_that_fails_ends_with_an_error_event(start_gateway: StartGateway) -> None:
    async with start_gateway(begins) as gateway:

        def fail(event: bytes) -> None:
            engine = gateway.engine
            if b"delta" in event:
                engine.finish(
                    engine.requests[0], FinishReason.ERROR, message="logits are not finite"
                )

        answer = await gateway.client.request(
            "POST",
            "/v1/messages",
            json.dumps({**BODY, "stream": True}).encode(),
            timeout_s=PATIENCE_S,
            on_event=fail,
        )
    name, data = events_of(answer)[-1]
    assert name == "error"
    assert data["error"]["type"] == "api_error"
    assert "logits are not finite" in data["error"]["message"]


async def test_a_prompt_that_is_too_long_is_counted_but_not_answered(
    start_gateway: StartGateway,
) -> None:
    long: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 99}]}
    async with start_gateway() as gateway:
        count = await gateway.post("/v1/messages/count_tokens", long)
        answer = await gateway.post("/v1/messages", {**long, "max_tokens": 1})
    assert json.loads(count.body)["input_tokens"] > 99
    assert answer.status == 400
    assert error_of(answer)["message"] == "prompt is too long: 118 tokens > 63 maximum"
