"""Drafts in engines of real processes: the tokens are those without drafts."""

import json
import random
import re
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from longshore import LLM, SamplingParams, StructuredOutputsParams
from longshore.deploy.llm.outputs import RequestOutput
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import StateSpec
from longshore.worker.kv_cache.plan import CacheSizes
from longshore.worker.loading.quantise import Scheme, quantise
from longshore.worker.models.families import read_model_config
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.models import make_tiny_llama, make_tiny_model
from tests.worker.models.cases import FIRST_CASES, Case

NUM_TOKENS = 40
DRAFTER = "tests.integration.speculating:HalfRight"

PARAMS = [
    SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2),
    SamplingParams(seed=2, top_p=0.8, max_tokens=NUM_TOKENS - 9, frequency_penalty=0.7),
    SamplingParams(seed=3, top_k=9, min_tokens=20, stop_token_ids=list(range(60)), max_tokens=35),
    SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(seed=4, n=2, max_tokens=NUM_TOKENS, ignore_eos=True),
]
OFFLOADING = {
    "kv_connector": "offloading",
    "kv_connector_config": '{"cpu_bytes_to_use": "64MiB"}',
}
FEW_BLOCKS = {
    "num_blocks": 45,
    "watermark": 0.0,
    "preempt_threshold": 1.0,
    "admit_threshold": 1.0,
}
ENGINES = [
    pytest.param({"in_process": True}, id="in process"),
    pytest.param({"in_process": True, "max_num_batched_tokens": 24}, id="small steps"),
    pytest.param({"in_process": True, **FEW_BLOCKS}, id="preempted"),
    pytest.param({"in_process": True, **OFFLOADING, **FEW_BLOCKS}, id="offloaded"),
    pytest.param(
        {
            **OFFLOADING,
            **FEW_BLOCKS,
            "preemption_mode": "swap",
            "preempt_threshold": 0.95,
            "admit_threshold": 0.9,
        },
        id="swapped",
        marks=pytest.mark.slow,
    ),
    pytest.param({"in_process": True, "kv_cache_dtype": "fp8_e4m3"}, id="fp8"),
    pytest.param({"in_process": True, "cpu_kernels": "torch"}, id="torch"),
    pytest.param({"tensor_parallel_size": 2}, id="2 shards", marks=pytest.mark.slow),
    pytest.param({"pipeline_parallel_size": 2}, id="2 stages", marks=pytest.mark.slow),
    pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, id="2 x 2"),
    pytest.param(
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        id="context parallel",
        marks=pytest.mark.slow,
    ),
]


