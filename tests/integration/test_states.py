"""Models that keep states, alone and beside attention, in processes that share each layer."""

from pathlib import Path

import pytest

from longshore import LLM, SamplingParams
from tests.integration.test_families import NUM_TOKENS, ragged_prompts
from tests.models import make_tiny_model
from tests.reference import assert_greedy_equal, greedy_reference
from tests.worker.models.cases import CASES
from tests.worker.models.conftest import prompt_of

FAMILIES = ("Mamba2", "Bamba")


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_prefix_hits_on_two_ranks_change_no_token(family: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.family == family)
    model = make_tiny_model(family, tmp_path, **{"initializer_range": 0.2, **case.settings})
    prompts = ragged_prompts()
    references = [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(
        tmp_path,
        device="cpu",
        dtype="float32",
        tensor_parallel_size=2,
        threads=1,
        block_size=16,
        num_blocks=80,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=50,
        verify_plan=True,
    ) as llm:
        for _ in range(2):
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], params, progress=False
            )
            assert_greedy_equal([output.token_ids for output in outputs], references)
        assert any(output.num_cached_tokens >= 32 for output in outputs)


def test_long_prompts_go_through_two_stages_on_the_fewest_blocks(tmp_path: Path) -> None:
    """Both stages' steps hold states of the one request that fits; nobody waits for ever."""
    case = next(case for case in CASES if case.family == "Mamba2")
    model = make_tiny_model("Mamba2", tmp_path, **{"initializer_range": 0.2, **case.settings})
    prompts = [prompt_of(length, seed=length) for length in (150, 70, 110)]
    references = [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    num_blocks = 1 + 3  # the null block; a state to go on from, and one per stage
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
        outputs = llm.generate(inputs, params, progress=False)
    assert_greedy_equal([output.token_ids for output in outputs], references)
