"""Beam search and samples through a whole engine: outputs as with transformers, and shared
blocks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from longshore import LLM, BeamSearchParams, SamplingParams
from longshore.deploy.requests.sample_params import sample_params
from tests.deploy.tiny_tokenizer import EOS_ID
from tests.integration.deployment import Deployment
from tests.models import make_tiny_llama

SETTINGS: dict[str, Any] = {"num_blocks": 600, "max_num_seqs": 32, "threads": 1}
PROMPTS: list[Any] = [
    {"prompt_token_ids": [20 + (7 * i + n) % 200 for i in range(n)]} for n in (1, 5, 16, 37)
]


def reference(
    model: Any, prompt: dict[str, list[int]], width: int, **settings: Any
) -> tuple[list[list[int]], list[float]]:
    """Outputs and scores of transformers, without padding."""
    import torch

    ids = prompt["prompt_token_ids"]
    end = settings.get("eos_token_id")
    found = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
        **settings,
    )
    answers = []
    for line in found.sequences[:, len(ids) :].tolist():
        ends = [index for index, token in enumerate(line) if token == end]
        answers.append(line[: ends[0] + 1] if ends else line)
    return answers, [] if width == 1 else found.sequences_scores.tolist()


@pytest.fixture(scope="module")
def llm(tiny_model: tuple[Path, Any]) -> Iterator[LLM]:
    with LLM(tiny_model[0], in_process=True, verify_plan=True, **SETTINGS) as llm:
        yield llm


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("settings", [{}, {"length_penalty": 2.0}, {"length_penalty": -1.0}])
def test_answers_and_scores_are_those_of_transformers(
    llm: LLM, tiny_model: tuple[Path, Any], width: int, settings: dict[str, Any]
) -> None:
    outputs = llm.beam_search(
        PROMPTS, BeamSearchParams(beam_width=width, max_tokens=9, ignore_eos=True, **settings)
    )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        answers, scores = reference(
            tiny_model[1], prompt, width, max_new_tokens=9, eos_token_id=None, **settings
        )
        assert output.error is None
        assert [beam.tokens for beam in output.sequences] == [
            prompt["prompt_token_ids"] + answer for answer in answers
        ]
        if width > 1:
            assert [beam.score for beam in output.sequences] == pytest.approx(
                scores, rel=1e-5, abs=1e-4
            )
        assert {beam.finish_reason for beam in output.sequences} == {"length"}


@pytest.fixture(scope="module")
def eager_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A small vocabulary, so that the end token is often among the most likely ones."""
    path = tmp_path_factory.mktemp("eager")
    return path, make_tiny_llama(path, vocab_size=12, initializer_range=0.15, eos_token_id=3)


EAGER_PROMPTS: list[Any] = [
    {"prompt_token_ids": [(seed + index * index) % 12 for index in range(4 + seed)]}
    for seed in range(8)
]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize(
    "width", [3, *(pytest.param(width, marks=pytest.mark.long) for width in (2, 7))]
)
def test_beams_end_at_end_tokens_as_in_transformers(
    eager_model: tuple[Path, Any], width: int, early_stopping: Any
) -> None:
    end = eager_model[1].config.eos_token_id
    num_ended = num_unlike = 0
    with LLM(eager_model[0], in_process=True, **SETTINGS) as llm:
        for penalty in (1.0, 0.0, 1.7, -0.5):
            outputs = llm.beam_search(
                EAGER_PROMPTS,
                BeamSearchParams(
                    beam_width=width,
                    max_tokens=12,
                    length_penalty=penalty,
                    early_stopping=early_stopping,
                ),
            )
            for prompt, output in zip(EAGER_PROMPTS, outputs, strict=True):
                answers, scores = reference(
                    eager_model[1],
                    prompt,
                    width,
                    max_new_tokens=12,
                    eos_token_id=end,
                    length_penalty=penalty,
                    early_stopping=early_stopping,
                )
                ids = prompt["prompt_token_ids"]
                got = [beam.tokens[len(ids) :] for beam in output.sequences]
                num_ended += sum(beam.finish_reason == "stop" for beam in output.sequences)
                num_unlike += got != answers
                assert [beam.score for beam in output.sequences] == pytest.approx(
                    scores, rel=1e-5, abs=1e-4
                )
    assert num_ended > 10
    assert num_unlike == 0


