"""The tokens and log probabilities of transformers, for every family on every path."""

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from longshore.protocol.kv_cache_spec import StateSpec
from longshore.worker.kernels import experts
from tests.reference import ReferenceAnswer, assert_greedy_equal
from tests.worker.kernels.variants import TRITON, using
from tests.worker.models.cases import CASES, Case
from tests.worker.models.conftest import (
    NUM_COMMON,
    NUM_TOKENS,
    Checkpoint,
    every_case,
    every_family,
    unless_first,
)
from tests.worker.models.paged_model import PagedModel, forward_logits
from tests.worker.models.served_model import ServedModel

CheckpointOf = Callable[[Case], Checkpoint]
OutputProcessor = tuple[list[list[int]], list[ReferenceAnswer]]


def served_model(checkpoint: Checkpoint, **settings: object) -> ServedModel:
    return ServedModel(
        checkpoint.path,
        num_tokens=NUM_TOKENS,
        max_model_len=checkpoint.case.max_model_len,
        **settings,  # type: ignore[arg-type]
    )


def plain(checkpoint: Checkpoint) -> OutputProcessor:
    """Free blocks are set to NaN between the steps."""
    with served_model(checkpoint, max_steps_in_flight=1, enable_prefix_caching=False) as served:
        for prompt in checkpoint.prompts:
            served.add(prompt)
        served.poison_free_blocks()
        while served.step():
            served.poison_free_blocks()
        return served.tokens, checkpoint.answers


def chunked(checkpoint: Checkpoint) -> OutputProcessor:
    with served_model(checkpoint, max_num_batched_tokens=13) as served:
        return served.answers(checkpoint.prompts), checkpoint.answers


def prefix_hit(checkpoint: Checkpoint) -> OutputProcessor:
    """The third prompt begins like the first, which is sent again with it."""
    with served_model(checkpoint) as served:
        answers = served.answers([checkpoint.prompts[index] for index in (0, 1, 3)])
        answers += served.answers([checkpoint.prompts[index] for index in (2, 0)])
        found = [served.ended[request].num_cached_tokens for request in (3, 4)]
        lengths = NUM_COMMON, len(checkpoint.prompts[0]) - 1
        assert found == [length // served.border * served.border for length in lengths]
        assert all(found), "the blocks are larger than what the prompts have in common"
    return answers, [checkpoint.answers[index] for index in (0, 1, 3, 2, 0)]


def preempted(checkpoint: Checkpoint) -> OutputProcessor:
    """More requests than fit the smallest pool that holds the longest one."""
    with served_model(
        checkpoint, num_blocks=None, max_num_batched_tokens=16, enable_prefix_caching=False
    ) as served:
        answers = served.answers(checkpoint.prompts * 2)
        (*others, last) = served.worker.kv_cache.groups
        has_states_only = not others and isinstance(last.spec, StateSpec)  # which do not grow
        was_preempted = any(ended.num_preemptions for ended in served.ended.values())
        assert was_preempted is not has_states_only
    return answers, checkpoint.answers * 2


PATHS = {"plain": plain, "prefix hit": prefix_hit, "chunked": chunked, "preempted": preempted}
OF_EVERY_SHAPE = ("plain", "prefix hit")


def on_every_path() -> Iterator[Any]:
    """Other shapes of a family take half of the paths, and with --long all."""
    for case in CASES:
        for path in PATHS:
            mark = pytest.mark.slow if path in OF_EVERY_SHAPE else pytest.mark.long
            param = unless_first(case, mark)
            yield pytest.param(case, path, id=f"{case.name}-{path}", marks=param.marks)


@pytest.mark.parametrize(("case", "path"), list(on_every_path()))
def test_tokens_equal_those_of_transformers(
    case: Case, path: str, checkpoint_of: CheckpointOf
) -> None:
    assert_greedy_equal(*PATHS[path](checkpoint_of(case)))


@every_case
def test_prompt_log_probabilities_equal_those_of_transformers(
    case: Case, checkpoint_of: CheckpointOf
) -> None:
    checkpoint = checkpoint_of(case)
    model = PagedModel(checkpoint.path, max_model_len=case.max_model_len)
    exact = copy.deepcopy(checkpoint.reference).double()  # without transformers' rounding
    for prompt in checkpoint.prompts:
        got = forward_logits([model], prompt).log_softmax(-1)
        wanted = reference_logits(exact, prompt).log_softmax(-1)
        assert wanted.std() > 0.1, "a flat reference would prove nothing"
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


MIXTURES = (
    "GPT-OSS",
    "DeepSeek-V2, groups, biased",
    "Mixtral",
    "Qwen3-MoE",
    "Llama 4",
    "DeepSeek-V3",
    "Granite 4 hybrid, mixture",
    "Qwen3-Next",
    "LFM2-MoE",
)


@pytest.mark.parametrize(
    "name", [*MIXTURES[:2], *(pytest.param(name, marks=pytest.mark.long) for name in MIXTURES[2:])]
)
def test_mixtures_in_triton_compute_what_transformers_do(
    name: str, checkpoint_of: CheckpointOf
) -> None:
    case = next(case for case in CASES if case.name == name)
    checkpoint = checkpoint_of(case)
    prompt = checkpoint.prompts[0]
    exact = copy.deepcopy(checkpoint.reference).double()
    with using(TRITON), patch.object(experts, "compute", wraps=experts.compute) as computed:
        model = PagedModel(checkpoint.path, max_model_len=case.max_model_len)
        got = forward_logits([model], prompt).log_softmax(-1)
    assert computed.called
    wanted = reference_logits(exact, prompt).log_softmax(-1)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_family
def test_rounded_logits_stay_as_near_the_exact_ones_as_transformers_own(
    case: Case, dtype: torch.dtype, checkpoint_of: CheckpointOf
) -> None:
    checkpoint = checkpoint_of(case)
    model = PagedModel(checkpoint.path, max_model_len=case.max_model_len, dtype=dtype)
    rounded = copy.deepcopy(checkpoint.reference).to(dtype)
    ours, theirs = [], []
    for prompt in checkpoint.prompts:
        exact = reference_logits(checkpoint.reference, prompt)
        ours.append((forward_logits([model], prompt) - exact).abs().mean())
        theirs.append((reference_logits(rounded, prompt) - exact).abs().mean())
    # Rounding differs with the order of operations; ours may not differ more from float32 than that
    # of transformers.
    if hasattr(checkpoint.reference.config, "num_experts_per_tok"):
        # If two experts are nearly equal, rounding may select the other one, in either model, and
        # all later values differ. So the prompt for which this does not happen must be as near.
        assert min(our / their for our, their in zip(ours, theirs, strict=True)) < 1.5
    else:
        assert sum(ours) < 1.5 * sum(theirs)


def reference_logits(reference: object, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([prompt])).logits[0].float()  # type: ignore[operator]


@every_family
def test_the_reference_answers_what_generate_does(case: Case, checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of(case)
    prompt = torch.tensor(checkpoint.prompts[:1])
    with torch.inference_mode():
        ids = checkpoint.reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert ids[0, prompt.shape[1] :].tolist() == checkpoint.answers[0].token_ids
