"""Engines whose shards split the tokens of the KV cache give the tokens of one rank."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from longshore import LLM, SamplingParams
from longshore.deploy.llm.remote_engine import RemoteEngine
from longshore.protocol.errors import ConfigError
from longshore.protocol.outputs import EngineOutputs
from tests.integration.test_parallel import GREEDY, NO_GATES, NUM_TOKENS, generate, make_llm
from tests.models import make_tiny_model
from tests.reference import ReferenceAnswer, assert_greedy_equal, greedy_reference
from tests.worker.models.cases import LATENT

BLOCK_SIZE = 4
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 1},
    "DeepseekV3": {**LATENT, "n_group": 4, "topk_group": 2, "initializer_range": 0.2},
}
SHARED: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "block_size": BLOCK_SIZE,
}


class Checkpoint:
    """A tiny model, ragged prompts, every third of which continues a common prefix, and the outputs
    of transformers."""

    def __init__(self, family: str, path: Path) -> None:
        self.path = path
        model = make_tiny_model(family, path, **MODELS[family])
        rng = random.Random(0)
        common = rng.choices(range(128), k=41)
        self.prompts = [
            (common if index % 3 == 0 else []) + rng.choices(range(128), k=1 + 3 * index)
            for index in range(16)
        ]
        self.references: list[ReferenceAnswer] = [
            greedy_reference(model, prompt, NUM_TOKENS) for prompt in self.prompts
        ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {family: Checkpoint(family, tmp_path_factory.mktemp(family)) for family in MODELS}


@pytest.fixture(
    scope="module",
    params=[("Llama", 4), ("DeepseekV3", 1)],  # other settings: tests/worker/attention
    ids=lambda param: f"{param[0]}, turns of {param[1]}",
)
def shared(
    request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint]
) -> Iterator[tuple[LLM, Checkpoint]]:
    family, interleave = request.param
    checkpoint = checkpoints[family]
    with make_llm(
        checkpoint.path, verify_plan=True, cp_kv_cache_interleave_size=interleave, **SHARED
    ) as llm:
        yield llm, checkpoint


@pytest.mark.req("FEA-06", "COO-02")
def test_ragged_batches_and_prefix_hits_equal_the_reference(
    shared: tuple[LLM, Checkpoint],
) -> None:
    llm, checkpoint = shared
    for _ in range(2):
        outputs = generate(llm, checkpoint.prompts)
        assert_greedy_equal(
            [output.outputs[0].token_ids for output in outputs], checkpoint.references
        )
    of_both_ranks = 2 * BLOCK_SIZE
    assert [output.num_cached_tokens for output in outputs] == [
        (len(prompt) - 1) // of_both_ranks * of_both_ranks for prompt in checkpoint.prompts
    ]


@pytest.mark.req("FEA-06")
def test_samples_that_share_a_block_in_part_are_those_of_one_rank(
    shared: tuple[LLM, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler sees no request before all are sent: a sample that arrives after the end of the
    first one is no fork of it."""
    llm, checkpoint = shared
    (scheduler,) = (
        child
        for child in psutil.Process().children()
        if child.cmdline()[-1].endswith("scheduler.json")
    )
    receive = RemoteEngine.receive

    def resume_and_receive(engine: RemoteEngine) -> EngineOutputs | None:
        scheduler.resume()
        return receive(engine)

    monkeypatch.setattr(RemoteEngine, "receive", resume_and_receive)
    params = SamplingParams(temperature=0.8, seed=7, n=2, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in checkpoint.prompts[:7]]
    with make_llm(checkpoint.path, in_process=True, block_size=BLOCK_SIZE) as alone:
        scheduler.suspend()
        samples, wanted = (
            [sample for output in outputs for sample in output.outputs]
            for outputs in (each.generate(prompts, params, use_tqdm=False) for each in (llm, alone))
        )
    assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in wanted]
    assert [sample.num_cached_tokens for sample in samples[1::2]] == [
        len(prompt) - 1 for prompt in checkpoint.prompts[:7]
    ]