@pytest.mark.req("COW-05")
@pytest.mark.parametrize("caching", [True, False])
def test_beams_share_their_history_in_blocks(tiny_model: tuple[Path, Any], caching: bool) -> None:
    prompt: Any = {"prompt_token_ids": [20 + 11 * i % 180 for i in range(160)]}
    width, max_tokens, size = 6, 40, 16
    with LLM(tiny_model[0], in_process=True, enable_prefix_caching=caching, **SETTINGS) as llm:
        scheduler = llm._engine.scheduler  # type: ignore[attr-defined]
        most, num_computed, num_copies, schedule = 0, 0, 0, scheduler.schedule

        def counted(now: float) -> Any:
            nonlocal most, num_computed, num_copies
            plan = schedule(now)
            most = max(most, scheduler.kv_cache.num_blocks - 1 - scheduler.kv_cache.num_free_blocks)
            if plan is not None:
                num_computed += plan.num_scheduled_tokens
                num_copies += len(plan.copy_target_ids)
            return plan

        scheduler.schedule = counted
        (output,) = llm.beam_search(
            prompt, BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
        )
        assert len(output.sequences) == width
        # Each beam computes one token after the other; no token is computed twice.
        assert num_computed == 160 + width * (max_tokens - 1)
        assert 0 < num_copies <= width * (max_tokens - 1)
        depth = -(-(160 + max_tokens) // size)
        assert depth <= most <= depth + 4 * width < width * depth
        llm.generate(
            "x", SamplingParams(max_tokens=1), use_tqdm=False
        )  # the last beams end in this step
        assert scheduler.kv_cache.num_free_blocks == scheduler.kv_cache.num_blocks - 1
        scheduler.check()


def test_processes_of_their_own_find_the_same_beams(llm: LLM, tiny_model: tuple[Path, Any]) -> None:
    """With one rank; test_parallel.py has several."""
    wanted = llm.beam_search([*PROMPTS, "the berth"], BeamSearchParams(beam_width=3, max_tokens=6))
    with LLM(tiny_model[0], **SETTINGS) as separate:
        got = separate.beam_search(
            [*PROMPTS, "the berth"], BeamSearchParams(beam_width=3, max_tokens=6)
        )
        assert [[beam.tokens for beam in output.sequences] for output in got] == [
            [beam.tokens for beam in output.sequences] for output in wanted
        ]
        assert all(beam.text.strip().startswith("the berth") for beam in got[-1].sequences)


def test_beams_survive_a_pool_that_is_too_small(tiny_model: tuple[Path, Any]) -> None:
    prompts: Any = [
        {"prompt_token_ids": [30 + (5 * i + n) % 190 for i in range(40)]} for n in range(4)
    ]
    with LLM(tiny_model[0], in_process=True, **SETTINGS) as roomy:
        wanted = roomy.beam_search(
            prompts, BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True)
        )
    tight: dict[str, Any] = {"num_blocks": 14, "max_num_seqs": 8, "max_model_len": 128}
    with LLM(tiny_model[0], in_process=True, threads=1, **tight) as llm:
        got = llm.beam_search(
            prompts, BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True)
        )
    for one, other in zip(got, wanted, strict=True):  # batches differ, and so do the last digits
        assert [beam.tokens for beam in one.sequences] == [beam.tokens for beam in other.sequences]
        scores = [beam.score for beam in other.sequences]
        assert [beam.score for beam in one.sequences] == pytest.approx(scores, abs=1e-3)


def test_a_prompt_that_fails_fails_alone_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(ValueError, match="beam_width"):
        llm.beam_search("x", BeamSearchParams(beam_width=0, max_tokens=3))
    with pytest.raises(ValueError, match="prompts\\[1\\]"):
        llm.beam_search(
            ["x", {"prompt_token_ids": []}], BeamSearchParams(beam_width=2, max_tokens=3)
        )
    (output,) = llm.beam_search(
        {"prompt_token_ids": [7] * 4090},
        BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True),
    )
    assert [len(beam.tokens) for beam in output.sequences] == [4096, 4096]


@pytest.mark.parametrize("caching", [True, False])
def test_eight_samples_of_a_thousand_tokens_compute_them_once(
    tiny_model: tuple[Path, Any], caching: bool
) -> None:
    prompt: Any = {"prompt_token_ids": [20 + 13 * i % 200 for i in range(1000)]}
    params = SamplingParams(n=8, seed=5, max_tokens=12, ignore_eos=True, temperature=1.0)
    with LLM(tiny_model[0], in_process=True, enable_prefix_caching=caching, **SETTINGS) as llm:
        samples = llm.generate(prompt, params, use_tqdm=False)[0].outputs
        found = [sample.num_cached_tokens for sample in samples]
        assert found == [0] + [999] * 7
        seeds = [each.seed for each in sample_params(params.engine_params(None), 8)]
        each_alone = [replace(params, n=1, seed=seed) for seed in seeds]
        alone = [llm.generate(prompt, each, use_tqdm=False)[0].outputs[0] for each in each_alone]
    assert [each.token_ids for each in samples] == [each.token_ids for each in alone]
    assert len({tuple(each.token_ids) for each in samples}) == 8


# Over HTTP


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, prompt: Any, **settings: Any) -> Any:
    (served,) = client.models.list().data
    return client.completions.create(model=served.id, prompt=prompt, extra_body=settings)


def test_the_api_gives_the_beams_of_transformers(
    client: openai.OpenAI, tiny_model: tuple[Path, Any]
) -> None:
    answers, _ = reference(
        tiny_model[1],
        PROMPTS[2],
        4,
        max_new_tokens=7,
        eos_token_id=EOS_ID,
        length_penalty=0.5,
        early_stopping=True,
    )
    answer = complete(
        client,
        [PROMPTS[2]["prompt_token_ids"], [5, 6, 7]],
        use_beam_search=True,
        n=2,
        best_of=4,
        length_penalty=0.5,
        early_stopping=True,
        max_tokens=7,
        return_token_ids=True,
        temperature=0,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.token_ids for choice in answer.choices[:2]] == answers[:2]
    assert any(choice.text for choice in answer.choices)
    assert answer.usage.prompt_tokens == 16 + 3
    assert answer.usage.completion_tokens == 4 * 7


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "n": 11}, "n"),
        ({"use_beam_search": True, "best_of": 11}, "best_of"),
        ({"best_of": 2}, "best_of"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
    ids=str,
)
def test_what_a_search_cannot_heed_is_rejected_by_name(
    client: openai.OpenAI, settings: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(client, "x", max_tokens=2, **settings)
    assert refusal.value.param == param


def test_neutral_values_change_nothing(client: openai.OpenAI) -> None:
    settings = {"best_of": 1, "length_penalty": 1, "early_stopping": False, "top_k": -1}
    assert complete(client, "x", max_tokens=2, **settings).choices
