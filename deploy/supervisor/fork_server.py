"""The supervisor's side of fork servers: starts them, and lets them fork workers.

A fork server (`worker/process/fork_server.py`) has imported torch, so a worker that it forks starts
in a tenth of the time. Nothing depends on it: a worker that it does not fork in time is started as
a new interpreter. It is imported before everything else of a command, so it imports little.
"""

import atexit
import contextlib
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from longshore.protocol.transport.fork_requests import (
    Forked,
    ForkRequest,
    NotForked,
    receive_answer,
    send_request,
    socket_pair,
)

logger = logging.getLogger(__name__)

FORKED_MODULE: Final = "longshore.worker"
"""What fork servers start, in the supervisor's own."""

IMPORTED_MODULE: Final = "longshore.worker.process.startup"
"""What they have imported for it."""

FORK_SERVER_MODULE: Final = "longshore.worker.process.fork_server"
"""What a fork server runs."""

NO_BLAS_THREADS: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""For processes that use numpy for bookkeeping only: no thread pool, and no memory for its stacks.
A pool would also be a thread that a fork does not copy."""

VARIABLE_PREFIX: Final = "LONGSHORE_"
"""Prefix of the environment variables that are settings of commands."""

ANSWER_TIMEOUT_S: Final = 5.0
"""A fork server that has imported everything answers within milliseconds."""

IMPORT_TIMEOUT_S: Final = 120.0

LAST_ANSWER_TIMEOUT_S: Final = 1.0

POLL_S: Final = 0.25
"""How often the supervisor looks whether a fork server that does not answer has been stopped."""

_LIMITS: Final = tuple(
    sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
)


def inherited_environment() -> dict[str, str]:
    """The variables that processes inherit. Settings are passed in configuration files, each to the
    process that uses it; API keys, for example, to gateways only."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(VARIABLE_PREFIX)
    }


