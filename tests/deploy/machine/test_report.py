"""`longshore doctor --machine` as a whole, on this machine and as a table."""

import io
import socket
import subprocess
import sys

import msgspec
import pytest
import torch
from rich.console import Console

from longshore.deploy.machine.finding import Finding, summary, table
from longshore.protocol.install_command import install_command
from longshore.worker.kernels.native import native


def doctor(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "longshore.deploy", "doctor", "--machine", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_findings_are_those_of_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run = doctor("--json", "--engine", f"http://127.0.0.1:{port}")
    found = msgspec.json.decode(run.stdout, type=list[Finding])
    by_name = {finding.what: finding for finding in found}
    assert by_name[f"port {port}"].state == "warning"
    assert "--port" in by_name[f"port {port}"].fix
    assert by_name["torch"].found == torch.__version__
    assert (by_name["CPU kernels"].state == "ok") == (native() is not None)
    assert by_name["extra audio"].state == "ok"  # the tests need it
    states = [finding.state for finding in found]
    assert run.returncode == int("problem" in states), run.stdout + run.stderr
    assert all(each.fix for each in found if each.state in ("warning", "problem"))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(found))
    shown = console.export_text()
    assert "CPU kernels" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_a_command_to_type_stands_whole_on_a_line_of_its_own() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    advice = f"{install_command('lmcache')} --force-reinstall"
    long = "a reason that goes on for a while, until the line is quite full, and then some more"
    console.print(table([Finding("extra lmcache", long, "warning", long, advice[:45])]))
    assert f"→ {advice[:45]}" in console.export_text()


def test_the_last_line_counts() -> None:
    ok, bad = Finding("a", "b"), Finding("c", "d", "problem")
    assert summary([ok, Finding("e", "f", "absent")]) == "No problems found."
    assert summary([ok, bad, bad]).startswith("Problems: 2.")
