"""docs/api.md describes every path and every parameter as the code handles it."""

import json
import re

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params

from longshore.deploy.gateway.anthropic.requests import MessagesRequest
from longshore.deploy.gateway.api.errors import ApiError, body_of
from longshore.deploy.gateway.api.field_rules import FIELD_RULES, FieldRules, Hint
from longshore.deploy.gateway.api.requests import ChatRequest
from longshore.deploy.gateway.ollama.model_routes import OllamaShowRequest
from longshore.deploy.gateway.ollama.requests import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
)
from longshore.deploy.gateway.openai.requests import CompletionRequest
from longshore.deploy.gateway.openapi import document
from longshore.deploy.gateway.responses_api.requests import ResponsesRequest
from longshore.deploy.requests.refused import Refusal
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()
RESPONSES = frozenset(ResponsesRequest.__struct_fields__)
OLLAMA = frozenset().union(
    *(
        kind.__struct_fields__
        for kind in (
            *(OllamaChatRequest, OllamaGenerateRequest),
            *(OllamaEmbedRequest, OllamaEmbeddingsRequest, OllamaShowRequest),
        )
    )
)
MESSAGES = frozenset(MessagesRequest.__struct_fields__)
COMPLETION = frozenset(CompletionRequest.__struct_fields__)
CHAT = frozenset(ChatRequest.__struct_fields__)


def labels(rules: FieldRules) -> set[str]:
    return {name for name, rule in rules.items() if isinstance(rule, Hint) and not rule.is_named}


def hints(rules: FieldRules) -> set[str]:
    return {name for name, rule in rules.items() if isinstance(rule, Hint) and rule.is_named}


def refused(rules: FieldRules) -> set[str]:
    return {name for name, rule in rules.items() if isinstance(rule, Refusal)}


OPENAI = FIELD_RULES["openai"]
REJECTED = refused(OPENAI) - COMPLETION - CHAT


def test_every_path_is_on_the_page() -> None:
    paths = {path.partition("/{")[0] for path in document()["paths"]}
    assert {path for path in paths if path not in PAGE} == set()


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Both", COMPLETION & CHAT),
        ("Completions only", COMPLETION - CHAT),
        ("Chat only", CHAT - COMPLETION),
        ("Accepted and ignored", labels(OPENAI)),
        ("Hints", hints(OPENAI)),
        ("Rejected", REJECTED),
    ],
)
def test_every_parameter_stands_where_the_code_has_it(heading: str, names: set[str]) -> None:
    match = re.search(rf"- \*\*{heading}\*\*: (.*?)\n(?:-|\n)", PAGE, re.DOTALL)
    assert match is not None
    assert set(re.findall(r"`(\w+)`", match[1])) == set(names)


@pytest.mark.parametrize(
    ("section", "supported", "rules"),
    [
        ("Responses", RESPONSES, FIELD_RULES["responses"]),
        ("Messages", MESSAGES, FIELD_RULES["anthropic"]),
        ("Ollama", OLLAMA, FIELD_RULES["ollama"]),
    ],
)
def test_every_parameter_of_the_other_apis_is_named(
    section: str, supported: set[str], rules: FieldRules
) -> None:
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    sentences = " ".join(text.partition("\nSupported are ")[2].split())
    known, rest = re.split(r" accepted and ignored\. Hints are ", sentences)
    in_text = {"text", "effort", "format"} - supported  # of objects
    assert set(re.findall(r"`(\w+)`", known)) - in_text == supported | labels(rules)
    named, rest = rest.split(". ", 1)
    assert set(re.findall(r"`(\w+)`", named)) == hints(rules)
    assert set(re.findall(r"`(\w+)`", rest)) == refused(rules)


def test_every_option_of_ollama_is_named() -> None:
    text = PAGE.partition("\n## Ollama\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", text))
    rules = FIELD_RULES["ollama_options"]
    assert {*OllamaOptions.__struct_fields__} | hints(rules) | refused(rules) <= named


def test_every_rejected_parameter_has_its_reason() -> None:
    _, _, rest = PAGE.partition("| rejected | because |\n|---|---|\n")
    table, _, _ = rest.partition("\n\n")
    first_cells = [row.split("|")[1] for row in table.splitlines()]
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == REJECTED


def test_every_value_that_asks_for_nothing_is_said() -> None:
    words = " ".join(PAGE.split())
    for name, rule in OPENAI.items():
        if rule.neutral and name not in COMPLETION | CHAT:
            listed = ", ".join(json.dumps(value, separators=(",", ":")) for value in rule.neutral)
            assert f"`{name}` ({listed})" in words


def test_every_status_has_its_type_on_the_page() -> None:
    for status in (400, 401, 404, 405, 413, 415, 429, 500, 503, 504):
        (row,) = re.findall(rf"^\| {status}\b.*", PAGE, re.MULTILINE)
        assert f"| `{body_of(ApiError(status, '')).type}` |" in row


def test_every_parameter_of_the_official_client_is_known() -> None:
    for official, ours in (
        (completion_params.CompletionCreateParamsBase, COMPLETION),
        (chat_params.CompletionCreateParamsBase, CHAT),
    ):
        assert official.__annotations__.keys() - OPENAI.keys() - ours == set()
    known = FIELD_RULES["responses"].keys() | RESPONSES
    assert responses_params.ResponseCreateParamsBase.__annotations__.keys() - known == set()
