"""Sampling over HTTP: settings of requests, several answers, and log probabilities."""

import json
from typing import Any

import pytest

from longshore.protocol.sampling import SamplingParams
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.gateway.fake_engine import score_of, scored_echo
from tests.deploy.tiny_tokenizer import byte_level_tokenizer

CHAT = [{"role": "user", "content": "Where?"}]


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_level_tokenizer().encode(text).ids
    return ids


def text_of(*token_ids: int) -> str:
    text: str = byte_level_tokenizer().decode(list(token_ids), skip_special_tokens=False)
    return text


def answer_of(answer: Any) -> dict[str, Any]:
    assert answer.status == 200, answer.body
    decoded: dict[str, Any] = json.loads(answer.body)
    return decoded


def chunks_of(answer: Any) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.body
    *events, done = (data for _, data in answer.events)
    assert done == b"[DONE]"
    return [json.loads(data) for data in events]


async def test_every_sampling_setting_reaches_the_engine(start_gateway: StartGateway) -> None:
    body = {
        "prompt": [5, 6, 7],
        "min_p": 0.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.25,
        "logit_bias": {"5": -100, "6": 2.5},
        "logprobs": 3,
        "prompt_logprobs": 2,
        "seed": 1,
    }
    wanted = SamplingParams(
        min_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.25,
        logit_bias={5: -100, 6: 2.5},
        logprobs=3,
        prompt_logprobs=2,
        seed=1,
    )
    async with start_gateway(scored_echo) as gateway:
        answer_of(await gateway.post("/v1/completions", body))
        (request,) = gateway.engine.requests
        assert request.sampling == wanted


async def test_bad_words_are_forbidden_in_both_spellings(start_gateway: StartGateway) -> None:
    async with start_gateway(scored_echo) as gateway:
        body = {"prompt": "x", "bad_words": ["the", " berth", "x"]}
        answer_of(await gateway.post("/v1/completions", body))
        (request,) = gateway.engine.requests
        spellings = ["the", " the", " berth", "x", " x"]
        words = tuple(tuple(ids_of(spelling)) for spelling in spellings)
        assert request.sampling.bad_words_token_ids == words


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x" * 100]}, "bad_words"),
        ({"bad_words": [f"word {i}" for i in range(140)]}, "bad_words"),
        ({"n": 0}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_setting_out_of_range_is_rejected_by_its_name(
    start_gateway: StartGateway, parameters: dict[str, Any], param: str
) -> None:
    async with start_gateway(scored_echo) as gateway:
        answer = await gateway.post("/v1/completions", {"prompt": "x", **parameters})
        error = json.loads(answer.body)["error"]
        assert (answer.status, error["param"]) == (400, param)
        assert param in error["message"]
        assert gateway.engine.requests == []


async def test_bad_words_need_a_tokenizer(start_gateway: StartGateway) -> None:
    async with start_gateway(scored_echo, tokenizer=False) as gateway:
        answer = await gateway.post("/v1/completions", {"prompt": [5], "bad_words": ["x"]})
        assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, "bad_words")


