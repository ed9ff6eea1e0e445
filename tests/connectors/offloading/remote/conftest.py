"""The servers, one of each kind per session, emptied for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.connectors.offloading.remote.servers import (
    RedisServer,
    RemoteServer,
    S3Server,
    SharedFolder,
)


@pytest.fixture(scope="session")
def one_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("r")) as server:
        yield server


@pytest.fixture
def redis_server(one_redis: RedisServer) -> RedisServer:
    one_redis.client.flushall()
    return one_redis


@pytest.fixture(scope="session")
def one_s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def s3_server(one_s3: S3Server) -> S3Server:
    for name in one_s3.names():
        one_s3.delete(name)
    return one_s3


@pytest.fixture(
    params=[pytest.param("redis", marks=pytest.mark.services), "s3", "file"],
)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteServer:
    """A server of each kind."""
    if request.param == "file":
        return SharedFolder(tmp_path)
    found: RemoteServer = request.getfixturevalue(f"{request.param}_server")
    return found
