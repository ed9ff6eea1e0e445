"""What a request may say, in every dialect: hints, refusals by name, and the types of numbers."""

import json
from collections.abc import Callable
from contextvars import copy_context
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
import pytest

from longshore.deploy.gateway.anthropic.messages import parse_conversation
from longshore.deploy.gateway.anthropic.requests import Conversation, MessagesRequest
from longshore.deploy.gateway.api.embeddings import EmbeddingRequest
from longshore.deploy.gateway.api.field_rules import FIELD_RULES, FieldRules, Hint
from longshore.deploy.gateway.api.lenient import lenient
from longshore.deploy.gateway.api.parameters import MAX_SEARCHED_BYTES, read_parameters
from longshore.deploy.gateway.api.requests import OF_CHATS, ChatRequest
from longshore.deploy.gateway.api.sealed_reasoning import ReasoningSeal
from longshore.deploy.gateway.api.unknown_fields import begin_request
from longshore.deploy.gateway.ollama.requests import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
)
from longshore.deploy.gateway.openai.requests import CompletionRequest
from longshore.deploy.gateway.openai.scoring import RerankRequest, ScoreRequest
from longshore.deploy.gateway.openai.tokenization import DetokenizeRequest, TokenizeRequest
from longshore.deploy.gateway.responses_api.requests import (
    ResponsesRequest,
    parse_response_request,
)
from longshore.deploy.requests.errors import RequestError
from longshore.deploy.requests.refused import Refusal, is_neutral

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Where?"}]


class Dialect(NamedTuple):
    """A kind of request, the least that it needs, and its rules."""

    kind: type[msgspec.Struct]
    body: dict[str, Any]
    rules: FieldRules = FIELD_RULES["openai"]

    def read(self, body: dict[str, Any]) -> Any:
        return read_parameters(self.kind, json.dumps(self.body | body).encode(), rules=self.rules)


OF_MESSAGES: FieldRules = {**OF_CHATS, **FIELD_RULES["anthropic"]}
OF_OLLAMA: FieldRules = {**OF_CHATS, **FIELD_RULES["ollama"]}
OF_RESPONSES: FieldRules = {**OF_CHATS, **FIELD_RULES["responses"]}
DIALECTS = {
    "completions": Dialect(CompletionRequest, {"prompt": "p"}),
    "chat": Dialect(ChatRequest, {"messages": CHAT}),
    "responses": Dialect(ResponsesRequest, {"input": "p"}, OF_RESPONSES),
    "messages": Dialect(
        MessagesRequest, {"model": "m", "messages": CHAT, "max_tokens": 9}, OF_MESSAGES
    ),
    "count_tokens": Dialect(
        Conversation, {"model": "m", "messages": CHAT}, FIELD_RULES["anthropic"]
    ),
    "embeddings": Dialect(EmbeddingRequest, {"input": "p"}),
    "score": Dialect(ScoreRequest, {"text_1": "a", "text_2": "b"}),
    "rerank": Dialect(RerankRequest, {"query": "a", "documents": ["b"]}),
    "tokenize": Dialect(TokenizeRequest, {"prompt": "p"}),
    "detokenize": Dialect(DetokenizeRequest, {"tokens": [1]}),
    "ollama_chat": Dialect(OllamaChatRequest, {"model": "m", "messages": CHAT}, OF_OLLAMA),
    "ollama_generate": Dialect(OllamaGenerateRequest, {"model": "m", "prompt": "p"}, OF_OLLAMA),
    "ollama_options": Dialect(OllamaOptions, {}, FIELD_RULES["ollama_options"]),
    "ollama_embed": Dialect(OllamaEmbedRequest, {"model": "m"}, FIELD_RULES["ollama"]),
}
NESTED_STRICT = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {}, "strict": "true"},
}


def reading(
    read: Callable[[dict[str, Any]], Any], body: dict[str, Any], *, is_strict: bool = False
) -> tuple[Any, list[str]]:
    """What is read, and the names that the response has."""

    def work() -> tuple[Any, list[str]]:
        ignored = begin_request(is_strict=is_strict)
        return read(body), ignored.names

    return copy_context().run(work)


@pytest.mark.parametrize("name", DIALECTS)
def test_every_row_is_applied_as_it_says(name: str) -> None:
    dialect = DIALECTS[name]
    for field, rule in dialect.rules.items():
        if field not in dialect.kind.__struct_fields__:
            check_row(dialect.read, field, rule)


