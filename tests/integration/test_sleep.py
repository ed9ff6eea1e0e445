"""Engines that sleep: real processes, with streams in flight."""

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.integration.test_admin import ADMIN_KEY, lines, ready
from tests.integration.test_process_life import assert_same, open_stream, rest_of

NUM_TOKENS = 1000
ASLEEP = "put to sleep"


@pytest.fixture
def start(start_deployment: StartDeployment, tmp_path: Path) -> Any:
    key_file = tmp_path / "admin-key"
    key_file.write_text(f"{ADMIN_KEY}\n")
    key_file.chmod(0o600)

    def start(*flags: str) -> Deployment:
        deployment = start_deployment(
            *("--dtype", "float32", "--admin-key-file", str(key_file), "--max-restarts", "3"),
            *flags,
        )
        return deployment.wait_until_ready()

    return start


def post(deployment: Deployment, path: str, *, method: str = "POST") -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{deployment.url}{path}", method=method, headers={"authorization": f"Bearer {ADMIN_KEY}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=2 * PATIENCE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture
def running(start: Any) -> Deployment:
    """One engine that keeps KV in host memory, too."""
    return start(
        *("--kv-connector", "offloading"),
        *("--kv-connector-config", '{"cpu_bytes_to_use": "16MiB"}'),
    )


def kv_bytes(deployment: Deployment) -> int:
    """The memory of the worker's KV cache, which the supervisor holds open."""
    files = Path(f"/proc/{deployment.members['worker-0'].pid}/fd").iterdir()
    (size_bytes,) = {file.stat().st_size for file in files if "longshore-kv-" in os.readlink(file)}
    return size_bytes


def worker_state(deployment: Deployment) -> str:
    return lines(deployment, "status")["worker 0"]


@pytest.mark.slow
def test_streams_and_waiting_requests_go_on_after_a_sleep_with_the_same_tokens(
    running: Deployment,
) -> None:
    calm = rest_of(open_stream(running, NUM_TOKENS), NUM_TOKENS)
    size_bytes = kv_bytes(running)
    assert size_bytes > 0
    streams = [open_stream(running, NUM_TOKENS) for _ in range(3)]
    code, answer = post(running, "/sleep?level=1&mode=keep")
    assert code == 200, answer
    assert answer["results"][0]["message"] == f"{ASLEEP}; 0 requests run, 3 wait"
    assert worker_state(running) == "asleep"
    assert kv_bytes(running) == 0
    assert lines(running, "sleep")["scheduler"].startswith(ASLEEP), "it sleeps already"
    code, reason = ready(running)
    assert code == 503
    assert reason == f"the engine is {ASLEEP}; requests wait\n"
    with urllib.request.urlopen(f"{running.url}/health", timeout=PATIENCE_S) as response:
        assert response.status == 200
    assert post(running, "/is_sleeping", method="GET") == (200, {"is_sleeping": True})

    code, answer = post(running, "/wake_up")
    assert (code, answer["ok"]) == (200, True), answer
    assert worker_state(running) == "ready"
    assert kv_bytes(running) == size_bytes
    for stream in streams:
        assert_same(rest_of(stream, NUM_TOKENS), calm)
    assert lines(running, "wake")["scheduler"].startswith("admits requests"), "it is awake already"
    assert post(running, "/is_sleeping", method="GET") == (200, {"is_sleeping": False})
    assert_same(rest_of(open_stream(running, NUM_TOKENS), NUM_TOKENS), calm)
    wait_until(lambda: ready(running)[0] == 200)
    lines(running, "sleep")
    assert running.stop() == 0, running.output
    running.assert_nothing_is_left()
    assert "Traceback" not in running.output


SHARDS = ("--tensor-parallel-size", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "num_tokens"),
    [
        pytest.param((), NUM_TOKENS, id="alone", marks=pytest.mark.long),
        pytest.param(SHARDS, 300, id="shards"),
    ],
)
def test_an_engine_whose_processes_die_while_it_sleeps_goes_on_sleeping(
    start: Any, flags: tuple[str, ...], num_tokens: int
) -> None:
    running = start(*flags)
    calm = rest_of(open_stream(running, num_tokens), num_tokens)
    stream = open_stream(running, num_tokens)
    assert post(running, "/sleep?mode=keep")[0] == 200
    for victim in ("worker-0", "scheduler"):
        running.members[victim].kill()
        log = f"restart after the death of {victim}"
        wait_until(lambda: is_asleep_again(running, running.members[victim].pid), 3 * PATIENCE_S)  # noqa: B023
        running.find_members()
        assert post(running, "/is_sleeping", method="GET") == (200, {"is_sleeping": True}), log
    assert post(running, "/wake_up")[0] == 200
    assert_same(rest_of(stream, num_tokens), calm)
    assert running.stop() == 0, running.output


def is_asleep_again(deployment: Deployment, killed_pid: int) -> bool:
    """All processes are others than the killed one, and ready or asleep."""
    code, answer = post(deployment, "/admin/status", method="GET")
    pids = [each["values"].get("pid") for each in answer["results"]]
    return code == 200 and killed_pid not in pids
