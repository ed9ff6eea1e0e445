"""Unknown fields of a request are ignored and named in the response, or rejected in strict mode."""

import json
from functools import partial
from typing import Any

import msgspec
import pytest

from longshore.deploy.gateway.api.lenient import lenient
from longshore.deploy.gateway.api.parameters import MAX_UNKNOWN_BYTES
from longshore.deploy.gateway.api.requests import ChatRequest
from longshore.deploy.gateway.api.unknown_fields import MAX_NAME_CHARACTERS, MAX_NAMES
from longshore.deploy.gateway.http import middleware
from longshore.deploy.model.embedding import EmbeddingModel
from longshore.protocol.logs.limits import LogLimit
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.gateway.http.test_exchange import error_of

HEADER = "x-longshore-ignored-fields"
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Where?"}]
TEXT: dict[str, Any] = {"type": "text", "text": "Where?"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "p", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1}),
        ("/tokenize", {"prompt": "p"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/responses", {"input": "p", "max_output_tokens": 1}),
        ("/v1/messages", {"model": "tiny", "messages": CHAT, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": CHAT}),
    ],
)
async def test_unknown_fields_are_ignored_and_named(
    start_gateway: StartGateway, path: str, body: dict[str, Any]
) -> None:
    async with start_gateway() as gateway:
        plain = await gateway.post(path, body)
        assert HEADER not in plain.headers
        answer = await gateway.post(path, {"guide": {"a": [1]}, **body, "spare": None})
        assert (plain.status, answer.status) == (200, 200)
        assert answer.headers[HEADER] == "guide, spare"
        assert json.loads(answer.body).keys() == json.loads(plain.body).keys()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/tokenize"])
async def test_strict_requests_have_no_unknown_field(
    start_gateway: StartGateway, path: str
) -> None:
    body = {"input" if path == "/v1/embeddings" else "prompt": "p", "spare": 1}
    async with start_gateway(strict_requests=True, embedding=EmbeddingModel(4)) as gateway:
        answer = await gateway.post(path, body)
        assert answer.status == 400
        assert error_of(answer)["param"] == "spare"
        assert error_of(answer)["code"] == "unknown_parameter"
        assert HEADER not in answer.headers
        assert gateway.engine.requests == []


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"messages": [*CHAT, {**CHAT[0], "type": "text"}]}, "messages[1].type"),
        ({"stream": True, "stream_options": {"spare": 1}}, "stream_options.spare"),
        (
            {"messages": [{**CHAT[0], "x": 1}, {**CHAT[0], "y": 1}], "max_tokens": 1.0},
            "messages[0].x, messages[1].y",
        ),
    ],
)
async def test_fields_of_objects_within_are_treated_alike(
    start_gateway: StartGateway, changes: dict[str, Any], name: str
) -> None:
    body = {"messages": CHAT, "max_tokens": 1, **changes}
    async with start_gateway() as gateway:
        answer = await gateway.post("/v1/chat/completions", body)
        assert answer.status == 200
        assert answer.headers[HEADER] == name
    async with start_gateway(strict_requests=True) as gateway:
        answer = await gateway.post("/v1/chat/completions", body)
        assert answer.status == 400
        assert error_of(answer)["param"] == name.partition(",")[0]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/messages", {"thinking": {"type": "enabled", "spare": 1}}, "thinking.spare"),
        ("/v1/messages", {"cache_control": {"type": "ephemeral", "x": 1}}, "cache_control.x"),
        ("/v1/messages", {"service_tier": "flex"}, "service_tier"),
        ("/v1/responses", {"text": {"format": {"type": "text", "spare": 1}}}, "text.format.spare"),
        ("/v1/responses", {"service_tier": "flex"}, "service_tier"),
        ("/v1/responses", {"input": [{**CHAT[0], "id": "msg_1", "spare": 1}]}, "input[0].spare"),
        ("/v1/messages", {"system": [{**TEXT, "citations": None, "spare": 1}]}, "system[0].spare"),
        ("/v1/chat/completions", {"service_tier": "flex"}, "service_tier"),
    ],
)
async def test_the_other_apis_treat_them_alike(
    start_gateway: StartGateway, path: str, body: dict[str, Any], name: str
) -> None:
    key, value = ("input", "p") if path == "/v1/responses" else ("messages", CHAT)
    whole = {"model": "tiny", key: value, **body}
    if path == "/v1/messages":
        whole["max_tokens"] = 1
    async with start_gateway() as gateway:
        answer = await gateway.post(path, whole)
        assert answer.headers[HEADER] == name
        assert answer.status == 200
    async with start_gateway(strict_requests=True) as gateway:
        assert (await gateway.post(path, whole)).status == 400


async def test_wrong_types_beside_unknown_fields_are_still_rejected(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway() as gateway:
        messages = [{"role": "user", "content": 5, "spare": 1}]
        answer = await gateway.post("/v1/chat/completions", {"messages": messages, "spare": 1})
        assert answer.status == 400
        assert error_of(answer)["param"] == "messages"
        answer = await gateway.post("/v1/completions", {"spare": 1})
        assert error_of(answer)["param"] == "prompt"


async def test_the_header_is_short_and_has_no_characters_of_other_headers(
    start_gateway: StartGateway,
) -> None:
    names = ["a\r\nset-cookie: b=c", "é, 🚢", "n" * 1000, "", *(f"spare{i}" for i in range(50))]
    async with start_gateway() as gateway:
        body = {"prompt": "p", "max_tokens": 1} | dict.fromkeys(names, 1)
        answer = await gateway.post("/v1/completions", body)
        assert answer.status == 200
        assert "set-cookie" not in answer.headers
        shown = answer.headers[HEADER].split(", ")
        assert shown[:4] == ["a??set-cookie??b?c", "????", "n" * MAX_NAME_CHARACTERS, "?"]
        assert len(shown) == MAX_NAMES


async def test_unknown_fields_have_a_limit_of_size(start_gateway: StartGateway) -> None:
    async with start_gateway(max_body_bytes=1 << 20) as gateway:
        for number in (1, 1000):
            size = MAX_UNKNOWN_BYTES // number
            body = {"prompt": "p", "max_tokens": 1} | {f"x{i}": "x" * size for i in range(number)}
            answer = await gateway.post("/v1/completions", body)
            assert answer.status == 400
            assert str(MAX_UNKNOWN_BYTES) in error_of(answer)["message"]
        # The size of known parameters does not count.
        body = {"prompt": "p", "max_tokens": 1, "metadata": "x" * MAX_UNKNOWN_BYTES, "spare": 1}
        answer = await gateway.post("/v1/completions", body)
        assert (answer.status, answer.headers[HEADER]) == (200, "spare")


async def test_the_log_names_them_once_a_second(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(middleware, "LogLimit", partial(LogLimit, clock=lambda: 0.0))
    async with start_gateway() as gateway:
        for _ in range(3):
            body = {"prompt": "p", "max_tokens": 1, "a\nb": 1}
            assert (await gateway.post("/v1/completions", body)).status == 200
    lines = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert lines == ["ignored unknown fields of a request: a?b"]


def test_a_lenient_struct_is_one_of_its_kind() -> None:
    body = b'{"messages":[{"role":"user","content":[{"type":"text","x":1}],"y":1}],"z":1}'
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(body, type=ChatRequest)
    request = msgspec.json.decode(body, type=lenient(ChatRequest))
    assert isinstance(request, ChatRequest)
    assert request.messages[0].role == "user"
    assert request.num_samples == 1
    assert lenient(ChatRequest) is lenient(ChatRequest)
