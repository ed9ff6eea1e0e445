"""Models with several KV cache groups, through real processes."""

import math
import random
from pathlib import Path
from typing import Any

import pytest

from longshore import LLM, SamplingParams
from tests.models import make_tiny_model
from tests.reference import assert_greedy_equal, greedy_reference

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
WINDOW, NUM_LAYERS = 40, 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Windows in four of six layers: three groups of two."""
    path = tmp_path_factory.mktemp("gemma3")
    return path, make_tiny_model(
        "Gemma3",
        path,
        num_hidden_layers=NUM_LAYERS,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=WINDOW,
        head_dim=16,
        initializer_range=0.1,
    )


@pytest.mark.parametrize(
    "ranks",
    [  # 2 shards: Gemma 3 in test_families.py
        pytest.param({"in_process": True}, id="one rank"),
        pytest.param({"pipeline_parallel_size": 2}, id="2 stages", marks=pytest.mark.slow),
    ],
)
def test_windows_far_beyond_hits_and_preemptions_change_no_token(
    checkpoint: tuple[Path, Any], ranks: dict[str, Any]
) -> None:
    """Prompts of several windows with a common prefix, in a pool that holds only a few of them."""
    rng = random.Random(0)
    common = rng.choices(range(3, 128), k=100)
    prompts = [common + rng.choices(range(3, 128), k=rng.randrange(1, 90)) for _ in range(8)]
    wanted = [greedy_reference(checkpoint[1], prompt, NUM_TOKENS) for prompt in prompts]
    in_flight = 2 * 32
    blocks_at_most = 256 // 16 + 2 * (math.ceil((WINDOW - 1 + in_flight) / 16) + 1)
    with LLM(
        checkpoint[0],
        device="cpu",
        threads=1,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        num_blocks=blocks_at_most + 1,
        verify_plan=True,
        watermark=0.0,
        preempt_threshold=1.0,
        admit_threshold=1.0,
        **ranks,
    ) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs[:1], GREEDY, use_tqdm=False)
        outputs += llm.generate(inputs, GREEDY, use_tqdm=False)
    assert_greedy_equal([output.outputs[0].token_ids for output in outputs], [wanted[0], *wanted])
    assert outputs[1].num_cached_tokens >= 96
    assert any(output.outputs[0].num_preemptions for output in outputs)
