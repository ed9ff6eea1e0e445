"""The OpenAPI document agrees with the gateway."""

import json
from typing import Any

import pytest
from starlette.routing import Route

from longshore.deploy.gateway.app import Gateway
from longshore.deploy.gateway.openai.openapi import document
from longshore.deploy.gateway.openai.requests import ChatRequest, CompletionRequest
from longshore.deploy.gateway.openai.responses import Model
from tests.deploy.gateway.conftest import StartGateway

DOCUMENT = document()
SCHEMAS = DOCUMENT["components"]["schemas"]


def references(part: Any) -> set[str]:
    if isinstance(part, dict):
        own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
        return own.union(*map(references, part.values()))
    return set().union(*map(references, part)) if isinstance(part, list) else set()


def test_every_route_is_described_but_the_document_and_the_way_to_the_page() -> None:
    model = Model(id="tiny", created=0, max_model_len=64, vocab_size=320)
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
    assert properties["user"] == {}  # any value, without effect
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
