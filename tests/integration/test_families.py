"""Every family on every path, from a folder that transformers wrote, through real processes."""

import random
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from longshore import LLM, SamplingParams
from longshore.deploy.cli.cache_plan import plan
from longshore.deploy.cli.client_options import CachePlanOptions
from longshore.protocol.kv_cache_spec import StateSpec
from longshore.worker.config import WorkerConfig
from longshore.worker.kv_cache.plan import block_bytes
from longshore.worker.kv_cache.report import kind_of
from longshore.worker.models.families import ARCHITECTURES
from longshore.worker.worker import Worker
from tests.deploy.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, save_tokenizer
from tests.deploy.tiny_whisper import make_tiny_whisper
from tests.integration.conftest import StartDeployment
from tests.models import SHAPE, make_tiny_model
from tests.reference import assert_greedy_equal, greedy_reference
from tests.worker.models.cases import CASES, FIRST_CASES, Case
from tests.worker.models.tiny_qwen3_5 import make_qwen3_5_with_images

NUM_TOKENS: Final = 12
STEP_TOKENS: Final = 29
BLOCK_SIZE: Final = 16
GEMMA3_WITH_IMAGES: Final = Case(
    "Gemma 3 with images", "Gemma3WithImages", FIRST_CASES["Gemma3"].settings
)
QWEN3_5_WITH_IMAGES: Final = tuple(
    Case(f"{FIRST_CASES[family].name} with images", family, FIRST_CASES[family].settings)
    for family in ("Qwen3_5", "Qwen3_5Moe")
)
WITH_IMAGES: Final = (GEMMA3_WITH_IMAGES, *QWEN3_5_WITH_IMAGES)
ALL_CASES: Final = (*CASES, *WITH_IMAGES)
ON_RANKS: Final = (
    *FIRST_CASES.values(),
    *(case for case in CASES if case.name in ("Llama, one KV head", "DeepSeek-V2, groups, biased")),
)
"""Shards of all shapes are tested without processes in `tests/worker/models`."""
VISION: Final = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def architecture_of(case: Case) -> str:
    if case is GEMMA3_WITH_IMAGES:
        return "Gemma3ForConditionalGeneration"
    if case in QWEN3_5_WITH_IMAGES:
        return f"{case.family}ForConditionalGeneration"
    return f"{case.family}ForCausalLM"


def marked_on_ranks(case: Case) -> Any:
    """Each needs another engine with two processes, which takes long. So one family of each kind
    of cache and layer is tested on several ranks, two of them always."""
    marks: tuple[pytest.MarkDecorator, ...] = ()
    if case.name not in ("Gemma 3", "Bamba"):
        of_a_kind = case.name in ("GPT-OSS", "DeepSeek-V3", "Qwen3-Next")
        marks = (pytest.mark.slow if of_a_kind else pytest.mark.long,)
    return pytest.param(case, id=case.name, marks=marks)


def make_model(case: Case, path: Path, **settings: Any) -> Any:
    """Write the folder and return the transformers model."""
    settings = {"initializer_range": 0.2, **case.settings, **settings}
    if case is GEMMA3_WITH_IMAGES:
        return make_gemma3_with_images(path, settings)
    if case in QWEN3_5_WITH_IMAGES:
        return make_qwen3_5_with_images(case.family, path, **settings)
    return make_tiny_model(case.family, path, **settings)


