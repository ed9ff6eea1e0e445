"""Signals to real processes that are neither SIGTERM nor SIGKILL."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.integration.test_process_life import open_stream, rest_of

IN_TERMINAL = """
import os, sys
os.setsid()
terminal = os.open(sys.argv[1], os.O_RDWR)  # the first one that a session opens controls it
for descriptor in range(3):
    os.dup2(terminal, descriptor)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs the command ARGV[2:] as the leader of a session in the terminal ARGV[1]."""

COPY = """
import os, sys
while text := os.read(int(sys.argv[1]), 65536):
    os.write(1, text)
"""
"""Prints what is written to the terminal whose other end is ARGV[1]."""


@contextmanager
def terminal(shown: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A terminal: its path, and the process that shows it in the file. It is closed when that
    ends."""
    other_end, inner = os.openpty()
    with shown.open("wb") as file:
        window = subprocess.Popen(
            [sys.executable, "-c", COPY, str(other_end)], stdout=file, pass_fds=[other_end]
        )
    os.close(other_end)
    try:
        yield os.ttyname(inner), window
    finally:
        window.kill()
        window.wait()
        os.close(inner)


def still_serves(deployment: Deployment) -> bool:
    return bool(rest_of(open_stream(deployment, 200), 200))


def test_sighup_to_all_processes_lets_a_live_stream_finish(
    start_deployment: StartDeployment,
) -> None:
    """Twice, as the shell and the kernel may send one each."""
    deployment = start_deployment().wait_until_ready()
    stream = open_stream(deployment, 400)
    for _ in range(2):
        for process in deployment.members.values():
            process.send_signal(signal.SIGHUP)
        wait_until(lambda: "stopping (SIGHUP): running requests have" in deployment.output)
    assert rest_of(stream, 400)
    assert deployment.process.wait(timeout=PATIENCE_S) == 0, deployment.output
    assert "Restarting" not in deployment.output
    deployment.assert_nothing_is_left()


def test_streams_finish_when_the_terminal_is_closed(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    shown = tmp_path / "shown"
    with terminal(shown) as (path, window):
        deployment = start_deployment(prefix=[sys.executable, "-c", IN_TERMINAL, path], shown=shown)
        stream = open_stream(deployment.wait_until_ready(), 400)
        window.kill()
        assert rest_of(stream, 400)
        assert deployment.process.wait(timeout=PATIENCE_S) == 0
    deployment.assert_nothing_is_left()


@pytest.mark.slow
def test_a_server_that_was_started_with_nohup_goes_on_after_sighup(
    start_deployment: StartDeployment,
) -> None:
    deployment = start_deployment(prefix=["nohup"]).wait_until_ready()
    for process in deployment.members.values():
        process.send_signal(signal.SIGHUP)
    assert still_serves(deployment)
    assert deployment.stop() == 0, deployment.output
    deployment.assert_nothing_is_left()


@pytest.mark.slow
def test_signals_without_a_meaning_change_nothing(deployment: Deployment) -> None:
    for process in deployment.members.values():
        for number in (signal.SIGUSR2, signal.SIGPIPE, signal.SIGHUP):
            if (process, number) != (deployment.process, signal.SIGHUP):
                process.send_signal(number)
    deployment.process.send_signal(signal.SIGUSR1)
    assert still_serves(deployment)
    assert "Restarting" not in deployment.output
    assert all(process.is_running() for process in deployment.members.values())


@pytest.mark.slow
def test_sighup_during_the_start_stops_it(start_deployment: StartDeployment) -> None:
    deployment = start_deployment()
    wait_until(lambda: len(deployment.process.children()) >= 3)
    for process in (deployment.process, *deployment.process.children()):
        process.send_signal(signal.SIGHUP)
    assert deployment.process.wait(timeout=PATIENCE_S) == 0, deployment.output
    assert "stopped by SIGHUP before startup was complete" in deployment.output
    wait_until(lambda: deployment.runtime_dirs == [])
