"""Sampling end to end: `LLM` and the official client, compared with transformers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from longshore import LLM, SamplingParams
from longshore.deploy.llm.outputs import RequestOutput
from tests.deploy.tiny_tokenizer import EOS_ID, byte_level_tokenizer
from tests.integration.deployment import Deployment

SETTINGS: dict[str, Any] = {"num_blocks": 600, "max_num_seqs": 32, "threads": 1}
LONG_PROMPT = {"prompt_token_ids": [20 + 7 * i % 200 for i in range(80)]}
CHAT: Any = [{"role": "user", "content": "Which berth holds C417?"}]


def reference_logprobs(tiny_model: tuple[Path, Any], token_ids: Sequence[int]) -> list[float]:
    """Log probabilities of every token except the first, by transformers."""
    import torch

    with torch.inference_mode():
        logits = tiny_model[1](torch.tensor([list(token_ids)])).logits[0, :-1]
    chosen = torch.tensor(token_ids[1:]).unsqueeze(1)
    values: list[float] = logits.double().log_softmax(-1).gather(1, chosen).squeeze(1).tolist()
    return values


def told_logprobs(output: RequestOutput) -> list[float]:
    """Log probabilities of every token of prompt and answer except the first."""
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    assert output.prompt_logprobs[0] is None
    told = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    token_ids = [*output.prompt_token_ids[1:], *output.outputs[0].token_ids]
    return [
        entry[token_id].logprob
        for entry, token_id in zip(told, token_ids, strict=True)
        if entry is not None
    ]


@pytest.fixture(scope="module")
def llm(tiny_model: tuple[Path, Any]) -> Iterator[LLM]:
    with LLM(tiny_model[0], in_process=True, max_num_batched_tokens=48, **SETTINGS) as llm:
        yield llm


def test_log_probabilities_are_those_of_transformers(
    llm: LLM, tiny_model: tuple[Path, Any]
) -> None:
    params = SamplingParams(seed=3, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    prompts = [LONG_PROMPT, {"prompt_token_ids": [5]}, "the berth"]
    for _ in range(2):  # the second time the prompt is in the prefix cache, and is scored again
        for output in llm.generate(prompts, params, use_tqdm=False):
            whole = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            assert told_logprobs(output) == pytest.approx(
                reference_logprobs(tiny_model, whole), abs=1e-4
            )
            assert output.outputs[0].logprobs is not None
            assert all(len(entry) in (2, 3) for entry in output.outputs[0].logprobs)


def test_nobody_is_told_what_he_did_not_ask_for(llm: LLM) -> None:
    (output,) = llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)
    assert (output.outputs[0].logprobs, output.prompt_logprobs) == (None, None)


def test_preemption_changes_neither_tokens_nor_scores(
    llm: LLM, tiny_model: tuple[Path, Any]
) -> None:
    prompts = [{"prompt_token_ids": [5 + i] * 20} for i in range(8)]
    params = [
        SamplingParams(
            seed=i,
            max_tokens=60,
            ignore_eos=True,
            logprobs=1,
            prompt_logprobs=0 if i % 2 else None,
            repetition_penalty=1.2,
            frequency_penalty=0.5,
            min_p=0.01,
            bad_words_token_ids=((7, 8), (9,)),
        )
        for i in range(8)
    ]
    calm = llm.generate(prompts, params, use_tqdm=False)
    no_gates = {"watermark": 0.0, "preempt_threshold": 1.0, "admit_threshold": 1.0}
    with LLM(
        tiny_model[0], in_process=True, num_blocks=16, max_num_seqs=8, threads=1, **no_gates
    ) as tight:
        pressed = tight.generate(prompts, params, use_tqdm=False)
    assert sum(output.outputs[0].num_preemptions for output in pressed) > 0
    assert [output.outputs[0].token_ids for output in pressed] == [
        output.outputs[0].token_ids for output in calm
    ]
    for one, other in zip(pressed, calm, strict=True):
        if one.prompt_logprobs is None:
            assert other.prompt_logprobs is None
            continue
        assert told_logprobs(one) == pytest.approx(told_logprobs(other), abs=1e-4)


def test_samples_of_a_prompt_share_its_blocks_and_draw_with_their_own_seeds(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [30 + 11 * i % 180 for i in range(80)]}
    params = SamplingParams(seed=12, max_tokens=8, ignore_eos=True)
    four = replace(params, n=4)
    outputs = llm.generate([prompt, "other"], four, use_tqdm=False)
    assert [[each.index for each in output.outputs] for output in outputs] == [[0, 1, 2, 3]] * 2
    samples = outputs[0].outputs
    assert [sample.num_cached_tokens for sample in samples[1:]] == [79] * 3
    assert len({tuple(sample.token_ids) for sample in samples}) == 4
    (again,) = llm.generate(prompt, replace(params, n=3), use_tqdm=False)
    assert [each.token_ids for each in again.outputs] == [each.token_ids for each in samples[:3]]
    (alone,) = llm.generate(prompt, params, use_tqdm=False)
    assert alone.outputs[0].token_ids == samples[0].token_ids


@pytest.mark.parametrize("in_process", [True, False])
def test_the_model_s_own_end_waits_for_min_tokens(
    llm: LLM, tiny_model: tuple[Path, Any], in_process: bool
) -> None:
    eager = SamplingParams(temperature=0, max_tokens=9, min_tokens=4, logit_bias={EOS_ID: 100})
    if in_process:
        (output,) = llm.generate("x", eager, use_tqdm=False)
    else:
        with LLM(tiny_model[0], **SETTINGS) as separate:
            (output,) = separate.generate("x", eager, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids.index(EOS_ID) == 4
    assert len(output.outputs[0].token_ids) == 5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={320: 1.0}),
        SamplingParams(bad_words_token_ids=((1, 320),)),
    ],
    ids=str,
)
def test_an_id_outside_the_vocabulary_is_a_value_error(llm: LLM, params: SamplingParams) -> None:
    with pytest.raises(ValueError, match="320 is outside the vocabulary"):
        llm.generate("x", params, use_tqdm=False)


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (served,) = client.models.list().data
    return served.id


def test_the_client_reads_log_probabilities_of_a_chat(client: openai.OpenAI, model: str) -> None:
    chat = {"model": model, "messages": CHAT, "seed": 4, "max_completion_tokens": 5}
    whole = client.chat.completions.create(**chat, n=2, logprobs=True, top_logprobs=3)  # type: ignore[call-overload]
    for index, choice in enumerate(whole.choices):
        assert choice.index == index
        tokens = choice.logprobs.content
        assert 1 <= len(tokens) <= 5
        assert all(len(token.top_logprobs) == 3 for token in tokens)
        assert all(token.logprob <= token.top_logprobs[0].logprob + 1e-5 for token in tokens)
    silent = client.chat.completions.create(**chat)  # type: ignore[call-overload]
    assert silent.choices[0].message.content == whole.choices[0].message.content
    assert silent.choices[0].logprobs is None
    chunks = list(client.chat.completions.create(**chat, logprobs=True, stream=True))  # type: ignore[call-overload]
    streamed = [
        token.logprob
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    wanted = [token.logprob for token in whole.choices[0].logprobs.content]
    assert streamed == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_can_be_scored_by_echo(
    client: openai.OpenAI, model: str, tiny_model: tuple[Path, Any], max_tokens: int
) -> None:
    prompt = "the berth holds nothing but the ship"
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0
    )
    (choice,) = answer.choices
    assert choice.text.startswith(prompt)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    first, *values = choice.logprobs.token_logprobs
    assert first is None
    ids = byte_level_tokenizer().encode(prompt).ids
    wanted = reference_logprobs(tiny_model, ids)
    assert values[: len(wanted)] == pytest.approx(wanted, abs=1e-4)
    assert len(values) - len(wanted) <= max_tokens
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens).startswith(prompt)


def test_prompt_log_probabilities_come_beside_the_answer(
    client: openai.OpenAI, model: str, tiny_model: tuple[Path, Any]
) -> None:
    prompt = LONG_PROMPT["prompt_token_ids"]
    (choice,) = client.completions.create(
        model=model, prompt=prompt, max_tokens=1, extra_body={"prompt_logprobs": 1}
    ).choices
    first, *told = choice.prompt_logprobs  # type: ignore[attr-defined]
    assert first is None
    values = [entry[str(token)]["logprob"] for entry, token in zip(told, prompt[1:], strict=True)]
    assert values == pytest.approx(reference_logprobs(tiny_model, prompt), abs=1e-4)


def test_the_client_s_settings_change_the_answer(client: openai.OpenAI, model: str) -> None:
    def answer(**settings: Any) -> Any:
        settings = {"max_tokens": 6, "temperature": 0, "extra_body": {}} | settings
        settings["extra_body"] = {"ignore_eos": True, "return_token_ids": True} | settings[
            "extra_body"
        ]
        return client.completions.create(model=model, prompt="the", **settings).choices

    def ids(**settings: Any) -> list[int]:
        (choice,) = answer(**settings)
        token_ids: list[int] = choice.token_ids
        return token_ids

    free = ids()
    letter = byte_level_tokenizer().encode("q").ids[0]
    assert ids(logit_bias={str(letter): 100}) == [letter] * 6
    varied = ids(logit_bias={str(letter): 60}, presence_penalty=2, frequency_penalty=2)
    assert varied[0] == letter
    forbidden = ids(logit_bias={str(letter): 100}, extra_body={"bad_words": ["q"]})
    assert letter not in forbidden
    penalised = ids(logit_bias={str(letter): 100}, extra_body={"repetition_penalty": 100})
    assert penalised.count(letter) == 1
    assert ids(temperature=1, extra_body={"min_p": 1.0}) == free
    assert ids(temperature=1, extra_body={"top_k": 1}) == free
    several = answer(temperature=1, seed=3, n=3, max_tokens=8)
    assert [choice.index for choice in several] == [0, 1, 2]
    assert len({choice.text for choice in several}) == 3
    assert several[0].token_ids == ids(temperature=1, seed=3, max_tokens=8)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"n": 0}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 99}, "logprobs"),
        ({"presence_penalty": 9}, "presence_penalty"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"use_beam_search": True, "min_p": 0.1}}, "min_p"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_client_is_told_which_setting_is_wrong(
    client: openai.OpenAI, model: str, settings: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model=model, prompt="x", **settings)
    assert refusal.value.param == param
