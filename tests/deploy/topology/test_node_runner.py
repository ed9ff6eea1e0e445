"""The runner that a launcher starts on each node; its command is a script here."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from longshore.deploy.topology.node_runner import NodeRunner, node_command
from tests.integration.deployment import wait_until


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    path = tmp_path / "topology.toml"
    path.write_text("nodes")
    return path


def runner(topology: Path, script: str) -> NodeRunner:
    digest = hashlib.sha256(b"nodes").hexdigest()
    return NodeRunner(str(topology), "a", digest, [sys.executable, "-c", script])


def test_the_command_is_longshore_node() -> None:
    assert node_command("t.toml", "a")[-5:] == ["node", "--topology", "t.toml", "--name", "a"]


def test_a_command_that_ends_is_restarted_and_its_messages_are_passed_on(topology: Path) -> None:
    tested = runner(topology, "import sys; print('longshore: ready at x'); sys.exit(3)")
    wait_until(lambda: tested.status().announced[:2] == ("ready at x", "ready at x"))
    assert tested.status().num_starts >= 2
    wait_until(lambda: "exit status 3" in (tested.status().problem or ""))
    assert tested.stop(10)


def test_stop_lets_the_command_end_and_a_deaf_one_is_killed(topology: Path) -> None:
    script = "print('longshore: up', flush=True); import time; time.sleep(600)"
    tested = runner(topology, script)
    wait_until(lambda: tested.status().announced == ("up",))
    assert tested.status().problem is None
    assert tested.stop(60)
    deaf = runner(topology, f"import signal; signal.signal(15, signal.SIG_IGN); {script}")
    wait_until(lambda: deaf.status().announced == ("up",))
    assert not deaf.stop(0.5)


def test_another_file_on_the_node_is_not_started(topology: Path) -> None:
    topology.write_text("others")
    tested = runner(topology, "raise SystemExit")
    wait_until(lambda: "differs from that of the launcher" in (tested.status().problem or ""))
    assert tested.status().num_starts == 0
    assert tested.stop(10)


def test_the_command_ends_when_its_runner_is_killed(tmp_path: Path) -> None:
    """As the actors of a node do when its raylet dies."""
    script = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(15, lambda *_: sys.exit(0))\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()) + ' ')\n"
        "time.sleep(600)\n"
    )
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    code = (
        "import sys, time\n"
        "from longshore.deploy.topology.node_runner import NodeRunner\n"
        f"NodeRunner({__file__!r}, 'a', {digest!r}, [sys.executable, '-c', {script!r}])\n"
        "time.sleep(600)\n"
    )
    actor = subprocess.Popen([sys.executable, "-c", code], env=os.environ)
    try:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        wait_until(lambda: (tmp_path / "pid").read_text().endswith(" "))
        command = psutil.Process(int((tmp_path / "pid").read_text()))
        time.sleep(0.1)
    finally:
        actor.send_signal(signal.SIGKILL)
        actor.wait()
    command.wait(timeout=60)
