"""The settings that `LLM` and the benchmarks report."""

import json
from pathlib import Path

import pytest

from longshore.deploy.bench.options import ThroughputOptions
from longshore.deploy.bench.throughput import run
from longshore.deploy.llm.llm import LLM
from longshore.protocol.errors import ConfigError
from tests.models import make_tiny_llama


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(path, max_position_embeddings=256)
    return path


def test_throughput_result_shows_what_every_default_became(model_dir: Path, tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    run(
        ThroughputOptions(
            model=model_dir,
            in_process=True,
            device="cpu",
            num_blocks=64,
            num_prompts=2,
            input_len=8,
            output_len=2,
            repeats=1,
            scheduling_policy="continuum",
            log_level="warning",
            json=result_file,
        )
    )
    result = json.loads(result_file.read_text())
    assert result["settings"]["max_model_len"] is None
    in_force = result["settings_in_force"]
    assert (in_force["device"], in_force["dtype"]) == ("cpu", "float32")
    assert in_force["scheduler"]["max_model_len"] == 256
    assert in_force["scheduler"]["policy"] == "continuum"
    assert in_force["scheduler"]["max_steps_in_flight"] == 2
    assert (in_force["cache"]["num_blocks"], in_force["cache"]["watermark"]) == (64, 0.01)


def test_blocks_in_force_are_those_that_memory_holds_when_none_are_asked_for(
    model_dir: Path,
) -> None:
    with LLM(model_dir, in_process=True, device="cpu", kv_memory_fraction=1e-3) as llm:
        assert llm.settings_in_force["cache"]["num_blocks"] > 256 // 16


def test_events_of_an_engine_in_the_callers_own_process_are_rejected_by_name(
    model_dir: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"enable_kv_cache_events.*in_process"):
        LLM(model_dir, in_process=True, device="cpu", enable_kv_cache_events=True)
