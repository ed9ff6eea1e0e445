"""vLLM's names of settings: taken where they mean the same, else answered with ours."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from longshore.connectors.registry import BUILT_IN
from longshore.deploy.cli.main import app
from longshore.deploy.settings.counts import read_count
from longshore.deploy.settings.options import ServeOptions, engine_options
from longshore.deploy.settings.vllm_names import (
    CONFIGS,
    CONNECTORS,
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
        assert flag[2:].replace("-", "_") in {*OURS, *RENAMED, *REJECTED, *WITHOUT_EFFECT}
    assert {own for fields in CONFIGS.values() for own in fields.values()} <= set(OURS)
    assert set(CONNECTORS.values()) <= set(BUILT_IN)


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
        ({"nothing": 1}, "nothing is not an engine setting; known are admit_threshold"),
    ],
    ids=str,
)
def test_a_script_is_told_what_to_change(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_options(settings)


def test_a_setting_in_json_may_be_a_dictionary() -> None:
    tiers = {"cpu_bytes_to_use": "1MiB"}
    options = engine_options({"kv_connector": "offloading", "kv_connector_config": tiers})
    assert json.loads(options.kv_connector_config) == tiers


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
    "flags",
    [
        ["--served-model-name", "a", "b", "--port", "0"],
        ["--served-model-name", "a", "--served_model_name=b"],
    ],
    ids=str,
)
def test_a_model_has_several_names(flags: list[str]) -> None:
    _, bound, _ = app.parse_args(translate_flags(["serve", "folder", *flags]), exit_on_error=False)
    assert bound.arguments["options"].served_model_name == ("a", "b")


def test_a_word_after_a_name_is_the_model_if_there_is_no_other() -> None:
    tokens = translate_flags(["serve", "--served-model-name", "a", "folder"])
    _, bound, _ = app.parse_args(tokens, exit_on_error=False)
    assert bound.arguments["options"].served_model_name == ("a",)
    assert bound.arguments["model"] == (Path("folder"),)


@pytest.mark.parametrize(
    "flags", [["-O3"], ["-O", "3"], ["-O=3"], ["-O.level=3"], ["--compilation-config.level", "3"]]
)
def test_levels_of_compilation_have_no_effect(
    flags: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert translate_flags([*flags, "--port", "1"]) == ["--port", "1"]
    assert "--compilation-config has no effect" in caplog.text


EXTRA = {"cpu_bytes_to_use": 1 << 30}


@pytest.mark.parametrize(
    "flags",
    [
        [
            "--kv-transfer-config",
            '{"kv_connector":"OffloadingConnector","kv_role":"kv_both",'
            '"kv_connector_extra_config":{"cpu_bytes_to_use":1073741824},'
            '"kv_load_failure_policy":"fail","kv_buffer_device":"cuda"}',
        ],
        [
            "--kv-transfer-config.kv_connector=OffloadingConnector",
            *("--kv-transfer-config.kv_role", "kv_both"),
            *("--kv-transfer-config.kv_connector_extra_config.cpu_bytes_to_use", "1073741824"),
            *("--kv-transfer-config.kv_load_failure_policy", "fail"),
        ],
    ],
    ids=["json", "dotted"],
)
def test_a_transfer_config_is_translated(flags: list[str]) -> None:
    options = options_of(*flags)
    assert (options.kv_connector, options.kv_role) == ("offloading", "kv_both")
    assert json.loads(options.kv_connector_config) == EXTRA
    assert options.load_failure_policy == "fail"


def test_objects_of_a_script_are_translated(caplog: pytest.LogCaptureFixture) -> None:
    options = engine_options(
        {
            "kv_transfer_config": {
                "kv_connector": "OffloadingConnector",
                "kv_connector_extra_config": EXTRA,
                "kv_rank": 0,
            },
            "kv_events_config": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": "tcp://127.0.0.1:5557",
                "replay_endpoint": None,
                "buffer_steps": 500,
                "topic": "kv",
            },
        }
    )
    assert (options.kv_connector, json.loads(options.kv_connector_config)) == ("offloading", EXTRA)
    assert options.enable_kv_cache_events
    assert (options.kv_events_endpoint, options.kv_events_replay_endpoint) == (
        "tcp://127.0.0.1:5557",
        None,
    )
    assert (options.kv_events_buffer, options.kv_events_topic) == (500, "kv")
    assert "kv_transfer_config: kv_rank has no effect" in caplog.text
    own = engine_options(
        {"kv_transfer_config": {"kv_connector": "Mine", "kv_connector_module_path": "a.b"}}
    )
    assert own.kv_connector == "a.b:Mine"
    assert not options_of(
        "--kv-events-config", '{"enable_kv_cache_events": false}'
    ).enable_kv_cache_events


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_transfer_config": "nixl"}, "must be a dict with the fields kv_connector"),
        ({"kv_transfer_config": {"kv_ip": "a"}}, "kv_ip is not supported; the fields are kv_conn"),
        (
            {"kv_transfer_config": {"kv_role": "kv_both"}, "kv_role": "kv_both"},
            "kv_transfer_config and kv_role are the same setting",
        ),
    ],
    ids=str,
)
def test_objects_that_do_not_fit_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate_settings(settings)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-transfer-config", "nixl"], "--kv-transfer-config is not a JSON object: nixl"),
        (["--kv-events-config", "3"], "--kv-events-config is not a JSON object: 3"),
        (["--kv-cache-memory-bytes", "9"], "use num_blocks"),
        (["--enable-lora"], "LoRA adapters are not supported"),
        (["--revision"], "OWNER/NAME@REVISION"),
        (["-ep"], "tensor_parallel_size splits experts"),
    ],
    ids=str,
)
def test_other_flags_are_answered_with_ours(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate_flags(flags)


def test_names_of_kernels_are_those_of_the_formats_that_they_read() -> None:
    assert translate_flags(["-q", "awq_marlin"]) == ["--quantization", "awq"]
    assert translate_flags(["--quantization=gptq_marlin"]) == ["--quantization=gptq"]
    assert engine_options({"quantization": "gpt_oss_mxfp4"}).quantization == "mxfp4"
    assert engine_options({"quantization": "modelopt_fp4"}).quantization == "modelopt"


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
