"""Requests as benchmark and evaluation clients send them: guidellm, `vllm bench serve`, lm-eval."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment

IGNORED = "x-longshore-ignored-fields"


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def post(deployment: Deployment, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """The response's JSON, or the events of a stream, and its headers."""
    request = urllib.request.Request(
        f"{deployment.url}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        content = response.read().decode()
        if "event-stream" not in response.headers["content-type"]:
            return json.loads(content), response.headers
        lines = [line.removeprefix("data: ") for line in content.splitlines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines], response.headers


def tokenize(deployment: Deployment, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    answer, _ = post(deployment, "/tokenize", body)
    ids: list[int] = answer["tokens"]
    return ids


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_default_request_of_guidellm(deployment: Deployment, model: str, is_chat: bool) -> None:
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "stop": None,
        "ignore_eos": True,
    }
    if is_chat:
        content = [{"type": "text", "text": "Which berth?"}]
        body |= {"max_completion_tokens": 12, "messages": [{"role": "user", "content": content}]}
        path = "/v1/chat/completions"
    else:
        body |= {"max_tokens": 12, "prompt": "Which berth?"}
        path = "/v1/completions"
    chunks, headers = post(deployment, path, body)
    assert IGNORED not in headers
    # How many tokens a chunk has depends on the load.
    usages = [chunk["usage"] for chunk in chunks if chunk["usage"]]
    counts = [usage["completion_tokens"] for usage in usages]
    assert len(counts) > 1
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert len({usage["prompt_tokens"] for usage in usages}) == 1


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_request_of_vllm_bench_serve(deployment: Deployment, model: str, is_chat: bool) -> None:
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    if is_chat:
        content = [{"type": "text", "text": "Which berth?"}]
        messages = [{"role": "user", "content": content}]
        body |= {"messages": messages, "max_completion_tokens": 8}
        path = "/v1/chat/completions"
    else:
        body |= {
            "prompt": "Which berth?",
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": None,
        }
        path = "/v1/completions"
    chunks, headers = post(deployment, path, body)
    assert IGNORED not in headers
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert all(chunk["choices"] for chunk in chunks[:-1])


def test_embeddings_as_vllm_bench_serve_asks_for_them(deployment: Deployment, model: str) -> None:
    body = {"model": model, "input": "berth " * 2000, "truncate_prompt_tokens": -1}
    answer, headers = post(deployment, "/v1/embeddings", body)
    assert IGNORED not in headers
    assert answer["usage"]["prompt_tokens"] == 4096


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_loglikelihoods_as_lm_eval_reads_them(
    deployment: Deployment, model: str, max_tokens: int
) -> None:
    """A list of lists of token ids, scored in one request. lm-eval sums the log probabilities after
    the context, and asks whether each token was the most likely one."""
    contexts, continuations = ["The berth ", "C4"], ["holds.", "17 is here"]
    prompts = [
        tokenize(deployment, c) + tokenize(deployment, t)
        for c, t in zip(contexts, continuations, strict=True)
    ]
    body = {
        "model": model,
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer, headers = post(deployment, "/v1/completions", body)
    assert IGNORED not in headers
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    assert len(choices) == 2
    for choice, prompt, context in zip(choices, prompts, contexts, strict=True):
        lines = choice["logprobs"]
        assert (
            len(lines["token_logprobs"]) == len(lines["top_logprobs"]) == (len(prompt) + max_tokens)
        )
        assert lines["token_logprobs"][0] is None
        start = len(tokenize(deployment, context))
        scored = lines["token_logprobs"][start:]
        assert all(isinstance(value, float) and value <= 0 for value in scored)
        for token, value, best in zip(
            lines["tokens"][start:], scored, lines["top_logprobs"][start:], strict=True
        ):
            assert value == best[token] <= max(best.values())
        alone, _ = post(deployment, "/v1/completions", body | {"prompt": [prompt]})
        same = alone["choices"][0]["logprobs"]["token_logprobs"]
        assert same[1:] == pytest.approx(lines["token_logprobs"][1:], abs=1e-3)


def test_generations_as_lm_eval_asks_for_them(deployment: Deployment, model: str) -> None:
    body = {
        "model": model,
        "temperature": 0,
        "seed": 1234,
        "max_tokens": 6,
        "stop": ["\n\n", "</s>"],
    }
    prompts = [tokenize(deployment, text) for text in ("The berth ", "C417")]
    answer, _ = post(deployment, "/v1/completions", body | {"prompt": prompts})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    # lm-eval adds `type` to each message of a chat.
    messages = [{"role": "user", "content": "Which berth?", "type": "text"}]
    answer, headers = post(
        deployment, "/v1/chat/completions", body | {"messages": messages, "top_k": 5}
    )
    assert headers[IGNORED] == "messages[0].type"
    assert answer["choices"][0]["message"]["content"] is not None


def test_unknown_fields_of_the_official_client_are_named(client: openai.OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": "Where?"}],
        max_tokens=2,
        store=True,
        extra_body={"session_id": "a", "request_id": "crane-7"},
    )
    assert raw.headers[IGNORED] == "session_id, store"
    assert raw.headers["x-request-id"] == "crane-7"
    assert raw.parse().id.startswith("chatcmpl-crane-7-")


def test_a_strict_server_with_two_names(start_deployment: StartDeployment) -> None:
    flags = ["--strict-requests", "--served-model-name", "first", "--served-model-name", "second"]
    own = start_deployment(*flags).wait_until_ready()
    body = {"model": "second", "prompt": "p", "max_tokens": 1}
    assert post(own, "/v1/completions", body)[0]["model"] == "first"
    with pytest.raises(urllib.error.HTTPError) as refusal:
        post(own, "/v1/completions", body | {"spare": 1})
    assert json.loads(refusal.value.read())["error"]["code"] == "unknown_parameter"
    with urllib.request.urlopen(f"{own.url}/v1/models", timeout=PATIENCE_S) as response:
        assert [model["id"] for model in json.load(response)["data"]] == ["first", "second"]
    for path in ("/version", "/ping", "/load", "/docs"):
        with urllib.request.urlopen(f"{own.url}{path}", timeout=PATIENCE_S) as response:
            assert response.status == 200
