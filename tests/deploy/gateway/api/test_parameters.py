"""What a body may hold is checked before it is decoded."""

import json
from contextvars import copy_context
from typing import Any

import msgspec
import pytest

from longshore.deploy.gateway.api import parameters
from longshore.deploy.gateway.api.errors import status_of, unknown_model
from longshore.deploy.gateway.api.parameters import (
    MAX_ITEMS,
    MAX_OBJECTS,
    MAX_PARAMETER_BYTES,
    MAX_TOKEN_IDS,
    MAX_TOOLS_BYTES,
    read_parameters,
)
from longshore.deploy.gateway.api.requests import ChatRequest
from longshore.deploy.gateway.api.unknown_fields import begin_request
from longshore.deploy.gateway.openai.requests import CompletionRequest
from longshore.deploy.requests.chat_messages import template_input
from longshore.deploy.requests.errors import RequestError
from longshore.protocol.errors import MAX_ECHOED_CHARACTERS

LONG = "n" * 100_000


def items(unit: bytes, number: int) -> bytes:
    return b"[" + b",".join([unit] * number) + b"]"


def body_with(name: str, value: bytes, kind: type[msgspec.Struct]) -> bytes:
    own = b'"prompt":"x"' if kind is CompletionRequest else b'"messages":[]'
    return b'{%b,"%b":%b}' % (own, name.encode(), value)


def rejected(kind: type[msgspec.Struct], body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read_parameters(kind, body)
    assert status_of(caught.value) == 400
    return caught.value


@pytest.mark.parametrize(
    ("kind", "name", "value", "reason"),
    [
        (CompletionRequest, "prompt", items(b"[1]", MAX_ITEMS + 1), f"at most {MAX_ITEMS}"),
        (CompletionRequest, "prompt", items(b'"a"', MAX_ITEMS + 1), f"at most {MAX_ITEMS}"),
        (CompletionRequest, "prompt", items(b"1", MAX_TOKEN_IDS + 1), "token ids"),
        (ChatRequest, "messages", items(b'{"role":"user"}', MAX_OBJECTS + 1), "objects"),
        (CompletionRequest, "prompt", b'["a",' + items(b"[]", 10)[1:], "mixes"),
        (CompletionRequest, "prompt", b"[1," + items(b"[]", 10)[1:], "mixes"),
        (CompletionRequest, "prompt", b"[[1]," + items(b'"a"', 10)[1:], "mixes"),
        (CompletionRequest, "stop", items(b'""', MAX_PARAMETER_BYTES), "bytes of JSON"),
        (CompletionRequest, "bad_words", b'"%b"' % (b"w" * 10**6), "bytes of JSON"),
        (CompletionRequest, "logit_bias", items(b"1", MAX_PARAMETER_BYTES), "bytes of JSON"),
        (ChatRequest, "chat_template_kwargs", items(b"[]", MAX_PARAMETER_BYTES), "bytes of JSON"),
        (CompletionRequest, "tools", items(b"[]", MAX_PARAMETER_BYTES), "not supported"),
        (ChatRequest, "tools", items(b"[]", MAX_TOOLS_BYTES), "bytes of JSON"),
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_what_would_take_long_is_rejected_without_decoding_it(
    kind: type[msgspec.Struct],
    name: str,
    value: bytes,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[type] = []
    read_json = parameters.read_json

    def recording(kind: type, body: bytes) -> Any:
        decoded.append(kind)
        return read_json(kind, body)

    monkeypatch.setattr(parameters, "read_json", recording)
    error = rejected(kind, body_with(name, value, kind))
    assert error.param == name
    assert reason in str(error)
    assert decoded == []


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [
        (CompletionRequest, [[1, 2]] * MAX_ITEMS),
        (CompletionRequest, ['{"a": [1, "\\"]} \\'] * MAX_ITEMS),
        (CompletionRequest, ['"' * 100_000]),
        (CompletionRequest, '[{"' * 1_000_000),
        (CompletionRequest, list(range(200_000))),
        (ChatRequest, [{"role": "user", "content": "[{1,2}, " * 200_000}]),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_only_looks_large_is_accepted(kind: type[msgspec.Struct], prompt: Any) -> None:
    name = "prompt" if kind is CompletionRequest else "messages"
    request = read_parameters(kind, json.dumps({name: prompt}).encode())
    assert len(getattr(request, name)) == len(prompt)


def test_a_parameter_that_occurs_twice_is_bounded_twice_over() -> None:
    first = items(b"[]", MAX_PARAMETER_BYTES)
    body = b'{"prompt":%b,"stop":%b,"prompt":"x","stop":"y"}' % (first, first)
    request = read_parameters(CompletionRequest, body)
    assert (request.prompt, request.stop) == ("x", "y")  # the last one counts, and is decoded alone


def use_strictly(kind: type[ChatRequest | CompletionRequest], body: dict[str, Any]) -> None:
    begin_request(is_strict=True)
    request = read_parameters(kind, json.dumps(body).encode())
    request.biases()
    if isinstance(request, ChatRequest):
        template_input(request.messages)
    raise unknown_model(request.model or "", "tiny")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": "x", LONG: 1}),
        (CompletionRequest, {"prompt": "x", "model": LONG[:60_000]}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {LONG[:60_000]: 1}}),
        (CompletionRequest, {"prompt": "x", "stream_options": {LONG[:60_000]: 1}}),
        (ChatRequest, {"messages": [{"role": LONG}]}),
        (ChatRequest, {"messages": [{"role": "user", LONG: "x"}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    ],
    ids=range(7),
)
def test_names_are_echoed_up_to_a_length(
    kind: type[ChatRequest | CompletionRequest], body: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as caught:
        copy_context().run(use_strictly, kind, body)
    error = caught.value
    assert LONG[: MAX_ECHOED_CHARACTERS + 1] not in str(error)
    assert len(str(error)) < 2 * MAX_ECHOED_CHARACTERS
    assert len(error.param or "") <= MAX_ECHOED_CHARACTERS + len("...")
