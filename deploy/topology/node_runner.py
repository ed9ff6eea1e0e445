"""Runs `longshore node` on its host, and restarts it when it ends. A launcher starts one per node;
it gets the path of the topology file, and never a key.
"""

import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from longshore.protocol.model_files import read_bytes

logger = logging.getLogger(__name__)

FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 30.0
STEADY_S: Final = 60.0
"""A process that has run for this time is restarted without a longer wait."""
_ANNOUNCED: Final = "longshore: "


class NodeStatus(NamedTuple):
    """announced: what the command has printed for its user, since the runner was made.
    problem: why it does not run; None if it runs. num_starts: of the command."""

    num_starts: int
    announced: tuple[str, ...]
    problem: str | None


def node_command(topology: str, name: str) -> list[str]:
    """What is run."""
    program = [sys.executable, "-P", "-m", "longshore.deploy"]
    return [*program, "node", "--topology", topology, "--name", name]


class NodeRunner:
    """topology: path of the file on this host; digest: SHA-256 that it must have.
    command: that is run; None: `longshore node`."""

    def __init__(
        self, topology: str, name: str, digest: str, command: Sequence[str] | None = None
    ) -> None:
        self._topology, self._digest = Path(topology), digest
        self._command = list(command or node_command(topology, name))
        self._lock = threading.Lock()
        self._announced: deque[str] = deque(maxlen=100)
        self._last_lines: deque[str] = deque(maxlen=3)
        self._problem: str | None = "it is starting"
        self._num_starts = 0
        self._process: subprocess.Popen[str] | None = None
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"node {name}", daemon=True)
        self._thread.start()

    def status(self) -> NodeStatus:
        with self._lock:
            return NodeStatus(self._num_starts, tuple(self._announced), self._problem)

    def stop(self, timeout_s: float) -> bool:
        """Let the command drain and end. False if it had to be killed after `timeout_s`."""
        self._is_stopping.set()
        with self._lock:
            process = self._process
            if process is not None:
                process.terminate()
        self._thread.join(timeout_s)
        if process is not None and process.poll() is None:
            process.kill()
            return False
        return True

    def _run(self) -> None:
        wait_s = FIRST_WAIT_S
        while not self._is_stopping.is_set():
            begin_s = time.monotonic()
            problem = self._wrong_file() or self._run_once()
            if time.monotonic() - begin_s >= STEADY_S:
                wait_s = FIRST_WAIT_S
            if not self._is_stopping.is_set():
                logger.warning("%s; restarting in %g s", problem, wait_s)
            with self._lock:
                self._problem = f"{problem}; restarting in {wait_s:g} s"
            self._is_stopping.wait(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _wrong_file(self) -> str | None:
        try:
            digest = hashlib.sha256(read_bytes(self._topology)).hexdigest()
        except OSError as error:
            return f"the topology {self._topology} cannot be read on this node: {error.strerror}"
        if digest != self._digest:
            return f"the topology {self._topology} on this node differs from that of the launcher"
        return None

    def _run_once(self) -> str:
        """Run the command until it ends; returns how."""
        wrapper = [sys.executable, "-P", "-m", "longshore.deploy.topology.with_parent"]
        with self._lock:
            if self._is_stopping.is_set():
                return "it was stopped"
            # The kernel watches the thread that starts it, so this thread waits for it, too.
            self._process = process = subprocess.Popen(
                [*wrapper, str(os.getpid()), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            self._num_starts += 1
            self._problem = None
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                print(line, end="", flush=True)
                text = line.rstrip()
                with self._lock:
                    self._last_lines.append(text)
                    if text.startswith(_ANNOUNCED):
                        self._announced.append(text.removeprefix(_ANNOUNCED))
        status = process.wait()
        how = f"exit status {status}" if status >= 0 else f"signal {-status}"
        return f"`longshore node` has ended ({how}): {' / '.join(self._last_lines)}"
