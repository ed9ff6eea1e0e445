"""One server of the demo model, and the environments of the clients."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.conftest import ROOT
from tests.integration.deployment import Deployment

HERE = Path(__file__).parent
TIMEOUT_S = 600  # importing a client's packages can take a minute


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.services)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(DEMO_MODEL_DIR, tmp_path_factory.mktemp("run")) as shared:
        yield shared.wait_until_ready()


RunClient = Callable[..., str]


@pytest.fixture
def run_client(tmp_path: Path) -> RunClient:
    """`run_client(name, program, ...)` runs a program of a client's environment to its end, in a
    temporary folder, and returns its output. Nothing is downloaded."""

    def run(name: str, program: str, *arguments: str | Path) -> str:
        binaries = ROOT / ".venv-clients" / name / "bin"
        if not binaries.exists():
            pytest.skip(f"{name} is not installed; scripts/test --all installs it")
        ended = subprocess.run(
            [binaries / program, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={
                "HOME": str(tmp_path),
                "HF_HUB_OFFLINE": "1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # the list of prices
                "PATH": os.defpath,
            },
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return run
