"""`longshore serve` with the lmcache connector and the real LMCache: files and a Redis server."""

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.integration.deployment import Deployment, wait_until
from tests.integration.test_offloading import LONG, ask, num_hit_tokens, stop

pytestmark = [pytest.mark.services, pytest.mark.req("CRG-04")]

NUM_BLOCKS = 60


def flags(state: Path, adapter: dict[str, Any]) -> list[str]:
    options = {"cpu_bytes_to_use": "64MiB", "l2_adapters": [adapter]}
    return [
        *("--kv-connector", "lmcache", "--kv-connector-config", json.dumps(options)),
        *("--state-dir", str(state)),
    ]


def start(folder: Path, *flags: str) -> Deployment:
    return Deployment(DEMO_MODEL_DIR, folder, *flags, num_blocks=NUM_BLOCKS).wait_until_ready()


def test_a_long_prompt_comes_back_from_files_also_after_a_restart(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kv = tmp_path / "kv"
    of_engine = flags(tmp_path / "state", {"type": "fs", "base_path": str(kv)})
    with start(tmp_path_factory.mktemp("own"), *of_engine) as first:
        answer, num_cached = ask(first, LONG)
        assert num_cached == num_hit_tokens(first) == 0
        for number in range(4):  # they evict it from the device
            ask(first, f"{number}: " + LONG[::-1])
        again, num_cached = ask(first, LONG)
        assert again == answer
        assert num_cached > 0
        wait_until(lambda: num_hit_tokens(first) > 0)
        stop(first)
    assert list(kv.glob("*.data"))

    with start(tmp_path_factory.mktemp("own"), *of_engine) as second:
        again, num_cached = ask(second, LONG)
        assert again == answer
        assert num_cached > 0
        wait_until(lambda: num_hit_tokens(second) >= num_cached)
        stop(second)

    of_engine[of_engine.index("--state-dir") + 1] = str(tmp_path / "another state")
    with start(tmp_path_factory.mktemp("own"), *of_engine) as third:
        assert ask(third, LONG) == (answer, 0)  # other hash seed, other keys
        stop(third)


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        wait_until(lambda: listens(port))
        yield port
        server.terminate()


def test_two_engines_share_a_redis_server(
    redis_port: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    adapter = {"type": "resp", "host": "127.0.0.1", "port": redis_port}
    of_engine = flags(tmp_path / "state", adapter)
    with start(tmp_path_factory.mktemp("own"), *of_engine) as first:
        answer, _ = ask(first, LONG)
        stop(first)
    with start(tmp_path_factory.mktemp("own"), *of_engine) as second:
        again, num_cached = ask(second, LONG)
        assert again == answer
        assert num_cached > 0
        stop(second)
