"""Models with an fp8 KV cache: how far logits deviate, and what is unchanged."""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

import longshore.deploy
from longshore.protocol.kv_cache_spec import KVCacheDtype
from longshore.worker.config import WorkerConfig
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.kv_cache.fp8 import KVScales
from longshore.worker.worker import Worker
from tests.models import make_tiny_llama
from tests.worker.forward import paged_logits
from tests.worker.models.cases import CASES, Case
from tests.worker.models.conftest import NUM_COMMON, NUM_TOKENS, Checkpoint
from tests.worker.models.served_model import ServedModel

CheckpointOf = Callable[[Case], Checkpoint]
TOKENS = random.Random(0).choices(range(3, 128), k=120)
CHUNKS = [60, *[1] * 10, 50]

MEAN_ERROR, LARGEST_ERROR = 0.15, 1.25
"""Of logits, in their standard deviations, as docs/worker.md states them: root mean square over a
sequence's tokens and the whole vocabulary, and at most."""

KEPT = ["Llama", "Qwen2", "Qwen3, alternating", "Phi-3, windowed", "Gemma 2", "Gemma 3", "OLMo 2"]
NOT_KEPT = {
    "DeepSeek-V2": "MLAAttentionSpec",
    "Mamba 2": "StateSpec",
    "Bamba": "StateSpec",
    "Qwen3.5": "StateSpec",
    "LFM2": "StateSpec",
}


def cases(names: object) -> list[Case]:
    return [case for case in CASES if case.name in names]  # type: ignore[operator]


def worker_of(path: Path, kv_cache_dtype: KVCacheDtype, dtype: str = "float32") -> Worker:
    return Worker(
        WorkerConfig(
            model=str(path),
            dtype=dtype,  # type: ignore[arg-type]
            kv_cache_dtype=kv_cache_dtype,
            num_blocks=200,
            max_model_len=128,
            max_num_batched_tokens=128,
            show_progress=False,
        )
    )


def logits_of(
    path: Path,
    kv_cache_dtype: KVCacheDtype,
    dtype: str = "float32",
    token_ids: Sequence[int] = TOKENS,
) -> Tensor:
    """The logits of all tokens of a sequence: (tokens, vocabulary)."""
    with worker_of(path, kv_cache_dtype, dtype) as worker:
        return paged_logits(worker, token_ids, CHUNKS)


def errors(logits: Tensor, exact: Tensor) -> tuple[float, float]:
    """Root mean square and maximum, in standard deviations of the exact logits."""
    strayed = (logits - exact) / exact.std()
    return strayed.square().mean().sqrt().item(), strayed.abs().max().item()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", cases(KEPT), ids=str)
def test_logits_stray_within_the_stated_bound(
    case: Case, dtype: str, checkpoint_of: CheckpointOf
) -> None:
    path = checkpoint_of(case).path
    mean, largest = errors(logits_of(path, "fp8_e4m3", dtype), logits_of(path, "auto", dtype))
    assert 0 < mean < MEAN_ERROR
    assert largest < LARGEST_ERROR


def test_logits_of_a_trained_model_stray_within_the_stated_bound() -> None:
    path = Path(longshore.deploy.__file__).parent / "demo_model"
    facts = zip(
        ("box", "door", "car", "house", "tree", "cup", "hat", "shoe", "book", "ball"),
        ("red", "blue", "green", "white", "black", "brown", "grey", "yellow", "pink", "orange"),
        strict=True,
    )
    text = (
        " ".join(f"The colour of the {thing} is {colour}." for thing, colour in facts)
        + " What is the colour of the tree?"
    )
    token_ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids[: len(TOKENS)]

    kept, exact = (
        logits_of(path, kv_cache_dtype, "bfloat16", token_ids)
        for kv_cache_dtype in ("fp8_e4m3", "auto")
    )
    mean, largest = errors(kept, exact)
    assert 0 < mean < MEAN_ERROR
    assert largest < LARGEST_ERROR


