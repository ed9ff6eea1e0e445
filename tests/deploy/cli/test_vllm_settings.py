"""vLLM's names of settings: taken where they mean the same, else answered with ours."""

import logging
from typing import Any

import pytest

from longshore.deploy.cli.counts import read_count
from longshore.deploy.cli.main import app
from longshore.deploy.cli.options import ServeOptions, engine_options
from longshore.deploy.cli.vllm_settings import (
    FLAGS_WITHOUT_VALUE,
    REJECTED,
    RENAMED,
    RENAMED_VALUES,
    SHORT_FLAGS,
    WITHOUT_EFFECT,
    translate_flags,
    translate_settings,
)
from longshore.protocol.errors import ConfigError

OURS = ServeOptions.__dataclass_fields__


def options_of(*flags: str) -> ServeOptions:
    _, bound, _ = app.parse_args(["serve", *translate_flags(flags)], exit_on_error=False)
    options = bound.arguments["options"]
    assert isinstance(options, ServeOptions)
    return options


def test_every_name_is_ours_or_of_vllm_alone() -> None:
    assert set(RENAMED.values()) <= set(OURS)
    assert {name for name, _ in RENAMED_VALUES} <= set(OURS)
    assert not (set(RENAMED) | set(WITHOUT_EFFECT) | set(REJECTED)) & set(OURS)
    assert not set(RENAMED) & (set(WITHOUT_EFFECT) | set(REJECTED))
    assert set(WITHOUT_EFFECT) >= FLAGS_WITHOUT_VALUE
    for flag in SHORT_FLAGS.values():
        assert flag[2:].replace("-", "_") in {**RENAMED, **REJECTED}


def test_settings_of_a_vllm_script_are_taken() -> None:
    options = engine_options(
        {
            "dtype": "half",
            "kv_cache_dtype": "fp8",
            "max_model_len": 128,
            "num_gpu_blocks_override": 40,
            "tensor_parallel_size": 2,
            "seed": 3,
            "quantization": None,
            "load_format": "safetensors",
            "cpu_offload_gb": 0,
            "data_parallel_size": 1,
        }
    )
    assert (options.dtype, options.kv_cache_dtype) == ("float16", "fp8_e4m3")
    assert (options.max_model_len, options.num_blocks) == (128, 40)
    assert (options.tensor_parallel_size, options.seed) == (2, 3)


def test_what_asks_for_the_usual_is_taken_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert translate_settings({name: True for name in WITHOUT_EFFECT}) == {}
    for name, reason in WITHOUT_EFFECT.items():
        assert f"{name} has no effect: {reason}" in caplog.text


@pytest.mark.parametrize("name", REJECTED)
def test_what_does_not_exist_is_answered_with_what_does(name: str) -> None:
    neutral, advice = REJECTED[name]
    for value in (None, *neutral):
        assert translate_settings({name: value}) == {}
    with pytest.raises(ConfigError) as rejection:
        translate_settings({name: "something else"})
    assert str(rejection.value) == f"{name} is not supported: {advice}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_memory_bytes": 9}, "use num_blocks"),
        ({"num_blocks": 4, "num_gpu_blocks_override": 4}, "are the same setting"),
        ({"port": 80}, "port is a setting of `longshore serve`"),
        ({"data_parallel_size": 2}, "replicas is a setting of `longshore serve`"),
        ({"nothing": 1}, "nothing is not an engine setting; known are device"),
    ],
    ids=str,
)
def test_a_script_is_told_what_to_change(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_options(settings)


def test_flags_of_vllm_serve_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    options = options_of(
        *("-tp", "2", "-pp", "3", "--max-model-len", "32k", "--max_num_seqs=16"),
        *("--max-num-batched-tokens", "8K", "-dp", "2", "--dtype", "half"),
        *("--kv-cache-dtype=fp8", "--enforce-eager", "--swap-space", "4", "--trust-remote-code"),
        *("--load-format", "auto", "--no-enable-prefix-caching", "--no-enable-lora"),
        *("--num-gpu-blocks-override=900", "--port", "0", "-asc", "3", "--runner", "pooling"),
    )
    assert (options.tensor_parallel_size, options.pipeline_parallel_size) == (2, 3)
    assert (options.max_model_len, options.max_num_batched_tokens) == (32_000, 8192)
    assert (options.max_num_seqs, options.replicas, options.num_blocks) == (16, 2, 900)
    assert options.gateways == 3
    assert (options.dtype, options.kv_cache_dtype) == ("float16", "fp8_e4m3")
    assert (options.enable_prefix_caching, options.port) == (False, 0)
    assert options.enforce_eager
    assert "--swap-space has no effect" in caplog.text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-cache-memory-bytes", "9"], "use num_blocks"),
        (["--enable-lora"], "LoRA adapters are not supported"),
        (["--quantization=awq"], "the format is that of the checkpoint"),
        (["--revision"], "OWNER/NAME@REVISION"),
        (["-q", "awq"], "the format is that of the checkpoint"),
        (["-ep"], "tensor_parallel_size splits experts"),
    ],
    ids=str,
)
def test_other_flags_are_answered_with_ours(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate_flags(flags)


def test_what_is_no_flag_of_vllm_stays_as_it_is() -> None:
    tokens = ["folder", "--port", "80", "-v", "--", "--", "--api-key=a_b", "--log-level", "debug"]
    assert translate_flags(tokens) == tokens


@pytest.mark.parametrize(
    ("text", "count"),
    [("8192", 8192), ("32k", 32_000), ("32K", 32_768), ("25.6k", 25_600), ("2m", 2_000_000)],
)
def test_counts_have_suffixes(text: str, count: int) -> None:
    assert options_of("--max-model-len", text).max_model_len == count


@pytest.mark.parametrize("text", ["1.5", "32kb", "many", "0.0001k"])
def test_a_count_is_a_whole_number(text: str) -> None:
    from cyclopts import Token

    with pytest.raises(ValueError, match="whole number"):
        read_count(int, [Token(value=text)])