async def test_answers_are_numbered_prompt_by_prompt_with_seeds_of_their_own(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(scored_echo) as gateway:
        body = {"prompt": ["one", "two"], "n": 3, "seed": 5, "max_tokens": 20}
        answer = answer_of(await gateway.post("/v1/completions", body))
        assert [c["index"] for c in answer["choices"]] == list(range(6))
        assert [c["text"] for c in answer["choices"]] == ["one"] * 3 + ["two"] * 3
        # A prompt counts once, and so do the cached tokens of its first answer.
        assert answer["usage"]["prompt_tokens"] == 6
        assert answer["usage"]["completion_tokens"] == 18
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        seeds = [request.sampling.seed for request in gateway.engine.requests]
        first, _, _, fourth, *_ = (request.handle for request in gateway.engine.requests)
        parents = [request.fork_of for request in gateway.engine.requests]
        assert parents == [None, first, first, None, fourth, fourth]
        assert seeds[0] == seeds[3] == 5
        assert seeds[:3] == seeds[3:]
        assert len(set(seeds)) == 3


async def test_unseeded_answers_get_seeds_of_their_own(start_gateway: StartGateway) -> None:
    async with start_gateway(scored_echo) as gateway:
        answer_of(await gateway.post("/v1/completions", {"prompt": "x", "n": 4}))
        assert len({request.sampling.seed for request in gateway.engine.requests}) == 4


async def test_streamed_answers_of_a_chat_are_told_apart_by_index(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(scored_echo) as gateway:
        body = {"messages": CHAT, "n": 2, "stream": True}
        chunks = chunks_of(await gateway.post("/v1/chat/completions", body))
        choices = [chunk["choices"][0] for chunk in chunks]
        for index in range(2):
            own = [choice for choice in choices if choice["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(choice["delta"].get("content", "") for choice in own)
            assert text == "<s>[user]Where?</s>[assistant]".replace("<s>", "").replace("</s>", "")
            assert own[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_lists_the_log_probability_of_every_token(
    start_gateway: StartGateway, stream: bool
) -> None:
    ids = ids_of("a 🚢")
    async with start_gateway(scored_echo) as gateway:
        body = {"prompt": "a 🚢", "max_tokens": 20, "logprobs": 2, "stream": stream}
        answer = await gateway.post("/v1/completions", body)
        if stream:
            parts = [chunk["choices"][0] for chunk in chunks_of(answer)]
            assert all(
                part["logprobs"]["tokens"] for part in parts if part["finish_reason"] is None
            )
        else:
            parts = answer_of(answer)["choices"]
        lines = {
            name: [line for part in parts if part["logprobs"] for line in part["logprobs"][name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        texts = [text_of(token_id) for token_id in ids]
        assert lines["tokens"] == texts
        assert lines["text_offset"] == [sum(map(len, texts[:i])) for i in range(len(texts))]
        for index, text in enumerate(texts):
            logprob, _, best = score_of(len(ids) + index, 2)
            assert lines["token_logprobs"][index] == logprob
            listed = {text: logprob}
            for token_id, each in best:
                listed.setdefault(text_of(token_id), each)
            assert lines["top_logprobs"][index] == listed


async def test_without_being_asked_nobody_lists_anything(start_gateway: StartGateway) -> None:
    async with start_gateway(scored_echo) as gateway:
        (choice,) = answer_of(await gateway.post("/v1/completions", {"prompt": "x"}))["choices"]
        assert choice["logprobs"] is None
        assert "prompt_logprobs" not in choice
        answer = answer_of(await gateway.post("/v1/chat/completions", {"messages": CHAT}))
        assert answer["choices"][0]["logprobs"] is None
        assert "prompt_logprobs" not in answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_echo_puts_the_prompt_and_its_scores_before_the_answer(
    start_gateway: StartGateway, max_tokens: int, stream: bool
) -> None:
    prompt = "the berth"
    ids = ids_of(prompt)
    async with start_gateway(scored_echo) as gateway:
        body = {
            "prompt": prompt,
            "echo": True,
            "logprobs": 1,
            "max_tokens": max_tokens,
            "stream": stream,
            "stream_options": {"include_usage": True} if stream else None,
        }
        answer = await gateway.post("/v1/completions", body)
        if stream:
            *chunks, last = chunks_of(answer)
            parts, usage = [chunk["choices"][0] for chunk in chunks], last["usage"]
        else:
            whole = answer_of(answer)
            parts, usage = whole["choices"], whole["usage"]
        assert "".join(part["text"] for part in parts) == prompt + text_of(*ids[:max_tokens])
        lists = [part["logprobs"] for part in parts if part["logprobs"]]
        tokens = [token for each in lists for token in each["tokens"]]
        values = [value for each in lists for value in each["token_logprobs"]]
        best = [entry for each in lists for entry in each["top_logprobs"]]
        assert tokens == [text_of(token_id) for token_id in ids + ids[:max_tokens]]
        assert values == [None, *(score_of(p, 0)[0] for p in range(1, len(tokens)))]
        assert best[0] is None
        assert all(len(entry) in (1, 2) for entry in best[1:])
        assert usage["completion_tokens"] == max_tokens
        assert parts[-1]["finish_reason"] == "length"


async def test_echo_without_scores_costs_the_engine_nothing(start_gateway: StartGateway) -> None:
    async with start_gateway(scored_echo) as gateway:
        body = {"prompt": [ids_of("the"), ids_of("a b")], "echo": True, "max_tokens": 1}
        choices = answer_of(await gateway.post("/v1/completions", body))["choices"]
        assert [choice["text"] for choice in choices] == ["thethe", "a ba"]
        assert all(request.sampling.prompt_logprobs is None for request in gateway.engine.requests)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_lists_the_log_probability_of_every_token(
    start_gateway: StartGateway, stream: bool
) -> None:
    async with start_gateway(scored_echo) as gateway:
        body = {
            "messages": [{"role": "user", "content": "é"}],
            "logprobs": True,
            "top_logprobs": 2,
            "stream": stream,
        }
        answer = await gateway.post("/v1/chat/completions", body)
        (request,) = gateway.engine.requests
        ids = request.prompt_token_ids.tolist()
        if stream:
            choices = [chunk["choices"][0] for chunk in chunks_of(answer)]
            content = [
                c for each in choices if each["logprobs"] for c in each["logprobs"]["content"]
            ]
        else:
            content = answer_of(answer)["choices"][0]["logprobs"]["content"]
        assert [each["token"] for each in content] == [text_of(token_id) for token_id in ids]
        for index, each in enumerate(content):
            logprob, _, best = score_of(len(ids) + index, 2)
            assert each["logprob"] == logprob
            listed = [(top["token"], top["logprob"]) for top in each["top_logprobs"]]
            assert listed == [(text_of(token_id), value) for token_id, value in best]
        whole = {each["token"]: each["bytes"] for each in content}
        assert whole["["] == [ord("[")]
        joined = bytes(byte for each in content for byte in each["bytes"])
        assert joined.decode() == byte_level_tokenizer().decode(ids, skip_special_tokens=False)
        assert "\ufffd" in whole  # a part of a character has its own bytes


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_prompt_logprobs_list_every_prompt_token_but_the_first(
    start_gateway: StartGateway, path: str
) -> None:
    async with start_gateway(scored_echo) as gateway:
        body = {"prompt": "the berth"} if path == "/v1/completions" else {"messages": CHAT}
        answer = answer_of(await gateway.post(path, {**body, "prompt_logprobs": 1, "n": 2}))
        ids = gateway.engine.requests[0].prompt_token_ids.tolist()
        holders = answer["choices"] if path == "/v1/completions" else [answer]
        for holder in holders:
            listed = holder["prompt_logprobs"]
            assert listed[0] is None
            for position, entry in enumerate(listed[1:], start=1):
                logprob, rank, ((best, best_logprob),) = score_of(position, 1)
                wanted = {str(best): (best_logprob, 1, text_of(best))}
                wanted[str(ids[position])] = (logprob, rank, text_of(ids[position]))
                assert entry == {
                    token_id: {"logprob": value, "rank": place, "decoded_token": text}
                    for token_id, (value, place, text) in wanted.items()
                }


async def test_tokens_without_a_tokenizer_are_written_as_ids(start_gateway: StartGateway) -> None:
    async with start_gateway(scored_echo, tokenizer=False) as gateway:
        body = {"prompt": [5, 6], "logprobs": 0}
        (choice,) = answer_of(await gateway.post("/v1/completions", body))["choices"]
        assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6"]
