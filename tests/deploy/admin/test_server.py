"""The admin socket of a supervisor with real child processes."""

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.admin import operations as operations_module
from longshore.deploy.admin.actions import ACTION_NAMES, Drain, Restart, SetLevel, Status
from longshore.deploy.admin.client import AdminFailed, deployments, find_socket, perform
from longshore.deploy.admin.operations import Operations
from longshore.deploy.admin.server import MAX_ACTIONS, AdminServer
from longshore.deploy.supervisor.engine_set import EngineSet
from longshore.deploy.supervisor.replica import replicas
from longshore.protocol.errors import ConfigError
from tests.deploy.supervisor.test_orders import WAIT_S, Running, running


@pytest.fixture
def run() -> Iterator[Running]:
    with running() as run:
        yield run


@pytest.fixture
def server(run: Running, tmp_path: Path) -> Iterator[AdminServer]:
    operations = Operations(
        run.supervisor,
        EngineSet(replicas(("unified",) * 2)),
        stop=run.stop_signal.request,
        state_dir=tmp_path,
        drain_timeout_s=1.0,
        start_timeout_s=WAIT_S,
    )
    with AdminServer(run.supervisor.runtime_dir, operations) as server:
        yield server


def ask(path: Path, line: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(str(path))
        with contextlib.suppress(
            BrokenPipeError
        ):  # it does not read all of a line that is too long
            connection.sendall(line)
        with connection.makefile("rb") as answer:
            decoded: dict[str, Any] = json.loads(answer.readline())
    return decoded


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"{}\n",
        b'{"action": "explode"}\n',
        b'{"action": "pause", "mode": "never"}\n',
        b'{"action": "pause", "timeout_s": 1e9}\n',
        b'{"action": "profile", "duration_s": 0}\n',
        b'{"action": "status", "engine": "0"}\n',
        b'{"action": "status", "other": 0}\n',
        b"x" * 100_000,
        b'{"action": "%b"}\n' % (b"x" * 10_000),
    ],
)
def test_what_is_no_action_is_answered_with_the_actions(server: AdminServer, line: bytes) -> None:
    answer = ask(server.path, line)
    assert not answer["ok"]
    assert len(answer["error"]) <= 1000
    assert all(name in answer["error"] for name in ACTION_NAMES)


def test_a_process_that_hangs_is_named(
    server: AdminServer, run: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations_module, "ANSWER_TIMEOUT_S", 0.1)
    run.freeze("worker 1")
    with perform(server.path, SetLevel(level="info", process="worker 1")) as (answer, _):
        assert [result.message for result in answer.results] == [
            "no answer within 0.1 s: the process hangs or is stopped"
        ]
        assert not answer.ok


def test_an_engine_that_cannot_be_drained_is_restarted_all_the_same(
    server: AdminServer, run: Running
) -> None:
    """The children of this test know no engine."""
    before = run.pids
    with perform(server.path, Restart(engine=1)) as (answer, _):
        (result,) = answer.results
        assert answer.ok
        assert "its requests did not finish before" in result.message
    assert {name for name, pid in run.pids.items() if pid != before[name]} == {
        "worker 1",
        "scheduler 1",
    }


@pytest.mark.slow
def test_the_connection_of_a_drain_ends_with_its_client(server: AdminServer, run: Running) -> None:
    with perform(server.path, Drain()) as (answer, _):
        assert answer.ok
        assert run.stop_signal.is_set()
    with perform(server.path, Status()) as (answer, _):  # as long as the deployment stops
        assert len(answer.results) == 5  # two engines and three processes


def test_too_many_actions_at_once_are_refused(server: AdminServer) -> None:
    slots = server._server.slots
    num_taken = 0
    while slots.acquire(blocking=False):
        num_taken += 1
    assert num_taken == MAX_ACTIONS
    answer = ask(server.path, b'{"action": "status"}\n')
    assert answer["error"] == "32 actions are under way; wait"
    slots.release()
    assert ask(server.path, b'{"action": "status"}\n')["error"] is None


def test_a_client_without_a_server_says_what_is_missing(tmp_path: Path) -> None:
    with (
        pytest.raises(AdminFailed, match="Is `longshore serve` still running"),
        perform(tmp_path / "admin.sock", Status()),
    ):
        pass


def test_the_only_deployment_is_found(
    server: AdminServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other_folder := tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(other_folder))
    with pytest.raises(ConfigError, match="no deployment of this user"):
        find_socket()
    (other_folder / "longshore-1").symlink_to(server.path.parent)
    (other_folder / "longshore-2").mkdir()
    with socket.socket(socket.AF_UNIX) as ended:  # nobody listens
        ended.bind(str(other_folder / "longshore-2" / "admin.sock"))
        assert find_socket() == other_folder / "longshore-1" / "admin.sock"
        ended.listen()
        with pytest.raises(ConfigError, match=r"2 deployments are running.*--url.*longshore-1"):
            find_socket()
        (other_folder / "longshore-2" / "url.txt").write_text("http://127.0.0.1:8001")
        for url in ("http://127.0.0.1:8001", "http://localhost:8001/v1", "127.0.0.1:8001"):
            assert find_socket(url) == other_folder / "longshore-2" / "admin.sock"
        with pytest.raises(ConfigError, match=r"at http://a:1; select one of: .*:8001 \("):
            find_socket("http://a:1")
        assert list(deployments().values()) == ["no URL", "http://127.0.0.1:8001"]
        if os.geteuid() == 0:  # a link of another user to a folder of this one
            os.chown(other_folder / "longshore-1", 12345, 12345, follow_symlinks=False)
            assert find_socket() == other_folder / "longshore-2" / "admin.sock"
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(ConfigError, match="no deployment of this user"):
            find_socket()
