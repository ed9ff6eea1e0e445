"""docs/api.md describes every path and every parameter as the code handles it."""

import json
import re
from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params

from longshore.deploy.gateway.anthropic import requests as anthropic_requests
from longshore.deploy.gateway.anthropic.requests import MessagesRequest
from longshore.deploy.gateway.openai.errors import ApiError
from longshore.deploy.gateway.openai.openapi import document
from longshore.deploy.gateway.openai.parameters import HINTS, IGNORED, UNSUPPORTED
from longshore.deploy.gateway.openai.requests import ChatRequest, CompletionRequest
from longshore.deploy.gateway.responses_api import requests as responses_requests
from longshore.deploy.gateway.responses_api.requests import ResponsesRequest
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()
RESPONSES = frozenset(ResponsesRequest.__struct_fields__)
MESSAGES = frozenset(MessagesRequest.__struct_fields__)
COMPLETION = frozenset(CompletionRequest.__struct_fields__)
CHAT = frozenset(ChatRequest.__struct_fields__)


def test_every_path_is_on_the_page() -> None:
    paths = {path.partition("/{")[0] for path in document()["paths"]}
    assert {path for path in paths if path not in PAGE} == set()


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Both", COMPLETION & CHAT),
        ("Completions only", COMPLETION - CHAT),
        ("Chat only", CHAT - COMPLETION),
        ("Accepted and ignored", IGNORED),
        ("Ignored and named in the response", HINTS),
        ("Rejected", UNSUPPORTED.keys() - COMPLETION - CHAT - HINTS),
    ],
)
def test_every_parameter_stands_where_the_code_has_it(heading: str, names: set[str]) -> None:
    match = re.search(rf"- \*\*{heading}\*\*: (.*?)\n(?:-|\n)", PAGE, re.DOTALL)
    assert match is not None
    assert set(re.findall(r"`(\w+)`", match[1])) == set(names)


@pytest.mark.parametrize(
    ("section", "supported", "ignored", "unsupported"),
    [
        ("Responses", RESPONSES, responses_requests.IGNORED, responses_requests.UNSUPPORTED),
        ("Messages", MESSAGES, anthropic_requests.IGNORED, anthropic_requests.UNSUPPORTED),
    ],
)
def test_every_parameter_of_the_other_apis_is_named(
    section: str, supported: set[str], ignored: set[str], unsupported: dict[str, Any]
) -> None:
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    sentences = " ".join(text.partition("\nSupported are ")[2].split())
    known, rest = sentences.split(" accepted and ignored. ")
    named = set(re.findall(r"`(\w+)`", known)) - {"text"} | {"text"} & supported
    assert named == supported | ignored
    assert set(re.findall(r"`(\w+)`", rest)) == unsupported.keys()


def test_every_rejected_parameter_has_its_reason() -> None:
    _, _, rest = PAGE.partition("| rejected | because |\n|---|---|\n")
    table, _, _ = rest.partition("\n\n")
    first_cells = [row.split("|")[1] for row in table.splitlines()]
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == UNSUPPORTED.keys() - COMPLETION - CHAT - HINTS


def test_every_value_that_asks_for_nothing_is_said() -> None:
    words = " ".join(PAGE.split())
    for name, values in UNSUPPORTED.items():
        if values and name not in COMPLETION | CHAT:
            listed = ", ".join(json.dumps(value, separators=(",", ":")) for value in values)
            assert f"`{name}` ({listed})" in words


def test_every_status_has_its_type_on_the_page() -> None:
    for status in (400, 401, 404, 405, 413, 415, 429, 500, 503, 504):
        (row,) = re.findall(rf"^\| {status}\b.*", PAGE, re.MULTILINE)
        assert f"| `{ApiError(status, '').body.type}` |" in row


def test_every_parameter_of_the_official_client_is_known() -> None:
    known = IGNORED | UNSUPPORTED.keys()
    for official, ours in (
        (completion_params.CompletionCreateParamsBase, COMPLETION),
        (chat_params.CompletionCreateParamsBase, CHAT),
    ):
        assert official.__annotations__.keys() - known - ours == set()
    known = responses_requests.IGNORED | responses_requests.UNSUPPORTED.keys() | RESPONSES
    assert responses_params.ResponseCreateParamsBase.__annotations__.keys() - known == set()
