"""Greedy tokens equal those of transformers on every path of a request, through processes or in one
process."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from longshore import LLM, SamplingParams
from longshore.deploy.llm.outputs import RequestOutput
from tests.models import make_tiny_llama
from tests.reference import ReferenceAnswer, assert_greedy_equal, greedy_reference

NUM_PROMPTS = 64
NUM_TOKENS = 24
MAX_MODEL_LEN = 256
HERE: dict[str, Any] = {"in_process": True}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("tiny-llama")
    return path, make_tiny_llama(path)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Ragged prompts of 1 to 200 tokens, a third of which continues one of two common prefixes."""
    rng = random.Random(0)
    common = [[rng.randrange(128) for _ in range(120)] for _ in range(2)]
    made = []
    for _ in range(NUM_PROMPTS):
        start = rng.choice((*common, [], [], [], []))[: rng.choice((48, 77, 120))]
        made.append(start + [rng.randrange(128) for _ in range(rng.randrange(1, 80))])
    return made


@pytest.fixture(scope="module")
def references(checkpoint: tuple[Path, Any], prompts: list[list[int]]) -> list[ReferenceAnswer]:
    return [greedy_reference(checkpoint[1], prompt, NUM_TOKENS) for prompt in prompts]


def generate(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[RequestOutput]:
    return llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts], GREEDY, use_tqdm=False
    )


def make_llm(checkpoint: tuple[Path, Any], **settings: Any) -> LLM:
    settings = {"num_blocks": 2000, "max_num_seqs": 64, "threads": 1, **settings}
    return LLM(checkpoint[0], device="cpu", dtype="float32", **settings)


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, Any]) -> Iterator[LLM]:
    with make_llm(checkpoint, verify_plan=True) as made:
        yield made


def test_ragged_batch_of_64_equals_the_reference(
    llm: LLM, prompts: list[list[int]], references: list[ReferenceAnswer]
) -> None:
    outputs = generate(llm, prompts)
    assert_greedy_equal([output.outputs[0].token_ids for output in outputs], references)


def test_prefix_hits_change_no_token(
    llm: LLM, prompts: list[list[int]], references: list[ReferenceAnswer]
) -> None:
    generate(llm, prompts)
    outputs = generate(llm, prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    assert_greedy_equal([output.outputs[0].token_ids for output in outputs], references)


def test_requests_alone_equal_the_reference(
    llm: LLM, prompts: list[list[int]], references: list[ReferenceAnswer]
) -> None:
    outputs = [output for prompt in prompts[:12] for output in generate(llm, [prompt])]
    assert_greedy_equal([output.outputs[0].token_ids for output in outputs], references[:12])


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 1, "num_blocks": 30_000, "max_num_batched_tokens": 37},
        {"block_size": 64, "async_scheduling": False},
        {**HERE, "long_prefill_token_threshold": 5, "enable_prefix_caching": False},
        {**HERE, "block_size": 64, "max_num_batched_tokens": 256, "enable_chunked_prefill": False},
        {**HERE, "max_num_batched_tokens": 64},
    ],
    ids=["block-1-tiny-chunks", "block-64-sync", "uncached-threshold", "unchunked", "in-process"],
)
def test_settings_change_no_token(
    checkpoint: tuple[Path, Any],
    prompts: list[list[int]],
    references: list[ReferenceAnswer],
    settings: dict[str, Any],
) -> None:
    with make_llm(checkpoint, **settings) as llm:
        outputs = generate(llm, prompts)
    assert_greedy_equal([output.outputs[0].token_ids for output in outputs], references)


@pytest.mark.parametrize(
    "settings",
    [{"async_scheduling": True}, {**HERE, "async_scheduling": False}],
    ids=["asynchronous", "synchronous"],
)
@pytest.mark.req("PRE-05")
def test_preemption_changes_no_token(
    checkpoint: tuple[Path, Any],
    prompts: list[list[int]],
    references: list[ReferenceAnswer],
    settings: dict[str, Any],
) -> None:
    no_gates = {"watermark": 0.0, "preempt_threshold": 1.0, "admit_threshold": 1.0}
    with make_llm(checkpoint, num_blocks=61, **settings, **no_gates) as llm:
        outputs = generate(llm, prompts)
    assert sum(output.outputs[0].num_preemptions for output in outputs) > 10
    assert_greedy_equal([output.outputs[0].token_ids for output in outputs], references)


def test_seeded_sampling_depends_on_nothing_but_seed_and_prompt(
    checkpoint: tuple[Path, Any], llm: LLM, prompts: list[list[int]]
) -> None:
    def sample(llm: LLM, chosen: Sequence[int]) -> list[list[int]]:
        outputs = llm.generate(
            [{"prompt_token_ids": prompts[index]} for index in chosen],
            [
                SamplingParams(
                    temperature=0.9,
                    top_p=0.95 if index % 2 else 1.0,
                    top_k=20 if index % 3 else 0,
                    seed=index,
                    max_tokens=16,
                    ignore_eos=True,
                )
                for index in chosen
            ],
            use_tqdm=False,
        )
        return [output.outputs[0].token_ids for output in outputs]

    together = sample(llm, range(NUM_PROMPTS))
    assert [sample(llm, [index])[0] for index in range(6)] == together[:6]
    with make_llm(checkpoint, num_blocks=61, max_num_batched_tokens=50, **HERE) as pressed:
        assert sample(pressed, range(NUM_PROMPTS)) == together


def test_reference_is_what_generate_answers(
    checkpoint: tuple[Path, Any], prompts: list[list[int]], references: list[ReferenceAnswer]
) -> None:
    import torch

    prompt = torch.tensor([prompts[0]])
    output = checkpoint[1].generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert output[0, len(prompts[0]) :].tolist() == references[0].token_ids
