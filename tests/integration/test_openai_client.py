"""The official client with a real server: requests as programs for OpenAI's API send them."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.deployment import Deployment, wait_until
from tests.integration.test_serving import metrics

CHAT: Any = [{"role": "user", "content": "Which berth holds C417?"}]
ENDLESS: Any = {"extra_body": {"ignore_eos": True}}
RUNNING = 'longshore_scheduler_running_requests{engine="0"}'


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (served,) = client.models.list().data
    assert client.models.retrieve(served.id) == served
    return served.id


def async_client(deployment: Deployment) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0)


async def test_answers_at_the_same_time_are_those_that_come_alone(
    deployment: Deployment, client: openai.OpenAI, model: str
) -> None:
    async def streamed(asks: openai.AsyncOpenAI, seed: int) -> str:
        chunks = await asks.chat.completions.create(
            model=model, messages=CHAT, max_completion_tokens=20, seed=seed, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in chunks])

    async with async_client(deployment) as asks:
        together = await asyncio.gather(*(streamed(asks, seed) for seed in range(6)))
    alone = [
        client.chat.completions.create(
            model=model, messages=CHAT, max_completion_tokens=20, seed=seed
        )
        for seed in range(6)
    ]
    assert together == [answer.choices[0].message.content for answer in alone]


def test_the_stream_helper_gathers_every_answer_and_the_usage(
    client: openai.OpenAI, model: str
) -> None:
    asked: dict[str, Any] = {"model": model, "messages": CHAT, "max_tokens": 16, "n": 2, "seed": 3}
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        with pytest.raises(openai.LengthFinishReasonError) as cut_off:
            stream.get_final_completion()
    gathered = cut_off.value.completion
    assert {"chunk", "content.delta", "content.done"} <= kinds
    whole = client.chat.completions.create(**asked)
    assert [c.message.content for c in gathered.choices] == [
        c.message.content for c in whole.choices
    ]
    assert gathered.usage is not None
    assert whole.usage is not None
    assert gathered.usage.completion_tokens == whole.usage.completion_tokens


def test_prompts_are_texts_or_token_ids_one_or_many(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 6}
    texts = ["C417", "the berth", "C417"]
    batch = client.completions.create(**asked, prompt=texts, n=2)
    assert [choice.index for choice in batch.choices] == list(range(6))
    answers = [batch.choices[2 * i].text for i in range(3)]
    alone = [client.completions.create(**asked, prompt=text).choices[0].text for text in texts]
    assert answers == alone
    tokenize = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    ids = [
        tokenize.post("/tokenize", body={"prompt": text}, cast_to=object)["tokens"]  # type: ignore[index]
        for text in texts
    ]
    by_id = client.completions.create(**asked, prompt=ids)
    assert [choice.text for choice in by_id.choices] == alone
    assert client.completions.create(**asked, prompt=ids[0]).choices[0].text == alone[0]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_no_piece_of_a_stop_is_ever_shown(client: openai.OpenAI, model: str, length: int) -> None:
    """A token is one byte here, so every stop string of two letters crosses a token boundary."""
    asked: dict[str, Any] = {"model": model, "prompt": "berth", "seed": 11, "max_tokens": 60}
    text = client.completions.create(**asked, **ENDLESS).choices[0].text
    middle = len(text) // 2
    stop = text[middle : middle + length]
    expected = text[: text.index(stop)]
    chunks = list(client.completions.create(**asked, **ENDLESS, stop=stop, stream=True))
    shown = ""
    for chunk in chunks:
        shown += chunk.choices[0].text
        assert expected.startswith(shown)
    assert shown == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_log_probabilities_and_echo_belong_to_the_tokens(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="C417", echo=True, logprobs=2, max_tokens=3, temperature=0
    ).choices[0]
    assert answer.text.startswith("C417")
    lines = answer.logprobs
    assert lines is not None
    assert lines.tokens is not None
    assert lines.token_logprobs is not None
    assert lines.top_logprobs is not None
    assert len(lines.tokens) == len(lines.token_logprobs) == 4 + 3
    assert lines.token_logprobs[0] is None
    for token, logprob, best in zip(
        lines.tokens[4:], lines.token_logprobs[4:], lines.top_logprobs[4:], strict=True
    ):
        assert best[token] == logprob == max(best.values())  # greedy
    chat = client.chat.completions.create(
        model=model, messages=CHAT, logprobs=True, top_logprobs=3, max_tokens=4, temperature=0
    ).choices[0]
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    for token in chat.logprobs.content:
        assert [token.token, token.logprob] == [
            token.top_logprobs[0].token,
            token.top_logprobs[0].logprob,
        ]
        assert len(token.top_logprobs) == 3


def test_settings_of_sampling_change_the_answer_and_a_seed_repeats_it(
    client: openai.OpenAI, model: str
) -> None:
    def answer(**settings: Any) -> str:
        asked = {"model": model, "prompt": "aa", "max_tokens": 24, "seed": 1} | ENDLESS | settings
        return str(client.completions.create(**asked).choices[0].text)

    plain = answer()
    assert answer() == plain
    assert answer(seed=2) != plain
    assert answer(frequency_penalty=2, presence_penalty=2) != plain
    assert answer(logit_bias={"70": 100}, max_tokens=3, temperature=0) == 3 * answer(
        logit_bias={"70": 100}, max_tokens=1, temperature=0
    )


def test_a_raw_response_has_the_ids_that_the_client_sent(client: openai.OpenAI, model: str) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    raw = client.chat.completions.with_raw_response.create(
        model=model,
        messages=CHAT,
        max_tokens=1,
        extra_headers={"x-request-id": "crane-7", "traceparent": trace},
    )
    assert raw.headers["x-request-id"] == "crane-7"
    assert raw.headers["traceparent"] == trace
    answer = raw.parse()
    assert answer._request_id == "crane-7"
    assert answer.id.startswith("chatcmpl-crane-7-")


def test_labels_and_hints_that_newer_clients_send_are_taken(
    client: openai.OpenAI, model: str
) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "text", "text": "Where?"}], "name": "ann"},
        ],
        max_completion_tokens=2,
        metadata={"ticket": "7"},
        modalities=["text"],
        parallel_tool_calls=True,
        prompt_cache_key="a",
        prompt_cache_retention="24h",
        response_format={"type": "text"},
        safety_identifier="b",
        service_tier="auto",
        store=False,
        tool_choice="none",
        tools=[],
        user="c",
        verbosity="medium",
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "yaml"}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", {"type": "web_search"}),
        ("tool_choice", "required"),
        ("modalities", ["text", "audio"]),
        ("temperature", -1.0),
        ("n", 0),
        ("max_tokens", -1),
        ("frequency_penalty", 3.0),
        ("logit_bias", {"70": 1000}),
        ("top_logprobs", 5),
    ],
)
def test_what_cannot_be_done_is_a_bad_request_that_names_it(
    client: openai.OpenAI, model: str, name: str, value: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model=model, messages=CHAT, **{name: value})
    assert refusal.value.param == name
    assert refusal.value.type == "invalid_request_error"
    assert name in refusal.value.message


def test_an_endpoint_that_is_not_there_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="POST /v1/moderations") as refusal:
        client.moderations.create(input="hello")
    assert refusal.value.type == "not_found_error"
    with pytest.raises(openai.NotFoundError, match="GET /v1/fine_tuning/jobs"):
        client.fine_tuning.jobs.list()
    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("owner/other")
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")


def test_a_prompt_that_does_not_fit_has_a_code(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model=model, prompt="x" * 5000)
    assert (refusal.value.param, refusal.value.code) == ("prompt", "context_length_exceeded")


def test_the_answer_goes_on_with_the_last_message(client: openai.OpenAI, model: str) -> None:
    chat: Any = [*CHAT, {"role": "assistant", "content": "Berth "}]
    base = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))

    def prompt(**form: Any) -> str:
        answer: Any = base.post("/tokenize", body={"messages": chat} | form, cast_to=object)
        text: Any = base.post("/detokenize", body={"tokens": answer["tokens"]}, cast_to=object)
        return str(text["prompt"])

    begun = prompt(add_generation_prompt=False)
    assert begun.endswith("[assistant]Berth </s>")
    assert prompt() == begun + "[assistant]"
    assert prompt(continue_final_message=True) == begun.removesuffix("</s>")
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 8}
    answer = client.chat.completions.create(
        **asked, messages=chat, extra_body={"continue_final_message": True}
    )
    ids: Any = base.post(
        "/tokenize", body={"messages": chat, "continue_final_message": True}, cast_to=object
    )
    same = client.completions.create(**asked, prompt=ids["tokens"])
    assert answer.choices[0].message.content == same.choices[0].text
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(
            **asked,
            messages=chat,
            extra_body={"continue_final_message": True, "add_generation_prompt": True},
        )
    assert refusal.value.param == "continue_final_message"


@pytest.mark.parametrize("way", ["closed", "timed out"])
async def test_an_answer_that_nobody_reads_any_more_is_aborted(
    deployment: Deployment, model: str, way: str
) -> None:
    def num_aborted() -> float:
        return metrics(deployment).get('longshore_requests_finished_total{reason="abort"}', 0.0)

    before = num_aborted()
    asked: dict[str, Any] = {"model": model, "prompt": "x", "max_tokens": 4000} | ENDLESS
    async with async_client(deployment) as asks:
        if way == "closed":
            stream = await asks.completions.create(**asked, stream=True)
            await anext(aiter(stream))
            await stream.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                await asks.completions.create(**asked, timeout=0.3)
    wait_until(lambda: num_aborted() == before + 1)
    wait_until(lambda: metrics(deployment).get(RUNNING) == 0)


@pytest.fixture(scope="module")
def guarded(
    tiny_model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """A server with API keys, few live requests, small bodies, and one allowed origin."""
    flags = ["--api-key", "gate-1", "--api-key", "gate-2", "--max-live-requests", "1"]
    flags += ["--max-body-mib", "1", "--cors-allow-origins", "https://harbour.example"]
    with Deployment(tiny_model[0], tmp_path_factory.mktemp("guarded"), *flags) as own:
        yield own.wait_until_ready()


def test_a_key_is_wanted_and_known(guarded: Deployment) -> None:
    url = f"{guarded.url}/v1"
    for key in ("gate-1", "gate-2"):
        assert openai.OpenAI(base_url=url, api_key=key).models.list().data
    with pytest.raises(openai.AuthenticationError) as refusal:
        openai.OpenAI(base_url=url, api_key="gate-3").models.list()
    assert refusal.value.code == "invalid_api_key"


def test_a_body_beyond_the_limit_is_a_413(guarded: Deployment) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="gate-1", max_retries=0)
    with pytest.raises(openai.APIStatusError) as refusal:
        client.completions.create(model="x", prompt="x" * (2 << 20))
    assert refusal.value.status_code == 413
    assert "--max-body-mib" in refusal.value.message


def test_the_client_comes_back_when_the_queue_was_full(guarded: Deployment) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="gate-1", max_retries=0)
    (served,) = client.models.list().data
    asked: dict[str, Any] = {"model": served.id, "prompt": "x", **ENDLESS}
    stream = client.completions.create(**asked, max_tokens=4000, stream=True)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as refusal:
        client.completions.create(**asked, max_tokens=1)
    assert refusal.value.code == "queue_full"
    assert refusal.value.response.headers["retry-after"] == "1"
    stream.close()
    patient = client.with_options(max_retries=5)
    answer = patient.completions.with_raw_response.create(**asked, max_tokens=1)
    assert answer.parse().choices


@pytest.mark.parametrize(
    ("origin", "may"), [("https://harbour.example", True), ("https://other.example", False)]
)
def test_pages_of_an_allowed_origin_may_ask_and_read(
    guarded: Deployment, origin: str, may: bool
) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="gate-1", max_retries=0)
    asks = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    allowed = client._client.options(f"{guarded.url}/v1/chat/completions", headers=asks)
    assert (allowed.status_code == 200) == may
    assert allowed.headers.get("access-control-allow-origin") == (origin if may else None)
    listed = client.models.with_raw_response.list(extra_headers={"Origin": origin})
    assert listed.headers.get("access-control-allow-origin") == (origin if may else None)
    refused = client._client.get(f"{guarded.url}/v1/models", headers={"Origin": origin})
    assert refused.status_code == 401
    assert refused.headers.get("access-control-allow-origin") == (origin if may else None)
    assert json.loads(refused.content)["error"]["code"] == "invalid_api_key"
