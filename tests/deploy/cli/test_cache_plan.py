"""`longshore doctor --plan`: a worker allocates what it prints."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.cli.cache_plan import (
    plan,
    print_plan,
)
from longshore.deploy.cli.client_options import CachePlanOptions
from longshore.protocol.errors import ConfigError, KVCacheTooSmall
from longshore.protocol.kv_cache_spec import LongestRequest, num_blocks_needed
from longshore.worker.config import WorkerConfig
from longshore.worker.kv_cache.plan import DTYPE_BYTES
from longshore.worker.process.byte_size import byte_size
from longshore.worker.worker import Worker
from tests.gguf.cases import FILES
from tests.gguf.writing import changed
from tests.models import make_tiny_model
from tests.worker.models.cases import HYBRID, LATENT


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Four layers with a window of 40, and two without."""
    path = tmp_path_factory.mktemp("gemma3")
    return path, make_tiny_model(
        "Gemma3",
        path,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=40,
        head_dim=16,
    )


def options_for(path: Path, **settings: Any) -> CachePlanOptions:
    settings = {"max_num_batched_tokens": 64, "kv_cache_bytes": 1_000_000, **settings}
    return CachePlanOptions(plan=str(path), **settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_allocates_what_was_planned(windowed: tuple[Path, Any], dtype: str) -> None:
    path, model = windowed
    report = plan(options_for(path, dtype=dtype))
    config = WorkerConfig(
        model=str(path),
        dtype=dtype,
        kv_cache_bytes=1_000_000,
        max_num_batched_tokens=64,
        show_progress=False,
    )
    with Worker(config) as worker:
        groups = worker.kv_cache.groups
        assert worker.kv_cache.num_blocks == report.cache.num_blocks
        assert [(len(g.layer_names), g.spec.block_size) for g in groups] == [
            (g.num_layers, g.block_tokens) for g in report.cache.groups
        ]
        element_bytes = worker.kv_cache.groups[0].spec.dtype_bytes
    assert report.weight_bytes == element_bytes * model.num_parameters()
    assert report.cache.block_bytes == 2 * 2 * 16 * 2 * 16 * element_bytes
    kinds = [group.kind for group in report.cache.groups]
    assert kinds == ["sliding window of 40"] * 2 + ["full attention"]
    assert report.cache.max_model_len == 256
    assert [g.max_blocks for g in report.cache.groups] == [12, 12, 16]  # ceil((39 + 128) / 16) + 1


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("num_scheduled", [64, 16])
def test_a_worker_takes_the_fewest_blocks_with_which_the_scheduler_starts(
    windowed: tuple[Path, Any], num_steps: int, num_scheduled: int
) -> None:
    path, _ = windowed
    longest = LongestRequest(256, num_steps * num_scheduled, num_steps)
    settings: dict[str, Any] = {
        "model": str(path),
        "max_num_batched_tokens": 64,
        "max_num_scheduled_tokens": num_scheduled,
        "max_steps_in_flight": num_steps,
        "show_progress": False,
    }
    with Worker(WorkerConfig(**settings, num_blocks=100)) as worker:
        needed = num_blocks_needed(worker.kv_cache.groups, longest)
    with Worker(WorkerConfig(**settings, num_blocks=needed)) as worker:
        worker.start()
    with pytest.raises(KVCacheTooSmall, match=f"needs {needed},.*max_num_batched_tokens"):
        assert Worker(WorkerConfig(**settings, num_blocks=needed - 1)).kv_cache


def test_the_log_says_once_how_each_kind_of_layer_is_computed(
    windowed: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two groups with a window have one line, and so has the one without."""
    make_tiny_model("Bamba", tmp_path / "bamba", **HYBRID, mamba_n_groups=2, attn_layer_indices=[1])
    make_tiny_model("DeepseekV2", tmp_path / "deepseek", **LATENT)
    for path, words in (
        (windowed[0], ["window=40", "window=None"]),
        (tmp_path / "bamba", ["states", "window=None"]),
        (tmp_path / "deepseek", ["latents"]),
    ):
        caplog.clear()
        config = WorkerConfig(model=str(path), num_blocks=200, show_progress=False)
        with caplog.at_level("DEBUG"), Worker(config) as worker:
            worker.start()
        lines = [text for text in caplog.messages if text.startswith("attention: ")]
        assert len(lines) == len(words)
        for word in words:
            assert sum(word in line for line in lines) == 1


def test_a_worker_and_its_plan_have_the_same_longest_request_by_default(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    make_tiny_model("Llama", tmp_path, rope_parameters=rope)
    config = WorkerConfig(model=str(tmp_path), num_blocks=40, show_progress=False)
    with Worker(config) as worker:
        planned = plan(options_for(tmp_path)).cache
        assert worker.max_model_len == planned.max_model_len == 2 * 256


def test_shards_have_their_part_and_a_longer_request_leaves_room_for_fewer(
    windowed: tuple[Path, Any],
) -> None:
    whole = plan(options_for(windowed[0]))
    half = plan(options_for(windowed[0], tensor_parallel_size=2))
    assert half.cache.block_bytes * 2 == whole.cache.block_bytes
    assert half.weight_bytes * 2 == whole.weight_bytes
    short = plan(options_for(windowed[0], max_model_len=64))
    assert short.cache.max_concurrency > whole.cache.max_concurrency
    assert whole.cache.num_tokens == (whole.cache.num_blocks - 1) * 256 // 40


def test_the_plan_is_printed_as_tables_and_as_json(
    windowed: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    print_plan(options_for(windowed[0]), as_json=False)
    shown = capsys.readouterr().out
    assert "full attention" in shown
    assert "such requests that fit" in shown
    print_plan(options_for(windowed[0]), as_json=True)
    assert json.loads(capsys.readouterr().out)["cache"]["groups"][2]["kind"] == "full attention"


def shown_plan(
    capsys: pytest.CaptureFixture[str], path: Path, **settings: Any
) -> tuple[str, dict[str, str]]:
    """The printed text, and the lines of the last table by their left column."""
    print_plan(options_for(path, **settings), as_json=False)
    shown = capsys.readouterr().out
    lines: dict[str, str] = {}
    name = ""
    for line in shown.splitlines():
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if len(cells) == 2:
            name = cells[0] or name  # a long value continues on the next line
            lines[name] = f"{lines.get(name, '')} {cells[1]}".strip()
    return shown, lines


def test_the_plan_says_what_is_in_flight_and_that_no_request_fits(
    windowed: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    shown, lines = shown_plan(capsys, windowed[0])
    assert "sliding window of 40" in shown
    assert lines["a request of 256 tokens"] == "320.00 KiB: 40 blocks, of which 0.0% is padding"
    assert lines["of which for steps in flight"] == (
        "16 blocks: at most 128 tokens in 2 steps (--max-num-batched-tokens)"
    )
    _, lines = shown_plan(capsys, windowed[0], kv_cache_bytes=41 * 8192)
    assert lines["such requests that fit"] == "1.00"
    assert lines["KV cache (--kv-cache-bytes)"] == (
        "328.00 KiB: 41 blocks of 8,192 bytes, 1 reserved for padding"
    )
    _, lines = shown_plan(capsys, windowed[0], kv_cache_bytes=40 * 8192)
    assert lines["such requests that fit"].startswith("none, so the engine would not start")


@pytest.mark.parametrize(("dtype", "size"), [("float32", "128.00"), ("bfloat16", "64.00")])
def test_the_plan_of_latents_names_the_memory_that_they_are_expanded_in(
    dtype: str, size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_model("DeepseekV2", tmp_path, **LATENT)
    _, lines = shown_plan(capsys, tmp_path, dtype=dtype)
    assert lines["in addition, for long prompts"].startswith(f"{size} MiB for keys and values")
    assert "of which for steps in flight" not in lines


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_makes_room_for_as_many_times_the_tokens_as_its_numbers_are_smaller(
    windowed: tuple[Path, Any], dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = windowed
    settings = {"dtype": dtype, "kv_cache_bytes": 1 << 24}
    auto = plan(options_for(path, **settings)).cache
    report = plan(options_for(path, **settings, kv_cache_dtype="fp8_e4m3"))
    times = {"float32": 4, "bfloat16": 2}[dtype]
    assert report.cache.block_bytes * times == auto.block_bytes
    assert report.cache.num_blocks == auto.num_blocks * times
    assert report.auto_tokens == auto.num_tokens
    assert report.cache.num_tokens == pytest.approx(times * auto.num_tokens, rel=1e-2)
    _, lines = shown_plan(capsys, path, **settings, kv_cache_dtype="fp8_e4m3")
    assert f"{auto.num_tokens:,} fit in {dtype}" in lines["tokens gained with fp8_e4m3"]
    config = WorkerConfig(
        model=str(path),
        dtype=dtype,  # type: ignore[arg-type]
        kv_cache_dtype="fp8_e4m3",
        kv_cache_bytes=1 << 24,
        max_num_batched_tokens=64,
        show_progress=False,
    )
    with Worker(config) as worker:
        assert worker.kv_cache.num_blocks == report.cache.num_blocks
        assert worker.kv_cache.dtype == "fp8_e4m3"


@pytest.mark.req("FEA-06")
@pytest.mark.parametrize(
    ("family", "settings"), [("Llama", {"num_key_value_heads": 1}), ("DeepseekV2", LATENT)]
)
def test_ranks_that_share_tokens_hold_as_many_times_more_of_them(
    family: str, settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_model(family, tmp_path, **settings)
    shards = {"tensor_parallel_size": 4, "kv_cache_bytes": 1 << 24}
    whole = plan(options_for(tmp_path, **shards))
    shared = plan(options_for(tmp_path, **shards, decode_context_parallel_size=4))
    assert shared.cache.block_bytes == whole.cache.block_bytes
    assert shared.whole_tokens == whole.cache.num_tokens
    assert shared.cache.num_tokens == pytest.approx(4 * whole.cache.num_tokens, rel=1e-2)
    (group,) = shared.cache.groups
    assert (group.block_tokens, group.max_blocks) == (64, 4)
    _, lines = shown_plan(capsys, tmp_path, **shards, decode_context_parallel_size=4)
    gained = shared.cache.num_tokens - whole.cache.num_tokens
    assert lines["tokens gained with 4 context ranks"] == (
        f"{gained:,} (4.00 times); {whole.cache.num_tokens:,} fit without"
    )
    assert "of which for steps in flight" not in lines, "nothing is forgotten"
    assert "in addition, for long prompts" not in lines, "latents are always absorbed"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 3}, "does not divide tensor_parallel_size=3"),
        ({"tensor_parallel_size": 2}, "has a SlidingWindowSpec"),
    ],
)
def test_ranks_that_cannot_share_tokens_have_no_plan(
    windowed: tuple[Path, Any], settings: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(options_for(windowed[0], decode_context_parallel_size=2, **settings))


def test_a_model_that_fp8_cannot_keep_has_no_plan_in_fp8(tmp_path: Path) -> None:
    make_tiny_model("DeepseekV2", tmp_path, **LATENT)
    assert plan(options_for(tmp_path)).cache.num_tokens
    with pytest.raises(ConfigError, match="MLAAttentionSpec"):
        plan(options_for(tmp_path, kv_cache_dtype="fp8_e4m3"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_model_len": 257}, "more than the 256 tokens"),
        ({"block_size": 12}, "not a power of two"),
        ({"tensor_parallel_size": 3}, "cannot cut"),
    ],
)
def test_what_could_not_be_served_cannot_be_planned(
    windowed: tuple[Path, Any], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan(options_for(windowed[0], **settings))
    with pytest.raises(ConfigError, match="kv_cache_bytes=0"):
        options_for(windowed[0], kv_cache_bytes=0)


@pytest.mark.parametrize("content", [b"", b"short", struct.pack("<Q", 3) + b"{x}"])
def test_a_damaged_weight_file_is_named(
    content: bytes, windowed: tuple[Path, Any], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(windowed[0], tmp_path / "model"))
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a complete safetensors file"):
        plan(options_for(folder))


def test_a_gguf_file_is_planned_with_its_bytes_in_the_file_and_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = changed(FILES / "qwen2.gguf", tmp_path / "small.gguf", quantise=True)
    report = plan(options_for(file))
    assert (report.model, report.quantization) == ("small", "gguf")
    assert report.weight_file_bytes == file.stat().st_size
    in_float32 = plan(options_for(file, dtype="float32")).weight_bytes
    assert report.weight_bytes < in_float32 < 1.3 * report.weight_bytes  # some are not quantised
    print_plan(options_for(file), as_json=False)
    assert byte_size(file.stat().st_size) in capsys.readouterr().out


def test_quantised_weights_are_counted_as_they_are_in_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(__file__).parents[2] / "worker/loading/quantised/llama-gptq"
    report = plan(options_for(folder))
    assert report.quantization == "gptq"
    assert report.weight_file_bytes == (folder / "model.safetensors").stat().st_size
    # Embeddings and head; q, k, v and out; gate, up and down; three norms.
    num_elements = 2 * 32 * 32 + 2 * (64 + 32) * 32 + 3 * 64 * 32 + 3 * 32
    assert report.weight_bytes == num_elements * DTYPE_BYTES[report.dtype]
    assert report.weight_bytes > report.weight_file_bytes
    print_plan(options_for(folder), as_json=False)
    assert "from files in gptq" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "bits"), [("llama-ct_mxfp4", 4.25), ("llama-ct_int8", 8.0)])
def test_what_stays_quantised_is_counted_in_its_bits(name: str, bits: float) -> None:
    folder = Path(__file__).parents[2] / "worker/loading/quantised" / name
    report = plan(options_for(folder))
    in_layers = 2 * (64 + 32) * 32 + 3 * 64 * 32
    others = 2 * (2 * 32 * 32 + 3 * 32)
    num_groups = 2 * (64 + 32) + 2 * 64 if name.endswith("int8") else 0  # a row is a group
    assert report.weight_bytes == int(in_layers * bits / 8 + 5 * num_groups + others)
