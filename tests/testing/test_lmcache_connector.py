"""The connector `lmcache` passes the conformance suite, with the real library."""

from pathlib import Path
from typing import Any

import pytest

from longshore.testing.connectors import ConnectorConformance


@pytest.mark.services
@pytest.mark.req("CRG-04")
class TestLMCache(ConnectorConformance):
    connector = "lmcache"
    is_variant = True
    num_seeds = 1

    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"cpu_bytes_to_use": "4MiB"}


@pytest.mark.long
class TestLMCacheWithEveryFault(TestLMCache):
    is_variant = False


@pytest.mark.services
@pytest.mark.long
@pytest.mark.req("CRG-04")
class TestLMCacheWithFiles(ConnectorConformance):
    connector = "lmcache"
    is_variant = True
    num_seeds = 1
    survives_restart = True

    def options(self, tmp_path: Path) -> dict[str, Any]:
        files = {"type": "fs", "base_path": str(tmp_path / "kv")}
        return {"cpu_bytes_to_use": "1MiB", "eviction_policy": "ARC", "l2_adapters": [files]}
