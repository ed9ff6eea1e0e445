"""A connector without a worker half is rejected before any process starts."""

from pathlib import Path

import pytest

from longshore import LLM
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.errors import ConfigError

KNOWN = "longshore.connectors.base:SchedulerConnector"


def test_llm_rejects_a_connector_without_a_worker_half_before_it_starts_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match=f"--kv-connector {KNOWN} has no worker half"):
        LLM(DEMO_MODEL_DIR, device="cpu", num_blocks=200, kv_connector=KNOWN)
    assert list(tmp_path.iterdir()) == []