@pytest.mark.parametrize("case", cases(["Llama", "Qwen3, alternating", "GPT-OSS"]), ids=str)
def test_chunks_hits_and_preemptions_do_not_change_an_answer(
    case: Case, checkpoint_of: CheckpointOf
) -> None:
    checkpoint = checkpoint_of(case)

    def served(**settings: object) -> ServedModel:
        return ServedModel(
            checkpoint.path,
            num_tokens=NUM_TOKENS,
            kv_cache_dtype="fp8_e4m3",
            **settings,  # type: ignore[arg-type]
        )

    with served() as model:
        specs = [group.spec for group in model.worker.kv_cache.groups]
        assert {spec.dtype_bytes for spec in specs} == {1}  # type: ignore[union-attr]
        whole = model.answers(checkpoint.prompts)
        again = model.answers(checkpoint.prompts)
        assert (
            model.ended[len(whole)].num_cached_tokens >= NUM_COMMON // model.border * model.border
        )
    with served(max_num_batched_tokens=13) as model:
        chunked = model.answers(checkpoint.prompts)
    with served(num_blocks=None, max_num_batched_tokens=16, enable_prefix_caching=False) as model:
        preempted = model.answers(checkpoint.prompts * 4)
        assert any(ended.num_preemptions for ended in model.ended.values())
    assert again == whole
    assert chunked == whole
    assert preempted == whole * 4


def with_tensors(path: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint with changed tensors."""
    target.mkdir()
    (target / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def scales(keys: object, values: object) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(keys)
        tensors["model.layers.1.self_attn.v_proj.v_scale"] = torch.tensor([values]).bfloat16()

    return change


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_tiny_llama(path)
    return path


def test_scales_of_the_checkpoint_are_those_of_its_layers(llama: Path, tmp_path: Path) -> None:
    scaled = with_tensors(llama, tmp_path / "scaled", scales(0.5, 0.25))
    with worker_of(scaled, "fp8_e4m3") as worker:
        assert worker.kv_scales == {
            "model.layers.0": KVScales(keys=0.5),
            "model.layers.1": KVScales(values=0.25),
        }
    assert torch.equal(logits_of(scaled, "auto"), logits_of(llama, "auto"))


def test_scales_make_numbers_that_are_out_of_range_as_exact_as_others(
    llama: Path, tmp_path: Path
) -> None:
    """Values are 2^12 times as large, and the next product divides them again; nothing else
    changes."""
    factor = 2.0**12

    def enlarge(tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.v_proj.weight"] *= factor
            tensors[f"model.layers.{layer}.self_attn.o_proj.weight"] /= factor

    def enlarge_and_scale(tensors: dict[str, Tensor]) -> None:
        enlarge(tensors)
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(factor)

    exact, rounded = logits_of(llama, "auto"), logits_of(llama, "fp8_e4m3")
    scaled = with_tensors(llama, tmp_path / "scaled", enlarge_and_scale)
    torch.testing.assert_close(logits_of(scaled, "fp8_e4m3"), rounded, rtol=1e-4, atol=1e-4)
    unscaled = with_tensors(llama, tmp_path / "unscaled", enlarge)
    saturated = logits_of(unscaled, "fp8_e4m3")
    assert saturated.isfinite().all()
    assert errors(saturated, exact) > errors(rounded, exact)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, [1.0, 2.0]], ids=str)
def test_an_invalid_scale_is_rejected(llama: Path, tmp_path: Path, scale: object) -> None:
    broken = with_tensors(llama, tmp_path / "broken", scales(scale, 1.0))
    with pytest.raises(BrokenCheckpoint, match=r"layers\.0\.self_attn\.k_scale is .* one positive"):
        worker_of(broken, "fp8_e4m3")


def test_nan_survives_the_cache(llama: Path, tmp_path: Path) -> None:
    def poison(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.v_proj.weight"][0, 0] = math.nan

    assert logits_of(with_tensors(llama, tmp_path / "nan", poison), "fp8_e4m3").isnan().all()


@pytest.mark.parametrize("case", cases(NOT_KEPT), ids=str)
def test_latents_and_states_are_rejected_by_name(case: Case, checkpoint_of: CheckpointOf) -> None:
    with pytest.raises(UnsupportedModel, match=rf"fp8_e4m3.*{NOT_KEPT[case.name]}.*'auto'"):
        worker_of(checkpoint_of(case).path, "fp8_e4m3")
