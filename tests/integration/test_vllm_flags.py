"""`longshore serve` with the flags of a `vllm serve` command."""

import json
import urllib.request
from pathlib import Path

import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.integration.deployment import Deployment

FLAGS = [
    *("--max_model_len", "1k", "--num-gpu-blocks-override=600", "-dp", "2", "-tp", "1"),
    *("--dtype", "float", "--served-model-name", "demo", "--tool-call-parser", "hermes"),
    *("--enforce-eager", "--trust-remote-code", "--enable-auto-tool-choice", "--swap-space", "4"),
    *("--gpu-memory-utilization", "0.9", "-O3"),
]


@pytest.mark.slow
def test_the_server_has_what_the_flags_ask_for(tmp_path: Path) -> None:
    environment = {"LONGSHORE_MAX_NUM_BATCHED_TOKENS": "2K"}
    with Deployment(
        DEMO_MODEL_DIR, tmp_path, *FLAGS, num_blocks=None, environment=environment
    ) as server:
        server.wait_until_ready()
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as response:
            (model,) = json.load(response)["data"]
        assert (model["id"], model["max_model_len"]) == ("demo", 1000)
        assert {"scheduler-0", "scheduler-1"} <= server.members.keys()
        for name in ("--swap-space", "--compilation-config", "gpu_memory_utilization=0.9"):
            assert f"{name} has no effect" in server.output
        assert server.stop() == 0, server.output
