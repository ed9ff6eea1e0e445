"""The connectors of this package pass the conformance suite; `example`, `lmcache` and the remote
tiers are in modules of their own.
`decode_bench` and `hidden_states` do not keep KV: their contracts are in tests/connectors/."""

from pathlib import Path
from typing import Any

import pytest

from longshore.testing.connectors import ConnectorConformance


@pytest.mark.slow
@pytest.mark.req("CRG-09")
class TestOffloading(ConnectorConformance):
    connector = "offloading"

    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"cpu_bytes_to_use": "1MiB", "verify_kv": "always"}


@pytest.mark.slow
class TestOffloadingToDisk(ConnectorConformance):
    connector = "offloading"
    is_variant = True
    num_seeds = 1
    survives_restart = True

    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {
            "cpu_bytes_to_use": "200KiB",
            "eviction_policy": "arc",
            "disk_path": str(tmp_path / "disk"),
            "disk_bytes": "64MiB",
            "disk_io": "threads",
        }


@pytest.mark.slow
class TestSimpleCPU(ConnectorConformance):
    connector = "simple_cpu"
    is_variant = True
    num_seeds = 1

    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"cpu_bytes_to_use": "1MiB"}


@pytest.mark.long
class TestSimpleCPUWithEveryFault(TestSimpleCPU):
    is_variant = False


@pytest.mark.slow
class TestMulti(ConnectorConformance):
    connector = "multi"
    is_variant = True
    num_seeds = 1

    def options(self, tmp_path: Path) -> dict[str, Any]:
        small = {"connector": "simple_cpu", "options": {"cpu_bytes_to_use": "200KiB"}}
        files = {"connector": "example", "options": {"path": str(tmp_path / "kv")}}
        return {"connectors": [small, files]}


@pytest.mark.long
class TestMultiWithEveryFault(TestMulti):
    is_variant = False
