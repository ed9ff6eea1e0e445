"""The OpenAPI document agrees with the gateway."""

import json
from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from longshore.deploy.gateway.api.requests import OF_CHATS, ChatRequest
from longshore.deploy.gateway.app import Gateway
from longshore.deploy.gateway.config import ModelConfig
from longshore.deploy.gateway.openai.requests import CompletionRequest
from longshore.deploy.gateway.openapi import document
from longshore.deploy.model.folder import SamplingDefaults
from tests.deploy.gateway.conftest import StartGateway

DOCUMENT = document()
HI = [{"role": "user", "content": "hi"}]
SCHEMAS = DOCUMENT["components"]["schemas"]


def references(part: Any) -> set[str]:
    if isinstance(part, dict):
        own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
        return own.union(*map(references, part.values()))
    return set().union(*map(references, part)) if isinstance(part, list) else set()


def test_every_route_is_described_but_the_document_and_the_way_to_the_page() -> None:
    model = ModelConfig(
        folder="",
        name="tiny",
        fingerprint="",
        vocab_size=320,
        eos_token_ids=(),
        max_model_len=64,
        sampling_defaults=SamplingDefaults(),
        members=(),
    )
    app: Any = Gateway((model,), lambda: None, report_timeout_s=1).app.app
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    described = {(path, method) for path, item in DOCUMENT["paths"].items() for method in item}
    assert described == routes - {("/openapi.json", "get"), ("/", "get")}


def test_every_reference_leads_somewhere() -> None:
    assert references(DOCUMENT) <= {f"#/components/schemas/{name}" for name in SCHEMAS}


def test_no_object_has_the_name_of_a_module() -> None:
    """Classes of equal names would be told apart by their modules."""
    assert [name for name in SCHEMAS if "." in name] == []


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_parameter_that_is_accepted_is_named(kind: type[Any]) -> None:
    properties = SCHEMAS[kind.__name__]["properties"]
    assert set(kind.__struct_fields__) <= properties.keys()
    assert properties["metadata"] == {}  # any value, without effect
    assert properties["modalities"] == {"enum": [None, ["text"]]}
    assert properties["store"] == {}
    assert "additionalProperties" not in SCHEMAS[kind.__name__]  # unknown fields are ignored


async def test_answers_have_what_the_document_requires_of_them(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway() as gateway:
        served = json.loads((await gateway.get("/openapi.json")).body)
        assert served == json.loads(json.dumps(DOCUMENT))
        for path, body in (
            ("/v1/models", None),
            ("/version", None),
            ("/load", None),
            ("/engine/report", None),
            ("/dashboard/state", None),
            ("/v1/completions", {"prompt": "p"}),
            ("/tokenize", {"prompt": "p"}),
            ("/v1/completions", {"prompt": 5}),
        ):
            method = "get" if body is None else "post"
            answer = await (gateway.get(path) if body is None else gateway.post(path, body))
            response = DOCUMENT["paths"][path][method]["responses"][str(answer.status)]
            schema = response["content"]["application/json"]["schema"]
            schema, *_ = schema.get("anyOf", [schema])  # of one engine, not of all
            required = SCHEMAS[schema["$ref"].rpartition("/")[2]]
            content = json.loads(answer.body)
            assert set(required["required"]) <= content.keys() <= required["properties"].keys()


@pytest.mark.parametrize("name", ["MessagesRequest", "ResponsesRequest"])
def test_parameters_of_chats_that_an_endpoint_has_not_are_named_with_neutral_values(
    name: str,
) -> None:
    properties = SCHEMAS[name]["properties"]
    assert OF_CHATS.keys() <= properties.keys()
    assert properties["n"] == {"enum": [None, 1]}
    assert properties["logit_bias"] == {"enum": [None, {}]}
    assert properties["guided_json"] == {"enum": [None]}


@pytest.mark.parametrize(
    ("path", "body", "has_done"),
    [
        ("/v1/completions", {"prompt": "p"}, True),
        ("/v1/chat/completions", {"messages": HI}, True),
        ("/v1/messages", {"model": "tiny", "max_tokens": 4, "messages": HI}, False),
        ("/v1/responses", {"input": "hi"}, False),
    ],
)
async def test_every_event_of_a_stream_is_described(
    path: str, body: dict[str, Any], has_done: bool, start_gateway: StartGateway
) -> None:
    answers = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
    event = answers["text/event-stream"]["schema"]
    described = event["properties"]["data"]
    if has_done:
        done, described = described["anyOf"]
        assert done == {"const": "[DONE]"}
    async with start_gateway() as gateway:
        answer = await gateway.post(path, {**body, "stream": True})
    data = [text.rpartition(b"data: ")[2] for _, text in answer.events]
    if has_done:
        assert data.pop() == b"[DONE]"
    assert data
    for text in data:
        schema = {**described["contentSchema"], "components": DOCUMENT["components"]}
        jsonschema.validate(json.loads(text), schema)
