"""Models with windows, on prompts of many windows: their tokens, and the blocks they hold."""

from pathlib import Path

import numpy as np
import pytest
import torch

from longshore.protocol.kv_cache_spec import KVCacheSpec
from tests.models import make_tiny_model
from tests.reference import assert_greedy_equal, greedy_reference
from tests.worker.models.cases import CASES, Case
from tests.worker.models.conftest import prompt_of
from tests.worker.models.served_model import ServedModel

NUM_TOKENS = 12
WINDOWED = [case for case in CASES if case.settings.get("sliding_window")]


def answer_and_most_held(
    path: Path, prompt: list[int], *, max_model_len: int, max_num_batched_tokens: int
) -> tuple[list[int], list[tuple[KVCacheSpec, int]]]:
    """The output of a single request in the smallest pool for it, and the maximum number of blocks
    that it held in each group. Freed blocks are NaN in the next step."""
    with ServedModel(
        path,
        num_tokens=NUM_TOKENS,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=None,
        max_steps_in_flight=1,
        enable_prefix_caching=False,
    ) as served:
        specs = [group.spec for group in served.worker.kv_cache.groups]
        most = np.zeros(len(specs), np.int64)
        served.add(prompt)
        while served.step():
            if 0 not in served.ended:
                held = [np.count_nonzero(ids) for ids in served.scheduler.kv_cache.block_ids(0)]
                most = np.maximum(most, held)
            served.poison_free_blocks()
        return served.tokens[0], list(zip(specs, most.tolist(), strict=True))


@pytest.mark.parametrize("case", WINDOWED, ids=str)
@pytest.mark.req("STM-03")
def test_many_windows_give_the_tokens_of_transformers_within_the_blocks_of_one(
    case: Case, tmp_path: Path
) -> None:
    settings = {"initializer_range": 0.2, **case.settings, "max_position_embeddings": 1024}
    reference = make_tiny_model(case.family, tmp_path, **settings)
    prompt, step = prompt_of(600, seed=1), 48
    answer, held = answer_and_most_held(
        tmp_path, prompt, max_model_len=1024, max_num_batched_tokens=step
    )
    assert_greedy_equal([answer], [greedy_reference(reference, prompt, NUM_TOKENS)])
    for spec, most in held:
        window = getattr(spec, "sliding_window", None)
        num_tokens = len(prompt) + NUM_TOKENS - 1 if window is None else window - 1 + step
        assert 0 <= most - -(-num_tokens // spec.block_size) <= (window is not None)


@pytest.mark.req("STM-03")
def test_64k_tokens_need_the_blocks_of_one_window_and_give_the_tokens_of_transformers(
    tmp_path: Path,
) -> None:
    """If every layer has a window, a token depends only on as many windows before it as there are
    layers, and on their positions; transformers computes only these."""
    window, step, length = 64, 2048, 65_536
    reference = make_tiny_model(
        "Mistral",
        tmp_path,
        sliding_window=window,
        max_position_embeddings=length,
        initializer_range=0.2,
    )
    prompt = prompt_of(length - NUM_TOKENS, seed=2)
    answer, [(_, most)] = answer_and_most_held(
        tmp_path, prompt, max_model_len=length, max_num_batched_tokens=step
    )
    assert most <= -(-(window - 1 + step) // 16) + 1
    seen = torch.tensor([*prompt, *answer[:-1]])[-(2 * window + NUM_TOKENS) :]
    positions = torch.arange(length - 1)[-len(seen) :]
    with torch.inference_mode():
        logits = reference(seen[None], position_ids=positions[None]).logits[0]
    assert logits[-NUM_TOKENS:].argmax(-1).tolist() == answer
