"""Triton kernels compile for a Hopper GPU, also where there is none, and fit into it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longshore.worker.kernels import operators


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.kernels.compiled"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    modules = {line.partition(".")[0] for line in done.stdout.splitlines()}
    sources = Path(operators.__file__).parent.joinpath("gpu").glob("*.py")
    assert modules == {source.stem for source in sources} - {"__init__", "paged"}