@pytest.mark.req("FEA-06")
@pytest.mark.parametrize(("family", "interleave"), [("Llama", 1), ("DeepseekV3", 2)])
def test_chunks_and_preemptions_change_no_token_in_half_the_blocks(
    checkpoints: dict[str, Checkpoint], family: str, interleave: int
) -> None:
    """A pool that holds two requests of 128 tokens on one rank holds four on two ranks."""
    checkpoint = checkpoints[family]
    with make_llm(
        checkpoint.path,
        num_blocks=1 + 2 * 128 // BLOCK_SIZE,
        max_model_len=128,
        max_num_batched_tokens=37,
        cp_kv_cache_interleave_size=interleave,
        **NO_GATES,
        **SHARED,
    ) as llm:
        outputs = generate(llm, checkpoint.prompts)
    assert sum(output.outputs[0].num_preemptions for output in outputs) > 0
    assert_greedy_equal([output.outputs[0].token_ids for output in outputs], checkpoint.references)


@pytest.mark.slow
@pytest.mark.req("FEA-06")
def test_two_pairs_of_four_shards_share_a_kv_head_each(tmp_path: Path) -> None:
    """The cache is in fp8; one rank gives the same tokens."""
    make_tiny_model("Llama", tmp_path)
    prompts = [[5 + 7 * n % 100 for n in range(length)] for length in (1, 9, 70, 71)]
    settings = {"kv_cache_dtype": "fp8_e4m3", "max_num_batched_tokens": 33}
    four = SHARED | {"tensor_parallel_size": 4}
    with make_llm(tmp_path, in_process=True, **settings) as llm:
        wanted = [output.outputs[0].token_ids for output in generate(llm, prompts)]
    with make_llm(tmp_path, **settings, **four) as llm:
        assert [output.outputs[0].token_ids for output in generate(llm, prompts)] == wanted


@pytest.mark.slow
@pytest.mark.req("FEA-06")
def test_a_request_that_one_rank_cannot_hold_fits_where_two_share_it(
    checkpoints: dict[str, Checkpoint],
) -> None:
    checkpoint = checkpoints["Llama"]
    settings = {"num_blocks": 1 + 64 // BLOCK_SIZE, "max_model_len": 128}
    with pytest.raises(ConfigError, match="max_model_len=128 tokens needs 33"):
        make_llm(checkpoint.path, in_process=True, block_size=BLOCK_SIZE, **settings)
    longest = max(checkpoint.prompts, key=len)
    assert len(longest) > 64
    with make_llm(checkpoint.path, **settings, **SHARED) as llm:
        (output,) = generate(llm, [longest], GREEDY)
    reference = checkpoint.references[checkpoint.prompts.index(longest)]
    assert_greedy_equal([output.outputs[0].token_ids], [reference])


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ({}, {"decode_context_parallel_size": 2}, "does not divide tensor_parallel_size=1"),
        ({}, SHARED, "does not divide the 1 copies of each of the 2 KV heads"),
        (
            {"num_key_value_heads": 1},
            {**SHARED, "cp_kv_cache_interleave_size": 3},
            "cp_kv_cache_interleave_size=3 does not divide block_size=4",
        ),
        ({}, {"cp_kv_cache_interleave_size": 2}, "no workers share tokens"),
        ({}, {"decode_context_parallel_size": 0}, "decode_context_parallel_size=0"),
    ],
)
def test_what_ranks_cannot_share_is_rejected_by_name_before_anything_starts(
    tmp_path: Path, family: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    make_tiny_model("Llama", tmp_path, **family)
    with pytest.raises(ConfigError, match=words):
        make_llm(tmp_path, **settings)


def test_a_model_with_windows_is_rejected_by_name(tmp_path: Path) -> None:
    make_tiny_model("Gemma2", tmp_path, num_key_value_heads=1, sliding_window=8, head_dim=16)
    with pytest.raises(ConfigError, match=r"has a SlidingWindowSpec.* can be split by"):
        make_llm(tmp_path, **SHARED)