@pytest.fixture(scope="module", params=["floats", "int4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quantised matrices are multiplied as they are stored."""
    path = tmp_path_factory.mktemp("tiny-llama")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 1}
    make_tiny_llama(path, num_hidden_layers=3, **shape)
    if request.param == "floats":
        return path
    packed = tmp_path_factory.mktemp("quantised")
    quantise(path, read_model_config(path), Scheme("int4", 32), packed, show_progress=False)
    return packed


def prompts_of(number: int) -> list[list[int]]:
    """Ragged; every third continues a common prefix."""
    chance = random.Random(0)
    common = [chance.randrange(3, 128) for _ in range(40)]
    return [
        (common if index % 3 == 0 else [])
        + [chance.randrange(3, 128) for _ in range(1 + 5 * index)]
        for index in range(number)
    ]


PROMPTS = prompts_of(10)


def make_llm(model: Path, **settings: Any) -> LLM:
    settings = {"num_blocks": 400, "block_size": 4, "max_num_seqs": 8, "threads": 1, **settings}
    return LLM(model, device="cpu", dtype="float32", max_model_len=160, **settings)


def generate(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[RequestOutput]:
    params = [PARAMS[index % len(PARAMS)] for index in range(len(prompts))]
    return llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """By request, of each of its answers."""
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def drafting(path: Path, known: Sequence[list[int]], wrong: int) -> dict[str, Any]:
    """Settings of a drafter that knows all tokens of the requests."""
    path.write_text(json.dumps(known))
    options = {"answers": str(path), "wrong": wrong}
    config = {"method": DRAFTER, "num_speculative_tokens": 5, "options": options}
    return {"speculative_config": config}


def with_prompts(answers: Sequence[list[list[int]]]) -> list[list[int]]:
    """All tokens of each answer."""
    pairs = zip(PROMPTS, answers, strict=True)
    return [[*prompt, *answer] for prompt, several in pairs for answer in several]


@pytest.fixture(scope="module")
def answers(model: Path) -> list[list[list[int]]]:
    with make_llm(model, in_process=True) as llm:
        return tokens_of(generate(llm))


def counts_of(llm: LLM) -> dict[str, float]:
    return {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}


def check_acceptance(llm: LLM, wrong: int, *, preempts: bool) -> None:
    """Drafts were verified, and right ones accepted."""
    # Other processes send their statistics a few times per second.
    wait_until(lambda: counts_of(llm)["longshore_scheduler_draft_tokens"] > 50)
    if preempts:
        wait_until(lambda: counts_of(llm)["longshore_scheduler_preemptions"] > 0)
    value = counts_of(llm)
    drafted = value["longshore_scheduler_draft_tokens"]
    accepted = value["longshore_scheduler_accepted_draft_tokens"]
    assert 0 < accepted <= drafted
    if wrong:
        assert accepted < drafted


@pytest.mark.req("SPD-01", "SPD-02", "SPD-03", "SPD-04", "SPD-05")
@pytest.mark.parametrize("wrong", [0, 2])
@pytest.mark.parametrize("settings", ENGINES)
def test_tokens_are_those_without_drafts(
    settings: dict[str, Any],
    wrong: int,
    model: Path,
    answers: list[list[list[int]]],
    tmp_path: Path,
) -> None:
    if settings.keys() & {"kv_cache_dtype", "cpu_kernels"}:  # sums have another order there
        with make_llm(model, **settings) as llm:
            answers = tokens_of(generate(llm))
    drafts = drafting(tmp_path / "answers", with_prompts(answers), wrong)
    with make_llm(model, **settings, **drafts) as llm:
        for _ in range(2):  # the second time after prefix hits
            assert tokens_of(generate(llm)) == answers
        check_acceptance(llm, wrong, preempts=settings.get("num_blocks") is not None)


@pytest.mark.parametrize("case", FIRST_CASES.values(), ids=str)
def test_every_family(case: Case, tmp_path: Path) -> None:
    """Windows, chunks, latents, sinks, mixtures: or a refusal that names the reason."""
    model = tmp_path / "model"
    make_tiny_model(case.family, model, **case.settings)
    with make_llm(model, in_process=True, block_size=16) as llm:
        answers = tokens_of(generate(llm))
    drafts = drafting(tmp_path / "answers", with_prompts(answers), wrong=2)
    sizes = CacheSizes(block_size=16, dtype_bytes=4, num_shards=1)
    if any(
        isinstance(spec, StateSpec) for spec in read_model_config(model).cache_specs(sizes).values()
    ):
        with pytest.raises(ConfigError, match="it keeps states"):
            make_llm(model, in_process=True, block_size=16, **drafts)
        return
    with make_llm(model, in_process=True, block_size=16, **drafts) as llm:
        assert tokens_of(generate(llm)) == answers
        check_acceptance(llm, 2, preempts=False)


def check_experts(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Tokens and experts are equal."""
    assert tokens_of(found) == tokens_of(expected)
    for output, other in zip(found, expected, strict=True):
        for answer, wanted in zip(output.outputs, other.outputs, strict=True):
            assert answer.routed_experts is not None
            np.testing.assert_array_equal(answer.routed_experts, wanted.routed_experts)


def test_the_experts_of_tokens_are_those_without_drafts(tmp_path: Path) -> None:
    """Those of a wrong draft are replaced with it."""
    model = tmp_path / "model"
    make_tiny_model("Mixtral", model, num_local_experts=4, num_experts_per_tok=2)
    settings = {"in_process": True, "enable_return_routed_experts": True}
    with make_llm(model, **settings) as llm:
        expected = generate(llm)
    drafts = drafting(tmp_path / "answers", with_prompts(tokens_of(expected)), wrong=2)
    with make_llm(model, **settings, **drafts) as llm:
        found = generate(llm)
        check_acceptance(llm, 2, preempts=False)
    check_experts(found, expected)


def constrained_answers(num_tokens: int, **settings: Any) -> list[RequestOutput]:
    """Of the demo model, two of three with a grammar. settings: of the drafter; none: no drafts."""
    grammars = [
        StructuredOutputsParams(regex="(ab [0-9]{2},){12}"),
        StructuredOutputsParams(choice=["yes, yes, yes, yes", "no, no, no, no"]),
        None,
    ]
    params = [
        SamplingParams(seed=index, max_tokens=num_tokens, structured_outputs=grammars[index % 3])
        for index in range(6)
    ]
    prompts = [f"{index}: yes, yes, ab 12,ab 12," * 3 for index in range(6)]
    with LLM(
        DEMO_MODEL_DIR,
        in_process=True,
        device="cpu",
        dtype="float32",
        threads=1,
        num_blocks=400,
        max_model_len=512,
        **settings,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if settings:
            check_acceptance(llm, 2, preempts=False)
    return outputs


def test_structured_output(tmp_path: Path) -> None:
    """Every position has a mask of its own, so no draft that a grammar forbids is accepted."""
    expected = constrained_answers(60)
    known = [[*(each.prompt_token_ids or ()), *each.outputs[0].token_ids] for each in expected]
    found = constrained_answers(60, **drafting(tmp_path / "answers", known, wrong=2))
    assert tokens_of(found) == tokens_of(expected)


def completions(deployment: Deployment, prompts: Sequence[str]) -> list[list[int]]:
    client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0)
    with client:
        model = client.models.list().data[0].id
        return [
            client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=60,
                temperature=index % 2,
                seed=index,
                extra_body={"ignore_eos": True, "return_token_ids": True, "top_k": 4},
            )
            .choices[0]
            .token_ids
            for index, prompt in enumerate(prompts)
        ]


@pytest.mark.services
@pytest.mark.slow
def test_a_decode_engine_drafts_after_a_prefill_engine(start_deployment: StartDeployment) -> None:
    """The drafter begins with the prompt and the first token, which the other engine sampled."""
    prompts = ["round and round and round " * 9, "the same again, the same again", "x y x y x y"]
    plain = start_deployment("--dtype", "float32", model_dir=DEMO_MODEL_DIR).wait_until_ready()
    expected = completions(plain, prompts)
    assert plain.stop() == 0
    config = '{"method": "suffix", "num_speculative_tokens": 6}'
    pair = start_deployment(
        *("--prefill", "1", "--decode", "1", "--dtype", "float32"),
        *("--speculative-config", config),
        model_dir=DEMO_MODEL_DIR,
        environment={"UCX_TLS": "tcp"},
    ).wait_until_ready()
    assert completions(pair, prompts) == expected
    accepted = r'longshore_scheduler_accepted_draft_tokens_total\{.*engine="1".*\} [1-9]'

    def has_accepted() -> bool:
        with urllib.request.urlopen(f"{pair.url}/metrics", timeout=PATIENCE_S) as response:
            return re.search(accepted, response.read().decode()) is not None

    wait_until(has_accepted)


def test_a_flag_as_vllm_has_it(start_deployment: StartDeployment) -> None:
    flags = (
        "--speculative-config.method",
        "ngram",
        "--speculative-config.num_speculative_tokens=3",
    )
    deployment = start_deployment(*flags).wait_until_ready()
    assert len(completions(deployment, ["a b c a b c a b"])[0]) == 60


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, "'mtp'"),
        ({"speculative_config": {"method": "suffix"}, "async_scheduling": True}, "async_schedul"),
        ({"speculative_config": "{"}, "JSON object such as"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], reason: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_llm(model, in_process=True, **settings)
