"""scripts/gpu_check, with its checks run on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.worker.models.cases import CASES


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_dry_run_takes_every_path_and_writes_its_results(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    command = [sys.executable, "scripts/gpu_check", "--dry-run", "--json", str(path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    results = json.loads(path.read_text())
    assert all(check["ok"] for check in results["checks"])
    names = [check["name"] for check in results["checks"]]
    assert {f"{case.name}, whole prompts" for case in CASES} <= set(names)
    assert len([name for name in names if name.startswith("Llama, ")]) >= 5
    assert "no step waits for the device" in names
    assert {row["num_prompts"] for row in results["benchmarks"]} == {1, 4}


def test_without_a_device_the_exit_status_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device here")
    path = tmp_path / "results.json"
    command = [sys.executable, "scripts/gpu_check", "--json", str(path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "--dry-run" in result.stderr
    assert not path.exists()
