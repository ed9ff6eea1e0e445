"""Thousands of valid and invalid requests generated from /openapi.json: every response agrees with
the document and is never a server error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.integration.conftest import StartDeployment

PROGRAM = Path(sys.executable).parent / "schemathesis"
ALIASES = ("/score", "/rerank", "/v2/rerank", "/classify")
DIALECTS = ("/v1/completions", "/v1/messages", "/v1/responses")
SAME_BODY = ("/v1/responses/input_tokens", "/v1/messages/count_tokens", "/v1/audio/translations")
"""Paths whose body another path reads, too. `tests/fuzz/` sends such faults to every dialect."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_server_does_what_its_document_says(
    start_deployment: StartDeployment, tmp_path: Path, long_run: bool
) -> None:
    """All checks of schemathesis except one: a valid request may be rejected, because the schema
    cannot describe what fits the model (its vocabulary, its length, text or audio). The length is
    short, because most requests do not limit their tokens. Without --long, every value and every
    fault has a request, but they are not combined at random, and of paths that are read alike, one
    gets them. See also `lenient_types`."""
    deployment = start_deployment("--max-model-len", "256").wait_until_ready()
    phases = "examples,coverage,fuzzing" if long_run else "examples,coverage"
    flags = (
        f"--no-color --continue-on-failure --phases {phases} "
        "--generation-deterministic --max-examples 5 --request-timeout 30 --workers 4 "
        "--exclude-checks positive_data_acceptance"
    )
    left_out = () if long_run else ALIASES + DIALECTS + SAME_BODY
    run = subprocess.run(
        [PROGRAM, "run", f"{deployment.url}/openapi.json", *flags.split()]
        + [f"--exclude-path={path}" for path in left_out],
        cwd=tmp_path,
        env=os.environ
        | {
            "SCHEMATHESIS_HOOKS": "tests.integration.lenient_types",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        },
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Traceback" not in deployment.output
