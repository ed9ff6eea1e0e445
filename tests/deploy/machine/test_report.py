"""`longshore doctor --machine` as a whole, on this machine and as a table."""

import io
import json
import socket
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from longshore.deploy.machine.finding import Finding, summary, table
from longshore.deploy.machine.report import findings
from longshore.worker.kernels.native import native


def doctor(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "longshore.deploy", "doctor", "--machine", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_findings_are_those_of_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        by_name = {finding.what: finding for finding in findings(port)}
    assert by_name[f"port {port}"].state == "warning"
    assert "--port" in by_name[f"port {port}"].fix
    assert by_name["torch"].found == torch.__version__
    assert (by_name["CPU kernels"].state == "ok") == (native() is not None)
    assert by_name["extra audio"].state == "ok"  # the tests need it


@pytest.mark.slow
def test_the_command_prints_a_table_or_json() -> None:
    run = doctor("--json", "--engine", "http://127.0.0.1:9")
    found = json.loads(run.stdout)
    states = [each["state"] for each in found]
    assert run.returncode == int("problem" in states), run.stdout + run.stderr
    assert set(states) <= {"ok", "absent", "warning", "problem"}
    assert "port 9" in {each["what"] for each in found}
    assert all(each["fix"] for each in found if each["state"] in ("warning", "problem"))
    shown = doctor()
    assert "CPU kernels" in shown.stdout
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())


def test_a_command_to_type_stands_whole_on_a_line_of_its_own() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    advice = "pip install 'longshore[lmcache]' --force-reinstall"
    long = "a reason that goes on for a while, until the line is quite full, and then some more"
    console.print(table([Finding("extra lmcache", long, "warning", long, advice[:45])]))
    assert f"→ {advice[:45]}" in console.export_text()


def test_the_last_line_counts() -> None:
    ok, bad = Finding("a", "b"), Finding("c", "d", "problem")
    assert summary([ok, Finding("e", "f", "absent")]) == "No problems found."
    assert summary([ok, bad, bad]).startswith("Problems: 2.")