def check_row(read: Callable[[dict[str, Any]], Any], field: str, rule: Hint | Refusal) -> None:
    for value in (None, *rule.neutral):
        assert reading(read, {field: value}, is_strict=True)[1] == []
        if isinstance(value, int | float):  # as text, too
            assert reading(read, {field: json.dumps(value)}, is_strict=True)[1] == []
    other = {"some": ["thing"]}
    match rule:
        case Hint(is_named=False):
            assert reading(read, {field: other}, is_strict=True)[1] == []
        case Hint():
            assert reading(read, {field: other})[1] == [field]
            with pytest.raises(RequestError, match=field) as caught:
                reading(read, {field: other}, is_strict=True)
            assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")
        case Refusal(code=code):
            with pytest.raises(RequestError, match=f"{field} is not supported") as caught:
                reading(read, {field: other})
            assert (caught.value.param, caught.value.code) == (field, code)


HINTS = [
    ("chat", {"service_tier": "flex", "store": True, "verbosity": "low"}),
    ("chat", {"prediction": {"type": "content", "content": "x"}, "web_search_options": {}}),
    ("responses", {"truncation": "auto", "client_metadata": {"x": "y"}, "max_tool_calls": 3}),
    ("responses", {"context_management": [{"type": "compaction"}]}),
    ("messages", {"context_management": {"edits": []}, "betas": ["x"], "inference_geo": "eu"}),
    ("messages", {"mcp_servers": [{"type": "url"}], "speed": "fast", "diagnostics": {}}),
    ("count_tokens", {"context_management": {"edits": []}}),
]


@pytest.mark.parametrize(("name", "hints"), HINTS, ids=str)
def test_hints_of_todays_clients_are_accepted_and_named(name: str, hints: dict[str, Any]) -> None:
    assert sorted(reading(DIALECTS[name].read, hints)[1]) == sorted(hints)


@pytest.mark.parametrize(
    ("name", "body", "named"),
    [
        ("responses", {"reasoning": {"summary": "auto", "effort": "low"}}, ["reasoning.summary"]),
        ("responses", {"text": {"verbosity": "low"}}, ["text.verbosity"]),
        (
            "responses",
            {"reasoning": {"context": "auto", "mode": "pro", "generate_summary": None}},
            ["reasoning.context", "reasoning.mode", "reasoning.generate_summary"],
        ),
        ("messages", {"output_config": {"task_budget": {}}}, ["output_config.task_budget"]),
        (
            "messages",
            {"thinking": {"type": "adaptive", "block_binding": {}}},
            ["thinking.block_binding"],
        ),
        (
            "messages",
            {"cache_control": {"type": "ephemeral", "scope": "x"}},
            ["cache_control.scope"],
        ),
        ("chat", {"messages": [*CHAT, {**CHAT[0], "x": 1}]}, ["messages[1].x"]),
    ],
)
def test_hints_within_objects_are_named_with_their_path(
    name: str, body: dict[str, Any], named: list[str]
) -> None:
    assert reading(DIALECTS[name].read, body)[1] == named


def _kinds(annotation: Any) -> set[Any]:
    """The types that a field takes."""
    arguments = get_args(annotation)
    if get_origin(annotation) in (dict, list, tuple):
        return {get_origin(annotation)}
    if not arguments:
        return {annotation}
    return {kind for argument in arguments for kind in _kinds(argument)}


@pytest.mark.parametrize("name", DIALECTS)
def test_numbers_are_taken_as_lenient_servers_take_them(name: str) -> None:
    """Every parameter that is a number or a truth value, and nothing else."""
    for field in msgspec.structs.fields(DIALECTS[name].kind):
        kinds = {kind for kind in _kinds(field.type) if isinstance(kind, type)} - {NoneType}
        if kinds in ({int}, {float}, {bool}):
            check_number(DIALECTS[name].read, field.name, kinds.pop())


def check_number(read: Callable[[dict[str, Any]], Any], field: str, kind: type) -> None:
    value = 7
    if kind is bool:
        forms: list[Any] = ["true", "True", "1", 1, True]
        wrong: list[Any] = ["yes", 2, "null", 1.5]
    elif kind is int:
        forms = [value, float(value), str(value), f"{value}.0"]
        wrong = [value + 0.5, f"{value}.5", "many", "null", "", True]
    else:
        forms, wrong = [value, float(value), str(value)], ["hot", "null", "", True]
    for form in forms:
        got = getattr(reading(read, {field: form}, is_strict=True)[0], field)
        assert (field, got) == (field, True if kind is bool else value)
        assert type(got) is kind
    for form in wrong:
        with pytest.raises(RequestError) as caught:
            reading(read, {field: form})
        assert caught.value.param == field


