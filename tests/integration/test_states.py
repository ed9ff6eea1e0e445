"""Models with states, in processes that have some of the layers each."""

from pathlib import Path

import pytest

from longshore import LLM, SamplingParams
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
