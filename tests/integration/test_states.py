"""Models with states: in processes that have some of the layers each, and requests that share a
prompt."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import pytest

from longshore import LLM, BeamSearchParams, SamplingParams
from longshore.deploy.requests.sample_params import sample_params
from tests.deploy.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, save_tokenizer
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.integration.test_beam_search import reference
from tests.integration.test_families import NUM_TOKENS
from tests.models import make_tiny_model
from tests.reference import assert_greedy_equal, greedy_reference
from tests.worker.models.cases import CASES
from tests.worker.models.conftest import prompt_of


@pytest.mark.slow
def test_long_prompts_go_through_two_stages_on_the_fewest_blocks(tmp_path: Path) -> None:
    """The steps of both stages hold states of the only request that fits; no request waits
    forever."""
    case = next(case for case in CASES if case.family == "Mamba2")
    model = make_tiny_model("Mamba2", tmp_path, **{"initializer_range": 0.2, **case.settings})
    prompts = [prompt_of(length, seed=length) for length in (150, 70, 110)]
    references = [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    num_blocks = 1 + 3  # the null block; a state to continue from, and one per stage
    with LLM(
        tmp_path,
        device="cpu",
        dtype="float32",
        pipeline_parallel_size=2,
        threads=1,
        block_size=16,
        max_model_len=200,
        num_blocks=num_blocks,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=32,
        verify_plan=True,
    ) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
    assert_greedy_equal([output.outputs[0].token_ids for output in outputs], references)


HYBRIDS = ("Qwen3Next", "GraniteMoeHybrid")
HOST_TIER = {
    "kv_connector": "simple_cpu",
    "kv_connector_config": json.dumps({"cpu_bytes_to_use": "16MiB"}),
}
PROMPT = prompt_of(37, seed=37)


def make_hybrid(family: str, path: Path) -> Any:
    """With a byte tokenizer; returns the transformers model."""
    case = next(case for case in CASES if case.family == family)
    ids = {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    model = make_tiny_model(family, path, **{"initializer_range": 0.2, **case.settings, **ids})
    save_tokenizer(path)
    return model


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A checkpoint, and the transformers model."""
    path = tmp_path_factory.mktemp("hybrid")
    return path, make_hybrid(request.param, path)


class Counting:
    """An engine in this process, and the tokens that it has computed."""

    def __init__(self, path: Path, **settings: Any) -> None:
        sizes = {"num_blocks": 600, "max_num_seqs": 32, "max_model_len": 256, "block_size": 16}
        given: dict[str, Any] = {**sizes, "dtype": "float32", "device": "cpu", **settings}
        self.llm = LLM(path, in_process=True, verify_plan=True, threads=1, **given)
        self.scheduler = self.llm._engine.scheduler  # type: ignore[attr-defined]
        self.num_computed, self._schedule = 0, self.scheduler.schedule
        self.scheduler.schedule = self._count

    def _count(self, now: float) -> Any:
        plan = self._schedule(now)
        self.num_computed += 0 if plan is None else plan.num_scheduled_tokens
        return plan

    def __enter__(self) -> "Counting":
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.check()
        self.llm.__exit__(None, None, None)


@pytest.mark.req("COW-05")
@pytest.mark.parametrize("caching", [True, False])
def test_samples_compute_their_prompt_once_and_have_the_tokens_of_requests_of_their_own(
    hybrid: tuple[Path, Any], caching: bool
) -> None:
    prompt: Any = {"prompt_token_ids": PROMPT}
    with Counting(hybrid[0], enable_prefix_caching=caching) as engine:
        llm = engine.llm
        for temperature in (0.0, 1.0):
            params = SamplingParams(
                n=3, seed=5, max_tokens=9, ignore_eos=True, temperature=temperature
            )
            engine.num_computed = 0
            samples = llm.generate(prompt, params, use_tqdm=False)[0].outputs
            assert [each.num_cached_tokens for each in samples[1:]] == [len(PROMPT) - 1] * 2
            num_found = samples[0].num_cached_tokens
            assert engine.num_computed == len(PROMPT) - num_found + 2 + 3 * 8
            seeds = [each.seed for each in sample_params(params.engine_params(None), 3)]
            each_alone = [replace(params, n=1, seed=seed) for seed in seeds]
            alone = [
                llm.generate(prompt, each, use_tqdm=False)[0].outputs[0] for each in each_alone
            ]
            assert [each.token_ids for each in samples] == [each.token_ids for each in alone]