@pytest.mark.parametrize(
    ("name", "body", "path"),
    [
        ("chat", {"stream_options": {"include_usage": "true"}}, ("include_usage", True)),
        ("chat", {"logit_bias": {"5": "1.5"}}, ("5", 1.5)),
        ("chat", {"stop_token_ids": ["5", 6.0]}, (1, 6)),
        ("completions", {"prompt": [5, 6.0]}, (1, 6)),
        ("completions", {"kv_cache_retention": {"ttl_s": "5"}}, ("ttl_s", 5.0)),
        ("chat", {"response_format": NESTED_STRICT}, ("json_schema", "strict", True)),
        (
            "responses",
            {"text": {"format": {"type": "text", "strict": 1}}},
            ("format", "strict", True),
        ),
        ("messages", {"tools": [{"name": "t", "strict": "true"}]}, (0, "strict", True)),
        (
            "messages",
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "true"}},
            ("disable_parallel_tool_use", True),
        ),
        ("detokenize", {"tokens": [5.0]}, (0, 5)),
    ],
)
def test_objects_within_are_taken_alike(
    name: str, body: dict[str, Any], path: tuple[Any, ...]
) -> None:
    (field,) = body
    got = getattr(reading(DIALECTS[name].read, body, is_strict=True)[0], field)
    *steps, expected = path
    for step in steps:
        got = getattr(got, step) if isinstance(got, msgspec.Struct) else got[step]
    assert (got, type(got)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("chat", {"stream_options": {"include_usage": "null"}}, "stream_options"),
        ("completions", {"prompt": [1, "2"]}, "prompt"),
        ("completions", {"prompt": [1.5]}, "prompt"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages"),
        ("messages", {"tools": [{"name": "t", "strict": "null"}]}, "tools"),
    ],
)
def test_no_value_is_changed_or_dropped(name: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        reading(DIALECTS[name].read, body)
    assert caught.value.param == param


def test_texts_stay_texts() -> None:
    """Only fields of another type are converted, and a template's variables and schemas never."""
    given = {"stop": "1", "user": "true", "chat_template_kwargs": {"a": "1", "b": 1.0}, "n": "1"}
    request, _ = reading(DIALECTS["chat"].read, given)
    assert (request.stop, request.user, request.n) == ("1", "true", 1)
    assert request.chat_template_kwargs == {"a": "1", "b": 1.0}
    assert type(request) is lenient(ChatRequest)


def test_a_thread_is_refused_with_the_code_that_makes_clients_send_all() -> None:
    body = {"model": "m", "messages": CHAT, "max_tokens": 1, "thread": {"type": "create"}}
    with pytest.raises(RequestError, match="whole conversation") as caught:
        parse_conversation(MessagesRequest, ReasoningSeal(), json.dumps(body).encode())
    assert caught.value.code == "thread_unsupported_request"


def test_the_dialects_of_chats_are_read_by_the_table() -> None:
    def of_messages(body: dict[str, Any]) -> Any:
        given = {"model": "m", "messages": CHAT, "max_tokens": 1, **body}
        return parse_conversation(MessagesRequest, ReasoningSeal(), json.dumps(given).encode())

    def of_responses(body: dict[str, Any]) -> Any:
        return parse_response_request(json.dumps({"input": "p", **body}).encode())

    assert reading(of_messages, {"speed": 1})[1] == ["speed"]
    assert reading(of_responses, {"truncation": 1})[1] == ["truncation"]


def test_unknown_fields_of_a_large_parameter_are_not_all_looked_for() -> None:
    odd = [{**CHAT[0], "x": 1}, {**CHAT[0], "y": 1, "content": "c" * MAX_SEARCHED_BYTES}]
    _, names = reading(DIALECTS["chat"].read, {"messages": odd})
    assert len(names) == 1
    assert names[0].endswith(".x")


def test_a_truth_value_is_no_neutral_number() -> None:
    assert is_neutral((1,), 1)
    assert not is_neutral((1,), True)