class ForkServer:
    """A fork server that runs, or has ended.

    environment: its variables, and those of what it forks: some are read while it imports.
    modules:     of the programs that it forks.
    """

    modules: Sequence[str] = (FORKED_MODULE,)

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises OSError."""
        self.environment = dict(environment)
        self._control, other_end = socket_pair()
        with other_end:
            self._popen = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    FORK_SERVER_MODULE,
                    str(other_end.fileno()),
                    IMPORTED_MODULE,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[other_end.fileno()],
                env=self.environment,
                start_new_session=True,
            )
        self._control.setblocking(False)
        self.ready_s: float | None = None
        self.is_unfit = False

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def output(self) -> IO[bytes]:
        """The pipe of what the fork server prints; its reader closes it."""
        assert self._popen.stdout is not None
        return self._popen.stdout

    def fileno(self) -> int:
        """Readable when it is ready, or has ended."""
        return self._control.fileno()

    def is_alive(self) -> bool:
        """Whether it may still fork. Notes, without blocking, that it is ready."""
        if self._control.fileno() < 0:
            return False
        try:
            data = self._control.recv(1)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if data:
            self.ready_s = time.monotonic()
            return True
        self.kill()
        return False

    def is_overdue(self, since_s: float) -> bool:
        """Whether it should have answered a request of `since_s`, by `time.monotonic`."""
        if not self.is_alive() or is_stopped(self.pid):
            return True
        if self.ready_s is None:
            return time.monotonic() - since_s > IMPORT_TIMEOUT_S
        return time.monotonic() - max(since_s, self.ready_s) > ANSWER_TIMEOUT_S

    def send(self, request: ForkRequest, descriptors: Sequence[int]) -> None:
        """Raises OSError or ValueError if it cannot take the request."""
        send_request(self._control, request, descriptors)

    def resident_bytes(self) -> int | None:
        """The fork server's memory, most of which is shared with what it has forked; None if it has
        ended. May be called on any thread."""
        try:
            pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return None
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """End it and wait for that. What it has forked runs on. May be called twice."""
        self._popen.kill()
        self._popen.wait()
        self._control.close()


_first: list[ForkServer] = []


def start_first() -> None:
    """Start the fork server of this command, which ends with this process at the latest."""
    with contextlib.suppress(OSError):  # there are too many processes; workers start without it
        server = ForkServer({**inherited_environment(), **NO_BLAS_THREADS})
        atexit.register(server.kill)
        _first.append(server)


def take_first() -> ForkServer | None:
    """The one that `start_first` has started. The caller ends it."""
    return _first.pop() if _first else None


class ForkedProcess:
    """A process that a fork server is to fork, with what the supervisor uses of `subprocess.Popen`.
    It is a child of this process. It may not run yet: see `settle`. Thread-safe.

    command:     its command line, as for a new interpreter.
    environment: variables to set after the fork.
    pass_fds:    the descriptor for what it prints, and those that it inherits with their numbers.
    start_anew:  starts a new interpreter instead, with all these.
    release:     called once when neither of them needs the descriptors any more.
    """

    def __init__(
        self,
        server: ForkServer,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
        *,
        start_anew: Callable[[], "subprocess.Popen[bytes]"],
        release: Callable[[], None],
    ) -> None:
        """Raises OSError or ValueError if the fork server does not take the request; then nothing
        is released."""
        self._server, self._start_anew, self._release = server, start_anew, release
        self._lock = threading.RLock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._status: int | None = None
        self._since_s = time.monotonic()
        output, *numbers = pass_fds
        request = ForkRequest(
            tuple(command),
            dict(environment),
            tuple(numbers),
            tuple(os.sched_getaffinity(0)),
            tuple((which, *resource.getrlimit(which)) for which in _LIMITS),
        )
        self._answer, other_end = socket_pair()
        self._answer.setblocking(False)
        cwd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with other_end:
                server.send(request, [other_end.fileno(), cwd, output, *numbers])
        except BaseException:
            self._answer.close()
            raise
        finally:
            os.close(cwd)

    @property
    def pid(self) -> int:
        """The process id; that of the fork server until the process runs."""
        if self._popen is not None:
            return self._popen.pid
        return self._server.pid if self._pid is None else self._pid

    @property
    def is_pending(self) -> bool:
        """Whether it does not run yet, as far as is known. Then `fileno` is readable when it does,
        or when the fork server has ended or refuses."""
        return self._answer.fileno() >= 0

    def fileno(self) -> int:
        return self._answer.fileno()

    def settle(self) -> None:
        """Take the answer of the fork server, if there is one, without blocking. If it does not
        fork, or is overdue, start a new interpreter."""
        with self._lock:
            if not self.is_pending:
                return
            try:
                reason = self._take_answer()
            except BlockingIOError:
                if not self._server.is_overdue(self._since_s):
                    return
                reason = self._give_up() or "the fork server does not answer"
            if self._pid is None:
                self._start_instead(reason)
            self._end_waiting()

    def _take_answer(self) -> str:
        """Returns why it does not run; empty if it does. Raises BlockingIOError."""
        match receive_answer(self._answer):
            case Forked(pid):
                self._pid = pid
                return ""
            case NotForked(reason, is_final):
                if is_final:
                    self._server.is_unfit = True
                    self._server.kill()
                return reason
            case _:
                self._server.kill()
                return "the fork server has ended"

    def _give_up(self) -> str:
        """Kill the fork server. What it has just forked answers by itself; later, it cannot."""
        self._server.kill()
        self._answer.settimeout(LAST_ANSWER_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self._take_answer()
        return ""

    def _start_instead(self, reason: str) -> None:
        logger.warning("a worker is started without the fork server: %s", reason)
        try:
            self._popen = self._start_anew()
        except OSError as error:
            logger.error("a worker cannot be started: %s", error)
            self._status = os.EX_OSERR

    def _end_waiting(self) -> None:
        self._answer.close()
        self._release()

    def poll(self) -> int | None:
        """The exit status as in `subprocess`; None while the process runs, or does not run yet."""
        self.settle()
        with self._lock:
            if self._popen is not None:
                return self._popen.poll()
            if self._status is None and self._pid is not None:
                try:
                    pid, status = os.waitpid(self._pid, os.WNOHANG)
                except ChildProcessError:  # as in `subprocess`: the status is lost
                    pid, status = self._pid, 0
                if pid:
                    self._status = os.waitstatus_to_exitcode(status)
            return self._status

    def wait(self, timeout_s: float) -> int:
        """Wait for its end; returns the exit status. Raises subprocess.TimeoutExpired."""
        deadline_s = time.monotonic() + timeout_s
        delay_s = 0.0005
        while (status := self.poll()) is None:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise subprocess.TimeoutExpired(FORKED_MODULE, timeout_s)
            delay_s = min(2 * delay_s, 0.05)
            time.sleep(min(delay_s, remaining_s))
        return status

    def send_signal(self, number: int) -> None:
        """One that does not run yet never will: it counts as ended by the signal."""
        with self._lock:
            if self.is_pending:
                self._give_up()
                if self._pid is None:
                    self._status = -number
                self._end_waiting()
            if self.poll() is None:
                os.kill(self.pid, number)


def is_stopped(pid: int) -> bool:
    """Whether this child is stopped or traced, by its state in proc(5)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # it has ended
        return False
    return status.rpartition(b") ")[2][:1] in (b"T", b"t")  # the name before may have any bytes
