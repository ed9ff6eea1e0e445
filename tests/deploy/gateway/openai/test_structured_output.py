"""The parameters that constrain an answer reach the engine, or are rejected by name."""

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import CONSTRAINT_TOO_COMPLEX, AddRequest, StructuredOutput
from tests.deploy.gateway.conftest import PATIENCE_S, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine, scored_echo

CHAT = [{"role": "user", "content": "Where?"}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
PATHS = {
    "/v1/completions": {"prompt": [5, 6, 7]},
    "/v1/chat/completions": {"messages": CHAT},
}


def json_schema(schema: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        (
            {"response_format": json_schema(strict=True)},
            StructuredOutput("json_schema", TEXT[:-1] + ',"additionalProperties":false}'),
        ),
        ({"response_format": json_schema(strict=False)}, StructuredOutput("json_schema", TEXT)),
        (
            {"response_format": json_schema(strict=None, description="what it is")},
            StructuredOutput("json_schema", TEXT),
        ),
        (
            {"response_format": {"type": "json_object"}},
            StructuredOutput("json_schema", '{"type":"object"}'),
        ),
        *(
            (
                {"response_format": {"type": kind, key: SCHEMA}},
                StructuredOutput("json_schema", TEXT),
            )
            for kind, key in (
                *(("json_object", "schema"), ("json_object", "value")),
                *(("json", "value"), ("json_schema", "value"), ("json_schema", "schema")),
            )
        ),
        (
            {"response_format": {"type": "regex", "value": "[0-9]+"}},
            StructuredOutput("regex", "[0-9]+"),
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput("json_schema", TEXT)),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput("choice", '["a","b"]')),
        ({"guided_json": TEXT}, StructuredOutput("json_schema", TEXT)),
        ({"guided_json": SCHEMA}, StructuredOutput("json_schema", TEXT)),
        ({"guided_regex": "[0-9]+"}, StructuredOutput("regex", "[0-9]+")),
        ({"guided_choice": ["a"]}, StructuredOutput("choice", '["a"]')),
        ({"guided_grammar": "root ::= [a-z]"}, StructuredOutput("grammar", "root ::= [a-z]")),
        (
            {"response_format": {"type": "text"}, "guided_regex": "a"},
            StructuredOutput("regex", "a"),
        ),
    ],
)
async def test_every_constraint_reaches_the_engine(
    path: str,
    parameters: dict[str, Any],
    wanted: StructuredOutput | None,
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(scored_echo) as gateway:
        answer = await gateway.post(path, PATHS[path] | parameters)
        assert answer.status == 200, answer.body
        (request,) = gateway.engine.requests
        assert request.options.structured_output == wanted


@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_has_the_constraint(stream: bool, start_gateway: StartGateway) -> None:
    async with start_gateway(scored_echo) as gateway:
        body = {"prompt": "x", "n": 3, "guided_regex": "a+", "stream": stream, "logprobs": 1}
        answer = await gateway.post("/v1/completions", body | {"stop": ["!"]})
        assert answer.status == 200, answer.body
        specs = [request.options.structured_output for request in gateway.engine.requests]
        assert specs == [StructuredOutput("regex", "a+")] * 3


@pytest.mark.parametrize(
    ("parameters", "param", "reason"),
    [
        (
            {"response_format": json_schema({"properties": {"a": {"type": "nil"}}})},
            "response_format",
            'invalid at "/properties/a/type"',
        ),
        ({"response_format": {"type": "yaml"}}, "response_format", "yaml"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "no json_schema"),
        ({"response_format": {"type": "json"}}, "response_format", "no value"),
        ({"response_format": {"type": "regex", "value": {}}}, "response_format", "no value"),
        ({"response_format": {"type": "json_object", "value": "a"}}, "response_format", "no value"),
        ({"response_format": json_schema([])}, "response_format", "Expected `object"),
        ({"structured_outputs": {}}, "structured_outputs", "none is given"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json and"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "response_format and guided_regex",
        ),
        ({"guided_json": {"type": 7}}, "guided_json", 'guided_json: .*at "/type"'),
        ({"guided_choice": []}, "guided_choice", "has 0 texts"),
        ({"guided_choice": "yes"}, "guided_choice", "Expected `array"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        (
            {"guided_regex": "a", "use_beam_search": True, "n": 2, "temperature": 0},
            "guided_regex",
            "use_beam_search",
        ),
    ],
)
async def test_an_invalid_constraint_is_rejected_by_name(
    parameters: dict[str, Any], param: str, reason: str, start_gateway: StartGateway
) -> None:
    async with start_gateway(scored_echo) as gateway:
        answer = await gateway.post("/v1/completions", {"prompt": "x"} | parameters)
        assert answer.status == 400
        error = json.loads(answer.body)["error"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert re.search(reason, error["message"]), error["message"]
        assert not gateway.engine.requests


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"]
)
async def test_a_constraint_that_proves_too_complex_is_the_client_s_error(
    start_gateway: StartGateway, path: str, has_begun: bool
) -> None:
    def give_up(engine: FakeEngine, request: AddRequest) -> None:
        if has_begun:
            engine.send_tokens(request, [4])
        else:
            fail([4])

    def fail(last_token_ids: Sequence[int] = ()) -> None:
        (request,) = gateway.engine.requests
        gateway.engine.finish(
            request,
            FinishReason.ERROR,
            num_output_tokens=1,
            message=f"{CONSTRAINT_TOO_COMPLEX}: too many states",
            token_ids=last_token_ids,
        )
        failed.append(request)

    def on_event(_: bytes) -> None:
        if not failed:
            fail()

    failed: list[AddRequest] = []
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {"model": "tiny", "messages": CHAT, "max_tokens": 9},
        "/v1/responses": {"input": "one", "max_output_tokens": 9},
    }
    body = bodies.get(path) or {**PATHS[path], "max_tokens": 9, "guided_regex": "[0-9]+"}
    async with start_gateway(give_up) as gateway:
        answer = await gateway.client.request(
            "POST",
            path,
            json.dumps(body | {"stream": True}).encode(),
            timeout_s=PATIENCE_S,
            on_event=on_event,
        )
    assert answer.status == (200 if has_begun else 400)
    text = answer.body + b"".join(data for _, data in answer.events)
    assert CONSTRAINT_TOO_COMPLEX.encode() in text
    assert b"invalid_" in text
    assert b"api_error" not in text
