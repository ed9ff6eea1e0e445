"""Request bodies: what is supported, what is ignored, and what is rejected by name."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.deploy.gateway.api.errors import body_of, status_of
from longshore.deploy.gateway.api.requests import ChatRequest, parse_request
from longshore.deploy.gateway.openai.requests import CompletionRequest
from longshore.deploy.requests.chat_messages import template_input
from longshore.deploy.requests.errors import RequestError

CHAT = [{"role": "user", "content": "Where?"}]


def completion(**parameters: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps({"prompt": "x"} | parameters).encode())


def chat(**parameters: Any) -> ChatRequest:
    return parse_request(ChatRequest, json.dumps({"messages": CHAT} | parameters).encode())


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ["text"]),
        (["one", "two"], ["one", "two"]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_prompt_is_one_or_many_as_text_or_token_ids(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts() == expected


@pytest.mark.parametrize("prompt", [[], ["text", 5], [5, [6]], ["text", [5]], ["x"] * 1025])
def test_prompts_of_no_or_mixed_kind_or_too_many_are_rejected(prompt: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        completion(prompt=prompt).prompts()
    assert refusal.value.param == "prompt"


@pytest.mark.parametrize(
    "parameters",
    [
        {"best_of": 1, "echo": False, "logprobs": None, "suffix": None, "top_logprobs": 0},
        {"stop": None, "presence_penalty": None, "logit_bias": {}, "length_penalty": 1},
        {"stop": [], "user": "somebody", "metadata": {"a": "b"}},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"temperature": 0, "top_p": None, "stream": None, "stream_options": None},
    ],
)
def test_parameters_that_ask_for_nothing_are_accepted(parameters: dict[str, Any]) -> None:
    completion(**parameters)


def test_all_of_the_answers_may_be_the_best() -> None:
    completion(best_of=2, n=2).check_beams()
    with pytest.raises(RequestError, match="best_of is not supported"):
        completion(best_of=3, n=2).check_beams()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", True),
        ("n", "two"),
        ("n", 1.5),
        ("stop", 5),
        ("logprobs", 2),
        ("top_logprobs", True),
        ("best_of", 3),
        ("suffix", "end"),
        ("tools", {"type": "function"}),
        ("tool_choice", 5),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "yaml"}),
        ("presence_penalty", "much"),
        ("logit_bias", {"5": "more"}),
        ("logit_bias", [5]),
        ("bad_words", "one"),
        ("bad_words", [5]),
        ("use_beam_search", True),
        ("max_tokens", "many"),
        ("max_tokens", 2**40),
        ("temperature", "hot"),
        ("stream", "yes"),
        ("stop_token_ids", ["x"]),
        ("stop_token_ids", [2**31]),
        ("stream_options", {"include_usage": True}),
        ("seed", 1.5),
    ],
)
def test_what_would_change_the_answer_is_rejected_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        chat(**{name: value})
    assert status_of(refusal.value) == 400
    assert body_of(refusal.value).type == "invalid_request_error"
    assert refusal.value.param == name
    assert name in str(refusal.value)


@pytest.mark.parametrize("n", [0, -1, 129])
def test_a_number_of_answers_that_cannot_be_is_rejected(n: int) -> None:
    with pytest.raises(RequestError, match="n=") as refusal:
        _ = chat(n=n).num_samples
    assert refusal.value.param == "n"
    assert (chat().num_samples, chat(n=None).num_samples, chat(n=3).num_samples) == (1, 1, 3)


@pytest.mark.parametrize("key", ["x", "-1", "1.5", "", "٣", "5" * 11])
def test_a_biased_token_is_a_number(key: str) -> None:
    with pytest.raises(RequestError) as refusal:
        chat(logit_bias={key: 1}).biases()
    assert refusal.value.param == "logit_bias"
    assert chat(logit_bias={"5": 1, "17": -2.5}).biases() == {5: 1.0, 17: -2.5}


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_logprobs": 2},
        {"logprobs": False, "top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
    ],
    ids=str,
)
def test_likely_tokens_are_listed_beside_log_probabilities_alone(
    parameters: dict[str, Any],
) -> None:
    with pytest.raises(RequestError) as refusal:
        _ = chat(**parameters).num_logprobs
    assert refusal.value.param == "top_logprobs"
    assert chat(logprobs=True, top_logprobs=20).num_logprobs == 20
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=False, top_logprobs=0).num_logprobs is None


def test_scores_of_a_prompt_are_not_streamed() -> None:
    with pytest.raises(RequestError) as refusal:
        chat(prompt_logprobs=1, stream=True)
    assert refusal.value.param == "prompt_logprobs"


def test_missing_field_is_named() -> None:
    with pytest.raises(RequestError) as refusal:
        parse_request(ChatRequest, b'{"model": "m"}')
    assert refusal.value.param == "messages"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"\xff\xfe", b'"' + b"[" * 5000])
def test_body_that_is_no_json_object_is_rejected(body: bytes) -> None:
    with pytest.raises(RequestError, match="JSON"):
        parse_request(ChatRequest, body)


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = chat(messages=[{"role": "developer", "content": parts}])
    assert template_input(request.messages) == [{"role": "system", "content": "one\ntwo"}]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "function", "content": "42"},
        {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]},
    ],
)
def test_message_that_cannot_be_served_is_rejected(message: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refusal:
        template_input(chat(messages=[*CHAT, message]).messages)
    assert refusal.value.param == "messages"
    assert "messages[1]" in str(refusal.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
parameter_names = st.sampled_from(
    [*ChatRequest.__struct_fields__, "prompt", "n", "stop", "tools", "logprobs", "user", "other"]
)


@given(st.dictionaries(parameter_names, json_values))
def test_any_json_is_either_a_request_or_rejected_as_one(parameters: dict[str, Any]) -> None:
    for kind in (ChatRequest, CompletionRequest):
        with contextlib.suppress(RequestError):
            parse_request(kind, json.dumps(parameters).encode())
