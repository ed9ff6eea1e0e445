"""From a user's settings to every component's own."""

import json
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.engine import EnginePlan, engine_processes, plan_engine, worker_config
from longshore.deploy.model_folder import read_model_folder
from longshore.deploy.options import EngineOptions, ServeOptions, engine_options
from longshore.deploy.runtime_dir import RuntimeDir
from longshore.protocol.errors import ConfigError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def plan(model_dir: Path, **settings: Any) -> EnginePlan:
    return plan_engine(EngineOptions(device="cpu", **settings), read_model_folder(model_dir))


def test_every_process_gets_the_same_identity(model_dir: Path) -> None:
    runtime_dir = RuntimeDir()
    try:
        engine = plan(model_dir, num_blocks=40, async_scheduling=False, max_num_seqs=4)
        (worker, scheduler), clients = engine_processes(engine, runtime_dir)
    finally:
        runtime_dir.remove()
    assert (worker.name, scheduler.name) == ("worker 0", "scheduler")
    assert worker.config.identity == scheduler.config.identity == engine.identity  # type: ignore[attr-defined]
    assert scheduler.config.scheduler.max_steps_in_flight == 1  # type: ignore[attr-defined]
    assert clients == scheduler.config.clients  # type: ignore[attr-defined]
    assert worker_config(engine).num_blocks == 40
    assert engine.hash_seed.hex() not in str(worker.config)


def test_deployments_do_not_share_a_hash_seed(model_dir: Path) -> None:
    assert plan(model_dir).hash_seed != plan(model_dir).hash_seed


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({}, 512),
        ({"num_blocks": 11}, 160),
        ({"num_blocks": 1000}, 512),
        ({"max_model_len": 100}, 100),
        ({"max_model_len": 300, "num_blocks": 11}, 300),
    ],
)
def test_length_is_the_model_s_cut_to_the_blocks_unless_asked(
    model_dir: Path, settings: dict[str, int], length: int
) -> None:
    assert plan(model_dir, **settings).identity.max_model_len == length


def test_length_beyond_the_model_is_refused_with_both_numbers(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=513.*512 tokens"):
        plan(model_dir, max_model_len=513)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "tpu"}, "device='tpu'.*cpu, cuda"),
        ({"dtype": "int8"}, "dtype='int8'.*float32, bfloat16, float16"),
        ({"scheduling_policy": "random"}, "scheduling_policy='random'.*fcfs, priority"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"block_size": 12}, "block_size=12.*power of two"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"threads": 0}, "threads=0"),
        ({"kv_memory_fraction": 1.5}, "kv_memory_fraction=1.5"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1"),
        ({"log_level": "loud"}, "log_level='loud'.*debug, info"),
        ({"startup_timeout_s": 0}, "startup_timeout_s=0"),
        ({"num_bloks": 5}, "num_bloks.*num_blocks"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, "chunked prefill"),
    ],
)
def test_wrong_setting_is_refused_by_name(
    model_dir: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        worker_config(plan_engine(engine_options(settings), read_model_folder(model_dir)))


@pytest.mark.parametrize(
    "settings", [{"port": 70000}, {"max_body_mib": 0}, {"drain_timeout_s": -1}]
)
def test_wrong_serving_setting_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServeOptions(**settings)


def test_runtime_directory_too_deep_for_a_socket_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    runtime_dir = RuntimeDir()
    with pytest.raises(ConfigError, match="TMPDIR"):
        runtime_dir.endpoint("clients")
    runtime_dir.remove()
