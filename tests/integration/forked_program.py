"""`forked_program PROGRAM ARGUMENT...`, run in a fork of a process that has imported much: becomes
`python -m PROGRAM ARGUMENT...`, or `python PROGRAM ARGUMENT...` if it is a file. The processes that
a supervisor in it starts are forks as well.

Their start is most of what tests with real processes cost.
"""

import atexit
import ctypes
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final, NoReturn

from longshore.deploy.supervisor import fork_server
from longshore.protocol.transport.fork_requests import socket_pair
from longshore.protocol.transport.lifeline import SERVICE_SIGNALS
from longshore.worker.process.command_line import show_command_line
from longshore.worker.process.fork_server import serve

PR_SET_PDEATHSIG: Final = 1
FORKED: Final = ("longshore.deploy.gateway", "longshore.scheduler", "longshore.worker")


class Child:
    """A forked child, with what `ForkServer` uses of `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid, self.stdout = pid, stdout
        self._has_ended = False

    def kill(self) -> None:
        if not self._has_ended:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if not self._has_ended:
            os.waitpid(self.pid, 0)
            self._has_ended = True


class Copy(fork_server.ForkServer):
    """A fork server that need not import anything, for it is a fork of this process."""

    modules: Sequence[str] = FORKED

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.ready_s, self.is_unfit = None, False
        self._control, other_end = socket_pair()
        self._control.setblocking(False)
        reader, writer = os.pipe()
        with other_end:
            pid = os.fork()
            if pid == 0:
                become_fork_server(other_end, writer, self.environment)
        os.close(writer)
        self._popen = Child(pid, os.fdopen(reader, "rb"))  # type: ignore[assignment]


def become_fork_server(
    control: socket.socket, output: int, environment: Mapping[str, str]
) -> NoReturn:
    """In the new process, and in its forks: run, and exit."""
    os.setsid()
    for number in (1, 2):
        os.dup2(output, number)
    fd = control.fileno()
    os.closerange(3, fd)
    os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    name = fork_server.IMPORTED_MODULE
    show_command_line([sys.executable, "-P", "-m", serve.__module__, str(fd), name])
    run_and_exit(lambda: serve(control, ()))


def run_and_exit(program: Callable[[], object]) -> NoReturn:
    """As the interpreter ends, except that it frees nothing: it would first copy what it frees."""
    status: object = 0
    try:
        program()
    except SystemExit as exit_:
        status = exit_.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status if isinstance(status, int) else status is not None)


def main() -> None:
    # With the template, which ends with the tests, also if they are killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    for number in SERVICE_SIGNALS:  # the fork server has ignored them
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None  # it may have been found with other variables
    del sys.argv[0]
    fork_server.ForkServer = Copy  # type: ignore[misc]
    program = sys.argv[0]
    if program.endswith(".py"):
        show_command_line([sys.executable, *sys.argv])
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        run_and_exit(lambda: runpy.run_path(program, run_name="__main__"))
    show_command_line([sys.executable, "-m", *sys.argv])
    run_and_exit(lambda: runpy.run_module(program, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    main()
