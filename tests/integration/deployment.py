"""A real deployment, started from the command line as an operator would."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from tests.integration.forks import FORK_SERVER, template

# How long a test waits for what should come at once; other tests may use the processors.
PATIENCE_S: Final = 60.0
# The smallest pool that works, because it starts fast and the tests share the machine.
SETTINGS: Final = ["--max-num-seqs", "32", "--threads", "1"]
# Tests stop processes and wait for what others notice; a flag overrides it.
NEVER_HANGS: Final = {"LONGSHORE_HANG_TIMEOUT_S": "0"}


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait until the condition is true; fail after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


class Deployment:
    """`longshore serve MODEL` on a free port, with its own temporary directory.

    num_blocks:  None lets the server choose by its memory.
    environment: variables in addition to the inherited ones.
    program:     module that is run.
    prefix:      command that runs it in its own place, such as `nohup`.
    shown:       file with what is printed, if `prefix` redirects that.
    is_forked:   fork the processes, if they are then like new interpreters.
    output:  everything that it has printed.
    members: its processes by name: supervisor, gateway, scheduler, worker-0 and so on.
    fork_server: the process that forks its workers, when it has been found.
    """

    def __init__(
        self,
        model_dir: Path,
        tmp_dir: Path,
        *arguments: str,
        port: int = 0,
        num_blocks: int | None = 600,
        environment: Mapping[str, str] = {},
        program: str = "longshore.deploy",
        prefix: Sequence[str] = (),
        shown: Path | None = None,
        is_forked: bool = True,
    ) -> None:
        self.tmp_dir = tmp_dir
        printed = tmp_dir / "output.txt"
        self._output_file = printed if shown is None else shown
        command = [program, "serve", str(model_dir), "--port", str(port), *SETTINGS, *arguments]
        if num_blocks is not None:
            command += ["--num-blocks", str(num_blocks)]
        variables = {**os.environ, "TMPDIR": str(tmp_dir), **NEVER_HANGS, **environment}
        with printed.open("wb") as output:
            if is_forked and not prefix:
                self.process = template().start(command, variables, output)
            else:
                self.process = psutil.Popen(
                    [*prefix, sys.executable, "-m", *command],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=variables,
                )
        self.members: dict[str, psutil.Process] = {}
        self.fork_server: psutil.Process | None = None
        self.url = ""

    def wait_until_ready(self) -> "Deployment":
        wait_until(self._is_ready_or_ended)
        match = re.search(r"ready at (\S+)", self.output)
        assert match is not None, self.output
        self.url = match[1]
        self.find_members()
        return self

    def find_members(self) -> None:
        """Look at the processes again, after one has been restarted."""
        self.members = {"supervisor": self.process}
        for child in self.process.children():
            # One that has just ended, or is about to run its program, has no command line.
            with contextlib.suppress(psutil.Error, IndexError):
                command = child.cmdline()
                if FORK_SERVER in command:
                    self.fork_server = child
                else:
                    self.members[Path(command[-1]).stem] = child

    def _is_ready_or_ended(self) -> bool:
        return "ready at" in self.output or self.process.poll() is not None

    @property
    def output(self) -> str:
        return self._output_file.read_text()

    @property
    def runtime_dirs(self) -> list[Path]:
        return list(self.tmp_dir.glob("longshore-*"))

    def assert_nothing_is_left(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until every process has ended and the runtime directory is gone; fail after
        `timeout_s`."""
        processes = [*self.members.values(), *filter(None, [self.fork_server])]
        _, alive = psutil.wait_procs(processes, timeout=timeout_s)
        assert alive == []
        wait_until(lambda: self.runtime_dirs == [])

    def stop(self) -> int:
        """Send SIGTERM, and return the exit status."""
        self.process.terminate()
        return int(self.process.wait(timeout=PATIENCE_S))

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(self, *_: object) -> None:
        family = [self.process, *self.members.values()]
        for process in family:
            if process.is_running():
                process.kill()
        self.process.wait(timeout=PATIENCE_S)
