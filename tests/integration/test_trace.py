"""The scheduler trace of a deployment."""

import json
import stat
import urllib.request
from pathlib import Path

import pytest

from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S


@pytest.mark.req("TRC-01")
@pytest.mark.req("TRC-02")
def test_a_served_request_is_in_the_trace_without_its_prompt(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    path = tmp_path / "steps.jsonl"
    own = start_deployment(environment={"LONGSHORE_SCHED_TRACE_PATH": str(path)})
    own.wait_until_ready()
    prompt = "a secret " * 8
    body = json.dumps({"prompt": prompt, "max_tokens": 5}).encode()
    request = urllib.request.Request(
        f"{own.url}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        assert response.status == 200
    assert own.stop() == 0, own.output
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_text()
    assert "secret" not in content
    records = [json.loads(line) for line in content.splitlines()]
    by_kind = {record["record"]: record for record in records}
    assert records[0]["engine"] == "engine-0"
    assert by_kind["request_finished"]["output_tokens"] <= 5
    request_id = by_kind["request_finished"]["request"]
    assert by_kind["prefix_cache_event"]["request"] == request_id
    assert any(request_id in record.get("new", ()) for record in records)
    assert "unknown variables" not in own.output
