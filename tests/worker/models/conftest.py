"""Checkpoints of all families and the outputs of transformers; each is made once."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.models import make_tiny_model
from tests.reference import ReferenceAnswer, greedy_reference
from tests.worker.models.cases import CASES, FIRST_CASES, Case

NUM_TOKENS = 12
NUM_COMMON = 32


def unless_first(case: Case, mark: pytest.MarkDecorator) -> Any:
    """The case as a parameter: the first one of each family is always tested."""
    is_first = case is FIRST_CASES.get(case.family)
    return pytest.param(case, id=case.name, marks=() if is_first else mark)


every_case = pytest.mark.parametrize(
    "case", [unless_first(case, pytest.mark.slow) for case in CASES]
)
every_family = pytest.mark.parametrize(
    "case", [unless_first(case, pytest.mark.long) for case in CASES]
)
"""In one shape, and with --long in every one."""


@dataclass(frozen=True)
class Checkpoint:
    """answers: greedy, NUM_TOKENS per prompt."""

    case: Case
    path: Path
    reference: Any
    prompts: list[list[int]]
    answers: list[ReferenceAnswer]


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Checkpoint]:
    made: dict[str, Checkpoint] = {}

    def make(case: Case) -> Checkpoint:
        if case.name not in made:
            path = tmp_path_factory.mktemp("model")
            # Smaller weights than elsewhere: float32 noise stays well below the tolerances.
            settings = {"initializer_range": 0.2, **case.settings}
            reference = make_tiny_model(case.family, path, **settings)
            # The third prompt begins like the first.
            prompts = [prompt_of(length, seed) for seed, length in enumerate(case.prompt_lengths)]
            prompts[2][:NUM_COMMON] = prompts[0][:NUM_COMMON]
            answers = [greedy_reference(reference, prompt, NUM_TOKENS) for prompt in prompts]
            made[case.name] = Checkpoint(case, path, reference, prompts, answers)
        return made[case.name]

    return make


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 128), k=length)
