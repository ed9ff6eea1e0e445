"""`longshore doctor --machine`: what it finds is what this machine has."""

import io
import json
import socket
import subprocess
import sys

import torch
from rich.console import Console

from longshore.deploy.machine import Finding, findings, table
from longshore.worker.kernels.native import native


def doctor(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "longshore.deploy", "doctor", "--machine", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_findings_are_those_of_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        by_name = {finding.what: finding for finding in findings(port)}
        assert by_name[f"port {port}"].state == "missing"
        assert "--port" in by_name[f"port {port}"].advice
    assert {f.what: f for f in findings(port)}[f"port {port}"] == Finding(f"port {port}", "free")
    assert by_name["torch"].found == torch.__version__
    assert (by_name["CPU kernels"].state == "good") == (native() is not None)
    assert by_name["extra audio"].state == "good"  # the tests need it
    assert (by_name["GPUs"].found == "none") or torch.version.cuda or by_name["GPUs"].state == "bad"


def test_the_command_prints_a_table_or_json() -> None:
    run = doctor("--json", "--engine", "http://127.0.0.1:9")
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout)
    assert [each["what"] for each in found if each["state"] == "bad"] == []
    assert "port 9" in {each["what"] for each in found}
    assert "CPU kernels" in doctor().stdout


def test_an_extra_is_named_with_its_brackets() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    advice = "pip install 'longshore[audio]'"
    console.print(table([Finding("extra audio", "no soxr", "missing", advice)]))
    assert advice in console.export_text()
