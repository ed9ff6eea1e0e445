"""The experts of each token, on every path within one engine, against transformers."""

import random
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

from longshore import LLM, RequestOutput, SamplingParams
from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.deploy.settings.options import EngineOptions
from longshore.protocol.errors import ConfigError
from tests.models import make_tiny_llama, make_tiny_model
from tests.reference import assert_experts_are_those_of
from tests.worker.models.cases import CASES

CASE_NAMES: Final = (
    "Mixtral",
    "Qwen3-MoE, dense and sparse",
    "GPT-OSS",
    "DeepSeek-V2",
    "DeepSeek-V3",
    "Llama 4, dense and sparse",
    "Granite 4 hybrid, mixture",
)
OF_NAME: Final = {case.name: case for case in CASES}
GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}


class Served(NamedTuple):
    """reference: the same model in transformers."""

    llm: LLM
    reference: Any

    def check(self, output: RequestOutput) -> None:
        for answer in output.outputs:
            token_ids = output.prompt_token_ids + answer.token_ids
            assert_experts_are_those_of(self.reference, answer.routed_experts, token_ids)

    def answer(self, *prompts: list[int], **settings: Any) -> list[RequestOutput]:
        params = SamplingParams(**(GREEDY | settings))
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)


def serve(path: Path, **settings: Any) -> LLM:
    return LLM(
        path,
        in_process=True,
        enable_return_routed_experts=True,
        dtype="float32",
        max_model_len=96,
        state_dir=path / "state",
        **settings,
    )


@pytest.fixture(scope="module", params=CASE_NAMES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Chunks of at most 29 tokens, and blocks for about two long requests."""
    case = OF_NAME[request.param]
    path = tmp_path_factory.mktemp("mixture")
    reference = make_tiny_model(case.family, path, **case.settings)
    with serve(path, max_num_batched_tokens=29, max_num_seqs=6, num_blocks=64) as llm:
        yield Served(llm, reference)


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(3, 128) for _ in range(length)] for length in lengths]


@pytest.mark.req("FEA-08")
def test_every_token_has_the_experts_that_the_reference_chooses(served: Served) -> None:
    for output in served.answer(*prompts_of(5, 70, 1, 33), max_tokens=9):
        served.check(output)


@pytest.mark.req("FEA-08")
def test_a_cached_prefix_has_the_experts_of_when_it_was_computed(served: Served) -> None:
    (prompt,) = prompts_of(53, seed=1)
    (first,) = served.answer(prompt, max_tokens=12)
    (second,) = served.answer(prompt + first.outputs[0].token_ids + [7], max_tokens=4)
    served.check(second)
    if "Granite" not in type(served.reference).__name__:  # states are cached in larger blocks
        assert second.num_cached_tokens >= 48


@pytest.mark.req("FEA-08")
def test_answers_that_share_the_blocks_of_their_prompt_have_its_experts(served: Served) -> None:
    """The last block of the prompt is copied for each."""
    (output,) = served.answer(*prompts_of(27, seed=2), n=4, temperature=1.0, seed=3, max_tokens=9)
    assert len({tuple(answer.token_ids) for answer in output.outputs}) > 1
    served.check(output)


@pytest.mark.req("FEA-08")
def test_the_first_prompt_tokens_can_be_left_out(served: Served) -> None:
    (prompt,) = prompts_of(40, seed=4)
    for start in (0, 1, 17, 40, 1000):
        (output,) = served.answer(prompt, max_tokens=5, routed_experts_prompt_start=start)
        whole, rest = 44, output.outputs[0].routed_experts
        assert rest is not None
        assert len(rest) == whole - min(start, 40)
        (again,) = served.answer(prompt, max_tokens=5)
        assert again.outputs[0].routed_experts is not None
        np.testing.assert_array_equal(again.outputs[0].routed_experts[min(start, 40) :], rest)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("mixtral")
    return path, make_tiny_model("Mixtral", path)


@pytest.mark.req("FEA-08")
@pytest.mark.parametrize("is_cached", [True, False])
def test_preempted_requests_have_the_experts_of_all_their_tokens(
    mixtral: tuple[Path, Any], is_cached: bool
) -> None:
    path, reference = mixtral
    settings = {"num_blocks": 15, "max_num_seqs": 6, "watermark": 0.0, "preempt_threshold": 1.0}
    with serve(path, enable_prefix_caching=is_cached, **settings) as llm:
        served = Served(llm, reference)
        outputs = served.answer(*prompts_of(9, 20, 13, 6, 30, 15, seed=5), max_tokens=50)
        assert sum(output.outputs[0].num_preemptions for output in outputs) >= 3
        for output in outputs:
            served.check(output)


@pytest.mark.req("FEA-08")
@pytest.mark.parametrize("settings", [{"cpu_kernels": "torch"}, {"enforce_eager": True}])
def test_plain_torch_and_single_kernels_choose_the_same_experts(
    mixtral: tuple[Path, Any], settings: dict[str, Any]
) -> None:
    path, reference = mixtral
    with serve(path, num_blocks=40, **settings) as llm:
        served = Served(llm, reference)
        for output in served.answer(*prompts_of(11, 40, seed=6), max_tokens=20):
            served.check(output)


@pytest.mark.req("FEA-08")
def test_without_the_setting_there_is_neither_a_buffer_nor_an_array(
    mixtral: tuple[Path, Any],
) -> None:
    path, _ = mixtral
    with LLM(path, in_process=True, num_blocks=40, state_dir=path / "state") as llm:
        (output,) = llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(**GREEDY))
        assert output.outputs[0].routed_experts is None
        params = SamplingParams(**GREEDY, routed_experts_prompt_start=1)
        with pytest.raises(ValueError, match="start it with --enable-return-routed-experts"):
            llm.generate([{"prompt_token_ids": [5, 6]}], params)
        engine = llm._engine
        assert isinstance(engine, InProcessEngine)
        state = engine._runner._launcher.state
        assert state.experts is None
        assert all(router.chosen is None for router in state.model.routers)


@pytest.mark.req("FEA-08")
def test_models_that_cannot_return_experts_are_rejected(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "dense")
    with pytest.raises(ConfigError, match="this model has no mixture of experts"):
        serve(tmp_path / "dense")
    make_tiny_model("Mixtral", tmp_path / "windows", sliding_window=24)
    with pytest.raises(ConfigError, match="needs a layer that attends to all tokens"):
        serve(tmp_path / "windows")


@pytest.mark.req("FEA-08")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pipeline_parallel_size", 2),
        ("decode_context_parallel_size", 2),
        ("kv_connector", "offloading"),
    ],
)
def test_settings_under_which_experts_are_unknown_are_rejected(name: str, value: object) -> None:
    settings: dict[str, Any] = {name: value, "tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match=rf"not supported with {name}={value}"):
        EngineOptions(enable_return_routed_experts=True, **settings)