@pytest.mark.req("COW-05")
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("caching", [True, False])
def test_beams_are_those_of_transformers_and_compute_no_token_twice(
    hybrid: tuple[Path, Any], width: int, caching: bool
) -> None:
    prompts: list[Any] = [{"prompt_token_ids": prompt_of(n, seed=n)} for n in (1, 5, 16, 37)]
    with Counting(hybrid[0], enable_prefix_caching=caching) as engine:
        outputs = engine.llm.beam_search(
            prompts, BeamSearchParams(beam_width=width, max_tokens=9, ignore_eos=True)
        )
        assert engine.num_computed == 1 + 5 + 16 + 37 + len(prompts) * width * 8
    for prompt, output in zip(prompts, outputs, strict=True):
        answers, _ = reference(hybrid[1], prompt, width, max_new_tokens=9, eos_token_id=None)
        ids = prompt["prompt_token_ids"]
        assert [beam.tokens for beam in output.sequences] == [ids + answer for answer in answers]


@pytest.mark.parametrize("tier", [{}, HOST_TIER], ids=["", "with a host tier"])
def test_beams_survive_a_pool_that_is_too_small(
    hybrid: tuple[Path, Any], tier: dict[str, Any]
) -> None:
    prompts: Any = [{"prompt_token_ids": prompt_of(40, seed=n)} for n in range(4)]
    params = BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True)
    with Counting(hybrid[0]) as engine:
        wanted = engine.llm.beam_search(prompts, params)
        num_pages = engine.scheduler.kv_cache.kept_states.num_pages
    tight = {"num_blocks": 10 + 4 * num_pages, "max_num_seqs": 8, "max_model_len": 128}
    with Counting(hybrid[0], **tight, **tier) as engine:
        got = engine.llm.beam_search(prompts, params)
    for one, other in zip(got, wanted, strict=True):
        assert [beam.tokens for beam in one.sequences] == [beam.tokens for beam in other.sequences]


@pytest.mark.parametrize("chunk", [16, 256])
@pytest.mark.parametrize("caching", [True, False])
def test_the_next_turn_computes_no_token_of_the_last_answer(
    hybrid: tuple[Path, Any], caching: bool, chunk: int
) -> None:
    """Two ways to go on after the first answer, and a long chat; beside other requests."""
    path, model = hybrid
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    settings = {"enable_prefix_caching": caching, "max_num_batched_tokens": chunk}
    with Counting(path, max_num_seqs=4, **settings) as engine:
        talks, num_known = [prompt_of(21, seed=1)] * 2, 0
        for turn in range(6):
            talks = [[*talk, *prompt_of(5, seed=9 * n + turn)] for n, talk in enumerate(talks)]
            other: Any = {"prompt_token_ids": prompt_of(30, seed=50 + turn)}
            prompts: list[Any] = [{"prompt_token_ids": talk} for talk in talks]
            *outputs, _ = engine.llm.generate([*prompts, other], params, use_tqdm=False)
            answers = [list(output.outputs[0].token_ids) for output in outputs]
            assert_greedy_equal(answers, [greedy_reference(model, talk, 7) for talk in talks])
            if turn:
                num_found = [output.num_cached_tokens for output in outputs]
                assert num_found == [num_known if caching else 0] * 2
            talks = [[*talk, *answer] for talk, answer in zip(talks, answers, strict=True)]
            num_known = len(talks[0]) - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=str
)
def test_every_rank_copies_its_part_of_a_state(hybrid: tuple[Path, Any], ranks: Any) -> None:
    prompts: list[Any] = [{"prompt_token_ids": prompt_of(n, seed=n)} for n in (5, 37)]
    with LLM(
        hybrid[0],
        device="cpu",
        dtype="float32",
        threads=1,
        num_blocks=600,
        max_model_len=256,
        verify_plan=True,
        **ranks,
    ) as llm:
        outputs = llm.beam_search(
            prompts, BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True)
        )
    for prompt, output in zip(prompts, outputs, strict=True):
        answers, _ = reference(hybrid[1], prompt, 3, max_new_tokens=9, eos_token_id=None)
        ids = prompt["prompt_token_ids"]
        assert [beam.tokens for beam in output.sequences] == [ids + answer for answer in answers]


