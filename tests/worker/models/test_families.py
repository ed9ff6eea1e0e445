"""Family by family and path by path, the tokens of transformers; and its log probabilities."""

import copy
from collections.abc import Callable

import pytest
import torch

from longshore.worker.config import WorkerConfig
from longshore.worker.model_runner import ModelRunner
from longshore.worker.worker import Worker
from tests.reference import assert_greedy_equal
from tests.worker.models.cases import CASES, Case
from tests.worker.models.conftest import NUM_TOKENS, Checkpoint
from tests.worker.models.paged_model import PagedModel, forward_logits
from tests.worker.plans import Entry, Planner

CheckpointOf = Callable[[Case], Checkpoint]
NUM_BLOCKS = 64


class Serving:
    """A runner and the plans that drive it; tokens by row."""

    def __init__(self, runner: ModelRunner, max_model_len: int) -> None:
        self._runner = runner
        self.plans = Planner(num_blocks=NUM_BLOCKS, block_size=16, max_model_len=max_model_len)
        self.tokens: dict[int, list[int]] = {}

    def step(self, scheduled: dict[int, int] | None = None, **changes: object) -> None:
        output = self._runner.execute(self.plans.plan(scheduled, **changes))
        for row, token in self.plans.tokens_of(output).items():
            self.tokens.setdefault(row, []).append(token)

    def answer(self, num_rows: int) -> list[list[int]]:
        """Decode until every row has its tokens."""
        while any(len(self.tokens.get(row, ())) < NUM_TOKENS for row in range(num_rows)):
            self.step()
        return [self.tokens[row][:NUM_TOKENS] for row in range(num_rows)]


def plain(serving: Serving, prompts: list[list[int]]) -> None:
    serving.step(
        {row: len(prompt) for row, prompt in enumerate(prompts)},
        added=[Entry(row, prompt) for row, prompt in enumerate(prompts)],
    )


def chunked(serving: Serving, prompts: list[list[int]]) -> None:
    added = [Entry(row, prompt) for row, prompt in enumerate(prompts)]
    left = {row: len(prompt) for row, prompt in enumerate(prompts)}
    while left:
        scheduled = {row: min(13, count) for row, count in left.items()}
        serving.step(scheduled, added=added)
        added = []
        left = {row: n - scheduled[row] for row, n in left.items() if n > scheduled[row]}


def prefix_hit(serving: Serving, prompts: list[list[int]]) -> None:
    """The third prompt takes two blocks from the first."""
    first = [(row, prompt) for row, prompt in enumerate(prompts) if row != 2]
    serving.step(
        {row: len(prompt) for row, prompt in first}, added=[Entry(*entry) for entry in first]
    )
    shared = serving.plans.blocks[0][:2]
    hit = Entry(2, prompts[2], blocks=shared, num_computed_tokens=32)
    serving.step({2: len(prompts[2]) - 32}, added=[hit])


def preempted(serving: Serving, prompts: list[list[int]]) -> None:
    """The first request loses its row after five tokens and comes back with nothing computed."""
    plain(serving, prompts)
    for _ in range(4):
        serving.step()
    outputs = serving.tokens[0]
    serving.step(finished=[0])
    resumed = Entry(0, prompts[0], outputs=tuple(outputs))
    serving.step({0: len(prompts[0]) + len(outputs)}, added=[resumed])


PATHS = {"plain": plain, "chunked": chunked, "prefix hit": prefix_hit, "preempted": preempted}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_equal_those_of_transformers(
    case: Case, path: str, checkpoint_of: CheckpointOf
) -> None:
    checkpoint = checkpoint_of(case)
    config = WorkerConfig(
        model=str(checkpoint.path),
        num_blocks=NUM_BLOCKS,
        max_num_seqs=8,
        max_model_len=case.max_model_len,
        show_progress=False,
    )
    with Worker(config) as worker:
        serving = Serving(worker.start(), case.max_model_len)
        PATHS[path](serving, checkpoint.prompts)
        answers = serving.answer(len(checkpoint.prompts))
    assert_greedy_equal(answers, checkpoint.answers)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prompt_log_probabilities_equal_those_of_transformers(
    case: Case, checkpoint_of: CheckpointOf
) -> None:
    checkpoint = checkpoint_of(case)
    model = PagedModel(checkpoint.path, max_model_len=case.max_model_len)
    exact = copy.deepcopy(checkpoint.reference).double()  # its own rounding is not to count
    for prompt in checkpoint.prompts:
        got = forward_logits([model], prompt).log_softmax(-1)
        wanted = reference_logits(exact, prompt).log_softmax(-1)
        assert wanted.std() > 0.1, "a flat reference would prove nothing"
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
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
    # Rounding differs with the order of operations; ours may not stray further than transformers'.
    assert sum(ours) < 1.5 * sum(theirs)


def reference_logits(reference: object, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([prompt])).logits[0].float()  # type: ignore[operator]


@pytest.mark.parametrize("case", CASES, ids=str)
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
