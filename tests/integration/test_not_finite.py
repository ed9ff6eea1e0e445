"""A model that computes NaN for one token: requests with this token end with an error, those beside
them and after them are answered as if it had not happened, and no bad block is found again."""

import math
import shutil
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from safetensors.torch import load_file, save_file

from longshore import LLM, SamplingParams
from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.deploy.llm.outputs import RequestOutput
from tests.integration.conftest import StartDeployment

BAD: Final = 127
NUM_TOKENS: Final = 24
COMMON: Final = [20 + 7 * i % 90 for i in range(40)]  # two full blocks and a half
GOOD: Final = [[*COMMON, *range(30, 30 + i)] for i in (3, 25, 11)]
POISONED: Final = [*COMMON, *range(60, 85), BAD, *range(20, 45)]
GREEDY: Final = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS: Final[dict[str, Any]] = {
    "num_blocks": 600,
    "max_num_seqs": 8,
    "threads": 1,
    "dtype": "float32",
    "device": "cpu",
    "verify_plan": True,
}


@pytest.fixture(scope="module")
def poisoned(tiny_model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(tiny_model[0], path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD] = math.nan
    save_file(tensors, path / "model.safetensors")
    return path


def generate(llm: LLM, *prompts: list[int]) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)


@pytest.fixture(scope="module")
def calm(tiny_model: tuple[Path, Any]) -> list[list[int]]:
    """The tokens of GOOD and POISONED with the good weights."""
    with LLM(tiny_model[0], in_process=True, **SETTINGS) as llm:
        return [list(output.outputs[0].token_ids) for output in generate(llm, *GOOD, POISONED)]


@pytest.mark.parametrize("max_num_scheduled_tokens", [None, 16], ids=["whole", "chunked"])
def test_blocks_of_a_request_with_nan_are_not_found_again(
    tiny_model: tuple[Path, Any], calm: list[list[int]], max_num_scheduled_tokens: int | None
) -> None:
    settings = {**SETTINGS, "max_num_scheduled_tokens": max_num_scheduled_tokens}
    with LLM(tiny_model[0], in_process=True, **settings) as llm:
        engine = llm._engine
        assert isinstance(engine, InProcessEngine)
        embedding: Any = engine.worker.model.embedding
        row = embedding.weight[BAD].clone()
        embedding.weight[BAD] = math.nan
        # The first one computes the common prefix, so the others find blocks of a bad request.
        failed, *good, failed_too = generate(llm, POISONED, *GOOD, POISONED)
        for output in (failed, failed_too):
            assert output.outputs[0].finish_reason == "error"
            assert output.outputs[0].error is not None
            assert "logits that are not finite numbers" in output.outputs[0].error
            assert output.outputs[0].token_ids == []
        assert [list(output.outputs[0].token_ids) for output in good] == calm[:-1]
        embedding.weight[BAD] = row
        (again,) = generate(llm, POISONED)
        assert list(again.outputs[0].token_ids) == calm[-1]
        # At most the prefix that the good ones share with it.
        assert again.num_cached_tokens <= len(COMMON)


def test_clients_get_an_error_and_streams_beside_it_go_on(
    start_deployment: StartDeployment, poisoned: Path, calm: list[list[int]]
) -> None:
    deployment = start_deployment(
        "--dtype", "float32", "--verify-plan", model_dir=poisoned
    ).wait_until_ready()
    extra: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:

        def complete(prompt: Any, **settings: Any) -> Any:
            return client.completions.create(
                model="model",
                prompt=prompt,
                temperature=0,
                max_tokens=NUM_TOKENS,
                extra_body=extra,
                **settings,
            )

        beside = complete(GOOD[0], stream=True)
        pieces = [next(beside)]
        with pytest.raises(openai.InternalServerError, match="not finite numbers") as caught:
            complete(POISONED)
        assert caught.value.status_code == 500
        with pytest.raises(openai.APIError, match="not finite numbers"):
            list(complete(POISONED, stream=True))
        pieces += beside
        tokens = [token for piece in pieces for token in piece.choices[0].token_ids or ()]
        assert tokens == calm[0]
        answers = [complete(prompt).choices[0].token_ids for prompt in GOOD]
        assert answers == calm[:-1]
    assert deployment.output.count("logits are not finite") == 2
    assert deployment.stop() == 0, deployment.output
