"""Starts `longshore` commands as forks of one process that has imported what they import."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Final

import psutil
import pytest

from longshore.deploy.llm import engine_processes
from longshore.deploy.supervisor.fork_server import (
    NO_BLAS_THREADS,
    VARIABLE_PREFIX,
    ForkServer,
    inherited_environment,
)
from longshore.deploy.supervisor.supervisor import Supervisor
from longshore.protocol.transport.fork_requests import (
    Forked,
    ForkRequest,
    receive_answer,
    send_request,
    socket_pair,
)
from tests.conftest import ROOT
from tests.integration.forked_program import FORKED

MODULES: Final = (
    "longshore.deploy.cli.main",
    "longshore.deploy.cli.node",
    "longshore.deploy.cli.serve",
    "longshore.deploy.gateway.process",
    "longshore.scheduler.process.startup",
    "longshore.worker.process.startup",
)
FORK_SERVER: Final = "longshore.worker.process.fork_server"
# Nothing reads these while it is imported.
LATE: Final = frozenset(
    {
        *("TMPDIR", "XDG_STATE_HOME", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"),
        *("UCX_TLS", "UCX_NET_DEVICES", "UCX_LOG_LEVEL"),
        "PYTHONPATH",  # the template imports from ROOT, too; other paths are compared
    }
)


class Fork(psutil.Process):
    """A child that was forked, with `poll` of `subprocess.Popen`."""

    def poll(self) -> int | None:
        try:
            status: int = self.wait(0)
        except psutil.TimeoutExpired:
            return None
        return status


class Lent(ForkServer):
    """The fork server of a supervisor in this process: the template, which outlives it."""

    modules: Sequence[str] = FORKED

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.environment = {**inherited_environment(), **NO_BLAS_THREADS}
        self.is_unfit, self.ready_s = False, None
        self._pid, self._control = pid, control
        self._output = open(os.devnull, "rb")  # noqa: SIM115  # its reader closes it

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def output(self) -> IO[bytes]:
        return self._output

    def is_alive(self) -> bool:
        return self._control.fileno() >= 0

    def kill(self) -> None:
        self._control.close()


class Template:
    """The process that is copied. It ends with this one."""

    def __init__(self) -> None:
        self._environment = {**os.environ, **NO_BLAS_THREADS}
        self._control, other_end = socket_pair()
        with other_end:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", FORK_SERVER, str(other_end.fileno()), *MODULES],
                stdin=subprocess.DEVNULL,
                pass_fds=[other_end.fileno()],
                env=self._environment,
                cwd=ROOT,  # where `-m` finds `tests`, whatever directory a test is in
                start_new_session=True,
            )

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Whether a copy with these variables is like a new interpreter."""
        own = self._environment
        return (
            import_paths(own) == import_paths(environment)
            and own.keys() - NO_BLAS_THREADS.keys() <= environment.keys() | LATE
            and all(
                own.get(name) == value or name in LATE or name.startswith(VARIABLE_PREFIX)
                for name, value in environment.items()
            )
        )

    def lend(self) -> Lent | None:
        """For a supervisor in this process; None if that needs new interpreters."""
        return Lent(self._popen.pid, self._control.dup()) if self.can_start(os.environ) else None

    def _fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
    ) -> Fork:
        answer, other_end = socket_pair()
        request = ForkRequest(
            (sys.executable, "-m", "tests.integration.forked_program", *arguments),
            {name: environment[name] for name in environment if name not in NO_BLAS_THREADS},
            (),
            tuple(os.sched_getaffinity(0)),
        )
        cwd = os.open(".", os.O_PATH)
        with answer:
            with other_end:
                send_request(self._control, request, [other_end.fileno(), cwd, output.fileno()])
            os.close(cwd)
            forked = receive_answer(answer)
        assert isinstance(forked, Forked), forked
        return Fork(forked.pid)

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
    ) -> "Fork | psutil.Popen":
        """`python -m ARGUMENTS`, or `python ARGUMENTS` if they begin with a file; a fork is in a
        session of its own."""
        if self.can_start(environment):
            return self._fork(arguments, environment, output)
        command = [sys.executable, *(() if arguments[0].endswith(".py") else ("-m",)), *arguments]
        return psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float
    ) -> tuple[int, str]:
        """Exit status and output of a command. Raises psutil.TimeoutExpired, after killing it."""
        with tempfile.TemporaryFile() as output:
            process = self.start(arguments, environment, output)
            try:
                status: int = process.wait(timeout_s)
            except psutil.TimeoutExpired:
                process.kill()
                raise
            output.seek(0)
            return status, output.read().decode()


def import_paths(environment: Mapping[str, str]) -> set[str]:
    return {*environment.get("PYTHONPATH", "").split(os.pathsep)} - {"", str(ROOT)}


_templates: list[Template] = []


def template() -> Template:
    """That of this process, which is started when it is first used."""
    if not _templates:
        _templates.append(Template())
    return _templates[0]


@pytest.fixture(scope="session", autouse=True)
def forked_engines() -> Iterator[None]:
    """Let the processes of `LLM` and `AsyncLLM` be forks, in the folders whose conftest.py imports
    this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine_processes,
            "Supervisor",
            lambda *arguments: Supervisor(*arguments, fork_server=template().lend()),
        )
        yield