# Over HTTP


@pytest.fixture(scope="module")
def served(
    hybrid: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    flags = ("--dtype", "float32", "--device", "cpu", "--max-model-len", "256")
    with Deployment(hybrid[0], tmp_path_factory.mktemp("run"), *flags) as served:
        yield served.wait_until_ready()


def test_the_api_gives_samples_and_beams_that_have_computed_their_prompt_once(
    hybrid: tuple[Path, Any], served: Deployment
) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data

        def complete(prompt: list[int], **settings: Any) -> list[list[int]]:
            body = {"max_tokens": 9, "ignore_eos": True, "return_token_ids": True, **settings}
            answer: Any = client.completions.create(model=model.id, prompt=prompt, extra_body=body)
            return [choice.token_ids for choice in answer.choices]

        (greedy,), _ = reference(
            hybrid[1], {"prompt_token_ids": PROMPT}, 1, max_new_tokens=9, eos_token_id=None
        )
        before = lookups(served)
        assert complete(PROMPT, n=3, temperature=0) == [greedy] * 3
        # A fork that arrives when its prompt is being computed begins with the state at its end.
        num_found = found_since(served, before, 3 * len(PROMPT))
        assert num_found in (2 * 36, 36 + 32, 2 * 32)
        seeded = complete(PROMPT, n=3, temperature=1.0, seed=5)
        params = SamplingParams(n=3, seed=5, temperature=1.0).engine_params(None)
        seeds = [each.seed for each in sample_params(params, 3)]
        assert seeded == [complete(PROMPT, temperature=1.0, seed=seed)[0] for seed in seeds]
        found_since(served, before, 9 * len(PROMPT))

        other = prompt_of(29, seed=3)
        beams, _ = reference(
            hybrid[1], {"prompt_token_ids": other}, 3, max_new_tokens=9, eos_token_id=None
        )
        before = lookups(served)
        assert complete(other, n=3, use_beam_search=True, temperature=0) == beams
        # Each beam of a step is a request that computes its last token.
        num_tokens = 29 + sum(3 * (29 + step) for step in range(1, 9))
        assert found_since(served, before, num_tokens) == num_tokens - 29 - 3 * 8


def lookups(served: Deployment) -> tuple[int, int]:
    """Prompt tokens of requests that have begun, and those of them that were found."""
    with urlopen(f"{served.url}/metrics", timeout=PATIENCE_S) as response:
        text = response.read().decode()

    def total(name: str) -> int:
        values = re.findall(rf"longshore_scheduler_{name}_total{{.*}} (\S+)", text)
        return sum(int(float(value)) for value in values)

    return total("prompt_tokens"), total("prefix_hit_tokens")


def found_since(served: Deployment, before: tuple[int, int], num_tokens: int) -> int:
    """Found tokens of requests with `num_tokens` prompt tokens, once these are reported."""
    wait_until(lambda: lookups(served)[0] - before[0] >= num_tokens)
    now = lookups(served)
    assert now[0] - before[0] == num_tokens
    return now[1] - before[1]


def test_a_conversation_among_single_requests_finds_its_prompts_and_has_its_own_tokens(
    hybrid: tuple[Path, Any],
) -> None:
    """What lies between two turns fills the pool; the oldest state would be the conversation's."""
    path, model = hybrid
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with Counting(path, num_blocks=50, max_num_seqs=2) as engine:
        talk, num_known = prompt_of(30, seed=1), 0
        for turn in range(9):
            between: list[Any] = [
                {"prompt_token_ids": prompt_of(40, seed=100 + 8 * turn + number)}
                for number in range(8)
            ]
            engine.llm.generate(between, params, use_tqdm=False)
            (output,) = engine.llm.generate({"prompt_token_ids": talk}, params, use_tqdm=False)
            tokens = list(output.outputs[0].token_ids)
            assert_greedy_equal([tokens], [greedy_reference(model, talk, 6)])
            if turn > 4:  # it has been learned that conversations go on
                assert output.num_cached_tokens >= num_known - 16
            num_known = len(talk)
            talk = [*talk, *tokens, *prompt_of(12, seed=turn)]
