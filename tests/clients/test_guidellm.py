"""guidellm, a benchmark client, with its defaults."""

import json
from pathlib import Path

import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.clients.conftest import RunClient
from tests.integration.deployment import Deployment


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_request_of_a_benchmark_succeeds(
    server: Deployment, run_client: RunClient, tmp_path: Path, path: str
) -> None:
    run_client(
        "guidellm",
        "guidellm",
        "run",
        "--backend",
        f"kind=openai_http,target={server.url},request_format={path}",
        "--profile",
        "kind=concurrent,streams=2",
        "--constraint",
        "kind=max_requests,count=4",
        "--tokenizer",
        f"kind=hf_auto,model={DEMO_MODEL_DIR}",
        "--data",
        "kind=synthetic_text,prompt_tokens=20,output_tokens=8",
        "--output",
        f"kind=json,path={tmp_path / 'report.json'}",
        "--disable-console",
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert requests["errored"] == []
    assert len(requests["successful"]) == 4
    assert {request["output_tokens"] for request in requests["successful"]} == {8}
