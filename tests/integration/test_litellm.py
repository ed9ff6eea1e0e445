"""litellm, a client library for many providers, with a real server."""

import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.integration.deployment import Deployment

PROGRAM = Path(__file__).parent / "litellm_client.py"
PYTHON = ROOT / ".venv-litellm/bin/python"


@pytest.mark.services
def test_litellm_gets_answers_streams_usage_and_typed_errors(
    deployment: Deployment, tiny_model: tuple[Path, object]
) -> None:
    run = subprocess.run(
        [PYTHON, PROGRAM, deployment.url, tiny_model[0].name],
        capture_output=True,
        text=True,
        timeout=100,
        # The list of prices is not downloaded.
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PATH": "/usr/bin:/bin"},
    )
    assert run.stdout.rstrip().endswith("passed"), run.stdout + run.stderr
