"""Drafters with weights in engines of real processes. Tokens are those without drafts; and a draft
model that computes what the model computes is always right, after whatever happened to its KV."""

import dataclasses
import json
import re
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore import LLM, SamplingParams
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.errors import ConfigError
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, wait_until
from tests.integration.test_speculation import (
    FEW_BLOCKS,
    OFFLOADING,
    PROMPTS,
    check_acceptance,
    check_experts,
    completions,
    constrained_answers,
    counts_of,
    generate,
    make_llm,
    tokens_of,
)
from tests.models import make_tiny_eagle, make_tiny_llama, make_tiny_model, make_tiny_mtp_model
from tests.worker.models.cases import FIRST_CASES, LATENT

FEW_BLOCKS = {**FEW_BLOCKS, "num_blocks": 70}  # for two groups
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 1}
MTP = {**LATENT, "n_group": 4, "topk_group": 2}
SWAPPED = {
    **OFFLOADING,
    **FEW_BLOCKS,
    "preemption_mode": "swap",
    "preempt_threshold": 0.95,
    "admit_threshold": 0.9,
}
ENGINES = [
    pytest.param({"in_process": True}, id="in process"),
    pytest.param({"in_process": True, "max_num_batched_tokens": 24}, id="small steps"),
    pytest.param({"in_process": True, **FEW_BLOCKS}, id="preempted"),
    pytest.param({"in_process": True, **OFFLOADING, **FEW_BLOCKS}, id="offloaded"),
    pytest.param(SWAPPED, id="swapped", marks=pytest.mark.slow),
    pytest.param({"in_process": True, "cpu_kernels": "torch"}, id="torch"),
    pytest.param({"tensor_parallel_size": 2}, id="2 shards"),
]


@dataclasses.dataclass(frozen=True)
class Drafted:
    """A model, and the settings of a drafter for it."""

    path: Path
    config: dict[str, Any]
    answers: list[list[list[int]]]

    @property
    def settings(self) -> dict[str, Any]:
        return {"speculative_config": self.config}


def copy_with_more_heads(source: Path, target: Path, noise: float) -> None:
    """A copy with every KV head twice, which computes the same from keys and values of another
    shape. noise: relative to the weights, of which it makes a model that is often wrong."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        changed = tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
        if "k_proj" in name or "v_proj" in name:
            changed = changed.repeat(2, 1)
        tensors[name] = changed
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    make_tiny_llama(path, num_hidden_layers=3, **SHAPE)
    return path


@pytest.fixture(scope="module")
def right(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """A draft model that is always right."""
    copy = tmp_path_factory.mktemp("draft") / "copy"
    copy_with_more_heads(llama, copy, 0.0)
    config = {"method": "draft_model", "model": str(copy), "num_speculative_tokens": 4}
    return Drafted(llama, config, [])


@pytest.fixture(scope="module", params=["draft model", "mtp", "eagle3"])
def drafted(
    request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Drafted:
    path = tmp_path_factory.mktemp("model")
    if request.param == "mtp":
        make_tiny_mtp_model(path, is_skilled=True, **MTP)
        config = {"method": "mtp", "num_speculative_tokens": 3}
    elif request.param == "eagle3":  # with random weights: always wrong
        model = make_tiny_llama(path, num_hidden_layers=3)
        make_tiny_eagle(path / "eagle", model, read_layers=(0, 1, 2))
        folder = str(path / "eagle")
        config = {"method": "eagle3", "model": folder, "num_speculative_tokens": 3}
    else:
        path, draft = llama, path / "draft"
        copy_with_more_heads(llama, draft, 0.05)
        config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    with make_llm(path, in_process=True) as llm:
        return Drafted(path, config, tokens_of(generate(llm)))


@pytest.mark.req("SPD-03")
@pytest.mark.parametrize("settings", ENGINES)
def test_tokens_are_those_without_drafts(settings: dict[str, Any], drafted: Drafted) -> None:
    answers = drafted.answers
    if "cpu_kernels" in settings:  # sums have another order there
        with make_llm(drafted.path, **settings) as llm:
            answers = tokens_of(generate(llm))
    with make_llm(drafted.path, **settings, **drafted.settings, poison_kv=True) as llm:
        for _ in range(2):  # the second time after prefix hits
            assert tokens_of(generate(llm)) == answers
        wait_until(lambda: counts_of(llm)["longshore_scheduler_draft_tokens"] > 50)
        if drafted.config["method"] != "eagle3":
            check_acceptance(llm, 2, preempts=settings.get("num_blocks") is not None)


@pytest.mark.req("SPD-01")
@pytest.mark.parametrize("settings", ENGINES)
def test_right_drafts_stay_right(settings: dict[str, Any], right: Drafted) -> None:
    """Its KV comes back from the prefix cache, a tier and a swap with the model's."""
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]

    def generated(llm: LLM) -> list[list[list[int]]]:
        return tokens_of(llm.generate(prompts, [GREEDY] * len(prompts), use_tqdm=False))

    with make_llm(right.path, **settings) as llm:
        answers = generated(llm)
    with make_llm(right.path, **settings, **right.settings, poison_kv=True) as llm:
        for _ in range(3):
            assert generated(llm) == answers
        wait_until(lambda: counts_of(llm)["longshore_scheduler_draft_tokens"] > 50)
        if "kv_connector" in settings:
            wait_until(lambda: counts_of(llm)["longshore_scheduler_external_hit_tokens"] > 0)
        value = counts_of(llm)
    assert value["longshore_scheduler_prefix_hit_tokens"] > 0
    drafts = value["longshore_scheduler_draft_tokens"]
    # A tie of two tokens is rare.
    assert value["longshore_scheduler_accepted_draft_tokens"] > 0.98 * drafts


