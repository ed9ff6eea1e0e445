"""What was stored under other settings of the engine is not loaded, if its KV differs."""

import json
from pathlib import Path
from typing import Any

import pytest

from longshore import LLM, SamplingParams
from longshore.deploy.llm.in_process_engine import InProcessEngine
from tests.models import make_tiny_model
from tests.worker.models.cases import LONGROPE
from tests.worker.models.conftest import prompt_of

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)


def ask(
    path: Path, prompt: list[int], max_model_len: int, **connector: str
) -> tuple[list[float], int]:
    """The log probability of each token, and the number of loaded tokens."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1}
    with LLM(
        path, in_process=True, block_size=16, max_model_len=max_model_len, **settings, **connector
    ) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], GREEDY, progress=False)
        engine = llm._engine
        assert isinstance(engine, InProcessEngine)
        while engine.scheduler.has_transfers():
            engine.receive()
        num_loaded = engine.scheduler.make_stats().num_external_hit_tokens
        assert output.logprobs is not None
        scores = zip(output.logprobs, output.token_ids, strict=True)
        return [each[token].logprob for each, token in scores], num_loaded


def test_keys_that_were_rotated_by_the_other_factors_of_longrope_are_not_loaded(
    tmp_path: Path,
) -> None:
    """max_model_len decides which factors all requests use."""
    model = tmp_path / "model"
    rope = {"rope_parameters": dict(LONGROPE), "original_max_position_embeddings": 64}
    make_tiny_model("Phi3", model, initializer_range=0.2, **rope)
    prompt = prompt_of(50, 0)
    options = {
        "cpu_bytes_to_use": "4MiB",
        "disk_path": str(tmp_path / "tier"),
        "disk_bytes": "8MiB",
        "disk_io": "threads",
    }
    tier = {"kv_connector": "offloading", "kv_connector_config": json.dumps(options)}
    for max_model_len, is_stored in ((64, False), (64, True), (100, False), (120, True)):
        expected, _ = ask(model, prompt, max_model_len)
        found, num_loaded = ask(model, prompt, max_model_len, **tier)
        assert found == pytest.approx(expected, abs=1e-4)
        assert bool(num_loaded) == is_stored
