"""A model in a GGUF file answers as transformers does with the model that was converted."""

from pathlib import Path

import pytest

from longshore.deploy.model.folder import read_model_folder
from tests.gguf.cases import CASES, GgufCase
from tests.reference import assert_greedy_equal, greedy_reference
from tests.worker.models.conftest import prompt_of
from tests.worker.models.served_model import ServedModel

NUM_TOKENS = 8


@pytest.mark.parametrize("case", [case for case in CASES if case.head != "Model"], ids=str)
def test_tokens_equal_those_of_the_original_in_transformers(case: GgufCase, tmp_path: Path) -> None:
    original = case.make_original(tmp_path / "original")
    folder = read_model_folder(case.file, tmp_path / "state").path
    prompts = [prompt_of(length, length) for length in (66, 90)]
    answers = [greedy_reference(original, prompt, NUM_TOKENS) for prompt in prompts]
    with ServedModel(folder, num_tokens=NUM_TOKENS, max_model_len=256) as served:
        assert_greedy_equal(served.answers(prompts), answers)