def test_the_experts_of_tokens_are_those_without_drafts(tmp_path: Path) -> None:
    """Tokens that are computed once more, for their hidden states, change nothing."""
    make_tiny_mtp_model(tmp_path / "model", **MTP)
    # Small steps, which these tokens fill.
    settings = {
        **{"in_process": True, "enable_return_routed_experts": True},
        "max_num_batched_tokens": 24,
    }
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    with make_llm(tmp_path / "model", **settings) as llm:
        expected = generate(llm)
    with make_llm(tmp_path / "model", **settings, speculative_config=drafts) as llm:
        for _ in range(2):
            check_experts(generate(llm), expected)


def test_structured_output() -> None:
    """The draft model knows nothing of the grammar."""
    drafts = {"method": "draft_model", "model": str(DEMO_MODEL_DIR), "num_speculative_tokens": 3}
    expected = tokens_of(constrained_answers(50))
    assert tokens_of(constrained_answers(50, speculative_config=drafts)) == expected


@pytest.mark.services
@pytest.mark.slow
def test_a_decode_engine_pulls_the_kv_of_the_draft_model(start_deployment: StartDeployment) -> None:
    """The draft model is the model itself. Two of the answers are greedy, so of their drafts most
    are right."""
    prompts = ["round and round and round " * 9, "the same again, the same again", "x y x y x y"]
    plain = start_deployment("--dtype", "float32", model_dir=DEMO_MODEL_DIR).wait_until_ready()
    expected = completions(plain, prompts)
    assert plain.stop() == 0
    config = {"method": "draft_model", "model": str(DEMO_MODEL_DIR), "num_speculative_tokens": 3}
    pair = start_deployment(
        *("--prefill", "1", "--decode", "1", "--dtype", "float32"),
        *("--speculative-config", json.dumps(config)),
        model_dir=DEMO_MODEL_DIR,
        environment={"UCX_TLS": "tcp"},
    ).wait_until_ready()
    assert completions(pair, prompts) == expected

    def count(name: str) -> float:
        with urllib.request.urlopen(f"{pair.url}/metrics", timeout=PATIENCE_S) as response:
            pattern = rf'longshore_scheduler_{name}_total\{{.*engine="1".*\}} ([0-9.]+)'
            found = re.search(pattern, response.read().decode())
        return 0.0 if found is None else float(found[1])

    wait_until(lambda: count("draft_tokens") > 60)
    assert count("accepted_draft_tokens") > 0.3 * count("draft_tokens")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "not supported with pipeline_parallel_size"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "not supported with decode_context_parallel_size",
        ),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, "has not"),
        ({"speculative_config": {"method": "draft_model"}}, "num_speculative_tokens"),
        (
            {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 1}},
            "have a model",
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 1, "model": "x"}},
            "have a model",
        ),
        (
            {
                "speculative_config": {
                    "method": "draft_model",
                    "num_speculative_tokens": 1,
                    "model": "no such folder",
                }
            },
            "neither a folder",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    settings: dict[str, Any], reason: str, right: Drafted
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_llm(right.path, **{**right.settings, **settings})


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("Lfm2", FIRST_CASES["Lfm2"].settings, "layers with states"),
        ("Bert", {"head": "Model"}, "does not generate text"),
        ("Llama", {"max_position_embeddings": 100}, "Lower max_model_len"),
    ],
)
def test_a_model_that_cannot_draft_is_refused(
    family: str, settings: dict[str, Any], reason: str, right: Drafted, tmp_path: Path
) -> None:
    make_tiny_model(family, tmp_path / "draft", **settings)
    config = right.config | {"model": str(tmp_path / "draft")}
    with pytest.raises(ConfigError, match=reason):
        make_llm(right.path, speculative_config=config)


def test_another_draft_model_is_another_engine(right: Drafted, tmp_path: Path) -> None:
    """Its KV lies in the same blocks, so a tier must not mix them."""
    from longshore.worker.config import WorkerConfig

    other = tmp_path / "other"
    shutil.copytree(Path(right.config["model"]), other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: 2 * each for name, each in tensors.items()}, other / "model.safetensors")
    found = {
        WorkerConfig(model=str(right.path), speculative_config=config).fingerprint(right.path)
        for config in (
            None,
            json.dumps(right.config),
            json.dumps(right.config | {"model": str(other)}),
            '{"method": "mtp", "num_speculative_tokens": 1}',
        )
    }
    assert len(found) == 4
