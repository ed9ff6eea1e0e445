"""The remote tiers of `offloading` pass the conformance suite."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from longshore.testing.connectors import ConnectorConformance
from tests.connectors.offloading.remote.servers import (
    RedisServer,
    RemoteServer,
    S3Server,
    SharedFolder,
)


class OffloadingToRemote(ConnectorConformance):
    """Host memory is so small that many blocks are only in the remote store."""

    connector = "offloading"
    is_variant = True
    num_seeds = 1
    survives_restart = True
    server: ClassVar[RemoteServer]

    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {
            "cpu_bytes_to_use": "200KiB",
            "verify_kv": "always",
            "remote_url": self.server.url,
            "remote_options": self.server.options,
            "remote_negative_ttl_s": 0.01,
            "remote_timeout_ms": 20_000,
        }


@pytest.mark.slow
@pytest.mark.services
class TestOffloadingToRedis(OffloadingToRemote):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def start(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with RedisServer(tmp_path_factory.mktemp("r")) as cls.server:
            yield


@pytest.mark.long
class TestOffloadingToS3(OffloadingToRemote):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def start(cls) -> Iterator[None]:
        with S3Server() as cls.server:
            yield


@pytest.mark.slow
class TestOffloadingToDiskAndRemote(OffloadingToRemote):
    """The remote store is a folder."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def start(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.server = SharedFolder(tmp_path_factory.mktemp("shared"))

    def options(self, tmp_path: Path) -> dict[str, Any]:
        disk = {"disk_path": str(tmp_path / "disk"), "disk_bytes": "400KiB", "disk_io": "threads"}
        return super().options(tmp_path) | disk
