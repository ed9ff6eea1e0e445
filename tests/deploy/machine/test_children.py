"""Imports in child processes: each has a result, no matter what the library does."""

import contextlib
import sys
from pathlib import Path

import psutil

from longshore.deploy.machine.children import probe_command, run_all
from longshore.deploy.machine.probe import MARK


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_each_way_to_fail_is_told_apart() -> None:
    outcomes = run_all(
        {
            "good": python(f"print('noise'); print('{MARK}{{\"cuda\": null}}'); print('more')"),
            "bad": python(f'print(\'{MARK}{{"failure": "ImportError: libx.so"}}\'); exit(1)'),
            "crash": python("import os; print('last words', flush=True); os.abort()"),
            "own signal": python("import os; os.kill(os.getpid(), 40)"),
            "exit": python("exit('no licence')"),
            "silent": python("exit(3)"),
            "nothing": probe_command("no such probe"),
        },
        timeout_s=60.0,
    )
    assert outcomes["good"].failure is None
    assert outcomes["good"].facts == {"cuda": None}
    assert outcomes["bad"].failure == "ImportError: libx.so"
    assert outcomes["crash"].failure == "its import crashes (SIGABRT): last words"
    assert outcomes["own signal"].failure == "its import crashes (signal 40): no output"
    assert outcomes["exit"].failure == "its import ends the process (exit status 1): no licence"
    assert "no output" in (outcomes["silent"].failure or "")
    assert "KeyError" in (outcomes["nothing"].failure or "")


HANGS = """
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
child.wait()
"""


def test_one_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    outcome = run_all({"hang": [*python(HANGS), str(note)]}, timeout_s=3.0)["hang"]
    assert outcome.failure == "its import hangs (longer than 3 s)"
    if note.exists():
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(note.read_text())).wait(timeout=60)


def test_torch_can_be_probed() -> None:
    outcome = run_all({"torch": probe_command("torch")})["torch"]
    assert outcome.failure is None
    assert {"cuda", "driver_cuda", "devices"} == outcome.facts.keys()
