"""Triton kernels compile for a Hopper GPU, also where there is none, and fit into it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.kernels.compiled import KERNELS, RECORD, digest_of_inputs


def compile_launches(cache: Path, *kernels: str) -> list[str]:
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.kernels.compiled", *kernels],
        env=environment,
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_these_sources_have_been_compiled_for_a_gpu() -> None:
    record = json.loads(RECORD.read_text())
    assert record["inputs"] == digest_of_inputs(), (
        "kernels, or how they are launched, have changed since compiled.json was written: run "
        "`python -m tests.worker.kernels.compiled --write`, which takes minutes, and commit it"
    )
    modules = {line.partition(".")[0] for line in record["launches"]}
    assert modules == {source.stem for source in KERNELS.glob("*.py")} - {
        "__init__",
        "packed",
        "paged",
    }


def test_what_the_record_says_of_a_launch_is_what_the_compiler_says(tmp_path: Path) -> None:
    launches = compile_launches(tmp_path, "argmax")
    assert launches
    assert {*launches} <= {*json.loads(RECORD.read_text())["launches"]}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_record_is_what_the_compiler_says(tmp_path: Path) -> None:
    assert compile_launches(tmp_path) == json.loads(RECORD.read_text())["launches"]
