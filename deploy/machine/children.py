"""Imports libraries in child processes, in parallel and with a timeout."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from longshore.deploy.machine.probe import MARK
from longshore.deploy.supervisor.process import signal_name

PROBE_TIMEOUT_S: Final = 60.0
MAX_REASON_CHARACTERS: Final = 300


@dataclass(frozen=True)
class ProbeResult:
    """The outcome of one import. failure: why there are no facts, including a crash or a hang; None
    if there are."""

    facts: Mapping[str, Any]
    failure: str | None = None


def probe_command(name: str) -> list[str]:
    return [sys.executable, "-P", "-m", "longshore.deploy.machine.probe", name]


def run_all(
    commands: Mapping[str, Sequence[str]], timeout_s: float = PROBE_TIMEOUT_S
) -> dict[str, ProbeResult]:
    """What each command prints after `MARK`. All their processes have ended on return."""
    started = []
    deadline_s = time.monotonic() + timeout_s
    for name, command in commands.items():
        # Not a pipe, which could fill up, nor a file, since the disk may be full.
        output = os.fdopen(os.memfd_create(f"output of {name}"), "w+b")
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        started.append((name, child, output))
    outcomes = {}
    for name, child, output in started:
        with output:
            try:
                status: int | None = child.wait(max(deadline_s - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                status = None
            _kill_group(child)
            output.seek(0)
            text = output.read().decode(errors="replace")
        outcomes[name] = _outcome(status, text, timeout_s)
    return outcomes


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and its own children, if any are left."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        child.wait()


def _outcome(status: int | None, text: str, timeout_s: float) -> ProbeResult:
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "no output"
    if status is None:
        return ProbeResult({}, f"its import hangs (longer than {timeout_s:g} s)")
    if status < 0:
        return ProbeResult({}, f"its import crashes ({signal_name(-status)}): {_cut(last)}")
    for line in lines:
        if line.startswith(MARK):
            facts = json.loads(line.removeprefix(MARK))
            failure = facts.get("failure")
            return ProbeResult({}, _cut(failure)) if failure else ProbeResult(facts)
    return ProbeResult({}, f"its import ends the process (exit status {status}): {_cut(last)}")


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_REASON_CHARACTERS else f"{line[:MAX_REASON_CHARACTERS]}..."