def make_gemma3_with_images(path: Path, settings: dict[str, Any]) -> Any:
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(text_config=SHAPE | settings, vision_config=VISION, mm_tokens_per_image=4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gemma3ForConditionalGeneration(config).eval().float()
    model.save_pretrained(path)
    return model


def ragged_prompts(shortest: int = 1, longest: int = 86) -> list[list[int]]:
    """Prompts that begin with the same two blocks, if they are long enough."""
    rng = random.Random(0)
    common = rng.choices(range(3, 128), k=2 * BLOCK_SIZE)
    lengths = [shortest + 17 * n % (longest - shortest + 1) for n in range(12)]
    return [(common + rng.choices(range(3, 128), k=longest))[:length] for length in lengths]


def small_pool(path: Path, max_model_len: int) -> int:
    """The number of blocks that one or two requests of the maximum length need."""
    options = CachePlanOptions(
        plan=str(path),
        tensor_parallel_size=2,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        max_num_batched_tokens=STEP_TOKENS,
        dtype="float32",
    )
    cache = plan(options).cache
    return cache.num_reserved_blocks + max(8, sum(group.max_blocks for group in cache.groups))


def test_every_architecture_is_among_the_cases() -> None:
    with_sound = {"WhisperForConditionalGeneration"}  # in test_transcription.py
    assert set(map(architecture_of, ALL_CASES)) | with_sound == ARCHITECTURES.keys()


@pytest.mark.parametrize("case", [marked_on_ranks(case) for case in ON_RANKS])
def test_chunks_prefix_hits_and_preemptions_on_two_ranks_change_no_token(
    case: Case, tmp_path: Path
) -> None:
    model = make_model(case, tmp_path)
    longest = max(case.prompt_lengths)
    prompts = ragged_prompts(min(case.prompt_lengths), longest)
    references = [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    max_model_len = min(case.max_model_len, longest + NUM_TOKENS)
    with LLM(
        tmp_path,
        device="cpu",
        dtype="float32",
        tensor_parallel_size=2,
        threads=1,
        block_size=BLOCK_SIZE,
        num_blocks=small_pool(tmp_path, max_model_len),
        max_model_len=max_model_len,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=STEP_TOKENS,
        watermark=0.0,
        preempt_threshold=1.0,
        admit_threshold=1.0,
        verify_plan=True,
    ) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [
            output for _ in range(2) for output in llm.generate(inputs, params, use_tqdm=False)
        ]
    assert_greedy_equal([output.outputs[0].token_ids for output in outputs], references * 2)
    assert any(output.outputs[0].num_preemptions for output in outputs)
    assert any(output.num_cached_tokens >= 2 * BLOCK_SIZE for output in outputs)


def test_states_beside_attention_are_served_over_http(
    tmp_path: Path, start_deployment: StartDeployment
) -> None:
    """The gateway is the same for every family; the tests above use `LLM`."""
    folder = tmp_path / "model"
    ids = {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    model = make_model(FIRST_CASES["Bamba"], folder, **ids)
    save_tokenizer(folder)
    prompt = list(range(20, 90))
    deployment = start_deployment(model_dir=folder).wait_until_ready()
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
        arguments: dict[str, Any] = {
            "model": client.models.list().data[0].id,
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "extra_body": {"return_token_ids": True, "ignore_eos": True},
        }
        (whole,) = client.completions.create(**arguments).choices
        streamed = list(client.completions.create(**arguments, stream=True))
    assert_greedy_equal([whole.token_ids], [greedy_reference(model, prompt, NUM_TOKENS)])
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.text
    assert streamed[-1].choices[0].finish_reason == whole.finish_reason == "length"
    assert deployment.stop() == 0, deployment.output


@pytest.mark.parametrize("case", [*FIRST_CASES.values(), *WITH_IMAGES], ids=str)
def test_a_worker_allocates_what_doctor_planned(case: Case, tmp_path: Path) -> None:
    make_model(case, tmp_path)
    # Layers with keys and values and a state, and others with neither.
    num_caches = {"FalconH1": 2 * 2, "NemotronH": 2}.get(case.family)
    assert_planned_as_allocated(tmp_path, max_model_len=case.max_model_len, num_caches=num_caches)


def test_a_worker_with_an_encoder_allocates_what_doctor_planned(tmp_path: Path) -> None:
    make_tiny_whisper(tmp_path)
    assert_planned_as_allocated(tmp_path, max_model_len=48, num_caches=2 * 2)


def assert_planned_as_allocated(
    path: Path, *, max_model_len: int, num_caches: int | None = None
) -> None:
    """num_caches: of all layers; None: each has one."""
    num_bytes = 1_000_000
    sizes: dict[str, int] = {
        "block_size": BLOCK_SIZE,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": STEP_TOKENS,
        "kv_cache_bytes": num_bytes,
    }
    report = plan(CachePlanOptions(plan=str(path), **sizes)).cache
    config = WorkerConfig(model=str(path), show_progress=False, **sizes)
    with Worker(config) as worker:
        cache = worker.kv_cache
        got = [(kind_of(g.spec), len(g.layer_names), g.spec.block_size) for g in cache.groups]
        assert got == [(g.kind, g.num_layers, g.block_tokens) for g in report.groups]
        assert cache.num_blocks == report.num_blocks
        assert block_bytes(cache.groups) == report.block_bytes
        assert worker.make_cache(cache).buffer.nbytes == report.size_bytes
    assert 0 <= num_bytes - report.size_bytes < report.block_bytes
    num_cached = sum(group.num_layers for group in report.groups)
    assert num_cached == (num_caches or worker.model_config.num_layers)
    for group, allocated in zip(report.groups, cache.groups, strict=True):
        assert allocated.block_size_bytes + group.padding_bytes == report.block_bytes
        rest = allocated.block_size_bytes - group.num_layers * group.layer_bytes
        if isinstance(allocated.spec, StateSpec):  # on average over its pages, of whole units
            assert 0 <= rest < allocated.spec.unit_bytes
        else:
            assert rest == 0
    usable = report.num_blocks - report.num_reserved_blocks
    needed = sum(group.max_blocks for group in report.groups)
    assert report.max_concurrency == usable / needed
    assert report.num_tokens == usable * max_model_len // needed
