"""Tokens of whole models on the device: equal to those of transformers, on every path."""

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.results import Run
from longshore import LLM, SamplingParams
from tests.models import make_tiny_model
from tests.reference import ReferenceAnswer, assert_greedy_equal, greedy_reference
from tests.worker.models.cases import CASES, Case

NUM_TOKENS: Final = 24
NUM_FAMILY_TOKENS: Final = 12
DEFAULTS: Final[dict[str, Any]] = {
    "num_blocks": 2000,
    "in_process": True,
    "dtype": "float32",
    "max_num_seqs": 64,
}
PATHS: Final[dict[str, dict[str, Any]]] = {
    "whole prompts": {},
    "chunks of 37, block size 1": {
        "max_num_batched_tokens": 37,
        "block_size": 1,
        "num_blocks": 30_000,
    },
    "synchronous, block size 64": {"async_scheduling": False, "block_size": 64},
    "without graphs": {"enforce_eager": True},
    "without graphs, synchronous": {"enforce_eager": True, "async_scheduling": False},
    "preempted": {"num_blocks": 61},
    "processes, verified plans": {"in_process": False, "verify_plan": True},
}


def check_paths(run: Run) -> None:
    """Greedy tokens of one model on each path, twice: then with the prefix cache filled."""
    case = CASES[0]
    model, folder = _checkpoint(run, case)
    prompts = ragged_prompts(16 if run.is_dry else 64)
    references = [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    for path, settings in PATHS.items():
        limited = {"max_model_len": case.max_model_len, **settings}
        run.check(
            f"{case.name}, {path}",
            partial(_check_greedy, run, folder, prompts, limited, references),
        )


def check_first_families(run: Run) -> None:
    _check_families(run, CASES[1 : len(CASES) // 2])


def check_other_families(run: Run) -> None:
    _check_families(run, CASES[len(CASES) // 2 :])


def _check_families(run: Run, cases: Sequence[Case]) -> None:
    """Greedy tokens in float32; and in half precision, how near the log probabilities of given
    tokens are."""
    for case in cases:
        run.check(f"{case.name}, float32", partial(_check_family, run, case))
    for case in cases[::8] if run.is_dry else cases:
        run.check(f"{case.name}, half precision", partial(_check_half_precision, run, case))


def _check_family(run: Run, case: Case) -> None:
    model, folder = _checkpoint(run, case)
    prompts = _prompts_of(case)
    references = [greedy_reference(model, prompt, NUM_FAMILY_TOKENS) for prompt in prompts]
    settings = {"max_model_len": case.max_model_len, "max_num_seqs": len(prompts)}
    _check_greedy(run, folder, prompts, settings, references)


def _check_half_precision(run: Run, case: Case) -> None:
    """Log probabilities of given tokens may differ from those in float32, but not much more than
    those of transformers. If two experts have nearly equal scores, rounding chooses, and all that
    follows differs; so of a mixture one prompt must be as near."""
    model, folder = _checkpoint(run, case)
    prompts = [prompt for prompt in _prompts_of(case) if len(prompt) > 1]
    exact = [_log_probabilities(model, prompt) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = copy.deepcopy(model).to(dtype)
        settings = DEFAULTS | {"dtype": str(dtype).removeprefix("torch."), "enforce_eager": True}
        with LLM(folder, device=run.device, **settings, max_model_len=case.max_model_len) as llm:
            outputs = llm.generate(_inputs(prompts), params, use_tqdm=False)
        ours, theirs = [], []
        for prompt, output, wanted in zip(prompts, outputs, exact, strict=True):
            found = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
            got = torch.tensor([chosen[token].logprob for token, chosen in found])
            ours.append(float((got - wanted).abs().mean()))
            theirs.append(float((_log_probabilities(rounded, prompt) - wanted).abs().mean()))
        ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
        is_mixture = hasattr(model.config, "num_experts_per_tok")
        ratio = min(ratios) if is_mixture else sum(ours) / sum(theirs)
        assert ratio < 1.5, f"in {dtype} the error is {ratio:.2f} times that of transformers"


def _log_probabilities(model: Any, prompt: list[int]) -> torch.Tensor:
    """Of each token after the first, given those before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def _check_greedy(
    run: Run,
    folder: Path,
    prompts: list[list[int]],
    settings: dict[str, Any],
    references: Sequence[ReferenceAnswer],
) -> None:
    num_tokens = len(references[0].token_ids)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(folder, device=run.device, **(DEFAULTS | settings)) as llm:
        for _ in range(2):
            outputs = llm.generate(_inputs(prompts), params, use_tqdm=False)
            assert_greedy_equal([output.outputs[0].token_ids for output in outputs], references)


def check_sampling(run: Run) -> None:
    """Sampled tokens with a seed do not depend on the batch and equal those on the CPU."""
    _, folder = _checkpoint(run, CASES[0])
    prompts = ragged_prompts(12)
    params = [
        SamplingParams(temperature=0.8, top_k=20 * (i % 2), top_p=0.9, seed=i, max_tokens=12)
        for i in range(len(prompts))
    ]

    def draw(device: str, chosen: range) -> list[list[int]]:
        with LLM(folder, device=device, **DEFAULTS) as llm:
            outputs = llm.generate(
                _inputs([prompts[i] for i in chosen]), [params[i] for i in chosen], use_tqdm=False
            )
            return [output.outputs[0].token_ids for output in outputs]

    def check() -> None:
        together = draw(run.device, range(len(prompts)))
        assert draw(run.device, range(1)) == together[:1]
        on_cpu = draw("cpu", range(len(prompts)))
        num_different = sum(a != b for a, b in zip(together, on_cpu, strict=True))
        assert num_different <= 1, f"{num_different} of {len(prompts)} differ from those on the CPU"

    run.check("seeded sampling: in a batch, alone, and on the CPU", check)


def check_no_step_waits(run: Run) -> None:
    """Steps with every sampling setting, while torch raises an error for every synchronization."""
    _, folder = _checkpoint(run, CASES[0])
    all_settings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"min_p": 0.05},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logit_bias": {5: 3.0, 9: -100.0}, "bad_words_token_ids": ((5, 6), (7,))},
        {"min_tokens": 8, "logprobs": 5},
        {"temperature": 0, "prompt_logprobs": 3},
    ]
    params = [SamplingParams(seed=1, max_tokens=12, **settings) for settings in all_settings]
    prompts = _inputs(ragged_prompts(len(params)))

    def check(settings: dict[str, Any]) -> None:
        with LLM(folder, device=run.device, **(DEFAULTS | settings)) as llm:
            first = llm.generate(prompts, params, use_tqdm=False)  # setup may synchronize
            with waiting_is_an_error(run.device):
                again = llm.generate(prompts, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in again] == [
                output.outputs[0].token_ids for output in first
            ]

    run.check("no step waits for the device", partial(check, {}))
    run.check(
        "no step waits for the device, without graphs", partial(check, {"enforce_eager": True})
    )


@contextmanager
def waiting_is_an_error(device: str) -> Iterator[None]:
    """Make torch raise an error when it synchronizes with a CUDA device."""
    if device != "cpu":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device != "cpu":
            torch.cuda.set_sync_debug_mode("default")


def check_demo_model(run: Run) -> None:
    """The demo model answers in real processes, twice per prompt. A wrong block gives a wrong
    answer."""
    from longshore.deploy.gateway.text.tokenizer import load_tokenizer
    from longshore.deploy.model.demo import DEMO_MODEL_DIR, make_prompt

    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    assert tokenizer is not None
    questions = [make_prompt(24 + 4 * seed, seed) for seed in range(8 if run.is_dry else 24)]
    prompts = _inputs(
        [
            tokenizer.encode_rendered(tokenizer.chat_template.render(question.messages))
            for question in questions
        ]
    )
    params = SamplingParams(temperature=0, max_tokens=24)

    def check() -> None:
        with LLM(DEMO_MODEL_DIR, device=run.device) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                num_right = sum(
                    output.outputs[0].text.strip() == question.answer
                    for output, question in zip(outputs, questions, strict=True)
                )
                assert num_right >= 0.95 * len(questions), (
                    f"{num_right} of {len(questions)} are correct"
                )

    run.check("demo model answers", check)


def _checkpoint(run: Run, case: Case) -> tuple[Any, Path]:
    """A case's model, made by transformers, and the folder of its checkpoint."""
    folder = run.folder / "".join(letter if letter.isalnum() else "_" for letter in case.name)
    settings = {"initializer_range": 0.2, **case.settings}
    return make_tiny_model(case.family, folder, **settings), folder


def _inputs(prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def _prompts_of(case: Case) -> list[list[int]]:
    """Of its own lengths, which select its rope factors."""
    rng = random.Random(0)
    return [[rng.randrange(3, 128) for _ in range(length)] for length in case.prompt_lengths]


def ragged_prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    common = [rng.randrange(128) for _ in range(120)]
    return [
        [*common[: rng.choice((0, 0, 48, 77))], *(rng.randrange(128) for _ in range(length))]
        for length in (rng.randrange(1, 100) for _ in range(count))
    ]
