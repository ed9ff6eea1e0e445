"""Fork servers that fork, are slow, stopped or killed, with real processes."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import psutil
import pytest

from longshore.deploy.supervisor import fork_server
from longshore.deploy.supervisor.fork_server import (
    FORKED_MODULE,
    NO_BLAS_THREADS,
    ForkedProcess,
    ForkServer,
    inherited_environment,
    is_stopped,
)
from longshore.deploy.supervisor.fork_servers import ForkServers
from longshore.deploy.supervisor.log_relay import LogRelay

TIMEOUT_S = 60.0
COMMAND = [sys.executable, "-P", "-m", FORKED_MODULE, "/no-such-configuration.json"]
STATUS_OF_FORKED = 2  # it reports bad usage
STATUS_OF_ANEW = 9


class Start:
    """A request for a worker; counts what happens to it."""

    def __init__(self) -> None:
        self.num_anew = self.num_released = 0

    def anew(self) -> "subprocess.Popen[bytes]":
        self.num_anew += 1
        return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({STATUS_OF_ANEW})"])

    def release(self) -> None:
        self.num_released += 1

    def of(self, server: ForkServer) -> ForkedProcess:
        with open(os.devnull, "wb") as output:
            return ForkedProcess(
                server,
                COMMAND,
                {},
                [output.fileno()],
                start_anew=self.anew,
                release=self.release,
            )


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = new_server()
    yield server
    server.kill()
    server.output.close()


def new_server(environment: Mapping[str, str] = NO_BLAS_THREADS) -> ForkServer:
    return ForkServer({**inherited_environment(), **environment})


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)


def test_a_worker_is_forked_once_everything_is_imported(server: ForkServer) -> None:
    start = Start()
    process = start.of(server)
    assert process.is_pending
    assert process.poll() is None
    assert (start.num_released, process.pid) == (0, server.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.wait(TIMEOUT_S) == STATUS_OF_FORKED
    assert not process.is_pending
    assert process.pid != server.pid
    assert (start.num_anew, start.num_released) == (0, 1)
    assert server.is_alive()
    assert server.ready_s is not None
    process.send_signal(signal.SIGKILL)  # it has ended
    assert process.poll() == STATUS_OF_FORKED


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_without_a_fork_server_that_runs_a_new_interpreter_is_started(
    server: ForkServer, fault: signal.Signals
) -> None:
    start = Start()
    process = start.of(server)
    os.kill(server.pid, fault)
    if fault == signal.SIGSTOP:
        wait_until(lambda: is_stopped(server.pid))
    assert process.wait(TIMEOUT_S) == STATUS_OF_ANEW
    assert (start.num_anew, start.num_released) == (1, 1)
    assert not server.is_alive()
    assert not psutil.pid_exists(server.pid)


def test_a_fork_server_that_is_silent_for_too_long_is_killed(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that runs, as far as its state says, but does not answer."""
    wait_until(lambda: server.is_alive() and server.ready_s is not None)
    monkeypatch.setattr(fork_server, "is_stopped", lambda pid: False)
    os.kill(server.pid, signal.SIGSTOP)
    start = Start()
    process, since_s = start.of(server), time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    assert fork_server.ANSWER_TIMEOUT_S == 5.0
    assert (process.is_pending, start.num_anew) == (True, 0)
    monkeypatch.setattr(fork_server, "ANSWER_TIMEOUT_S", 0.8)
    assert process.wait(TIMEOUT_S) == STATUS_OF_ANEW
    assert time.monotonic() - since_s >= 0.8
    assert (start.num_anew, start.num_released) == (1, 1)
    assert not psutil.pid_exists(server.pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_a_worker_that_is_told_to_end_before_it_runs_is_never_started(
    server: ForkServer, number: signal.Signals
) -> None:
    start = Start()
    process = start.of(server)
    process.send_signal(number)
    assert process.wait(0) == -number
    assert (start.num_anew, start.num_released) == (0, 1)
    assert not psutil.pid_exists(server.pid)


def test_an_interpreter_that_cannot_be_started_counts_as_ended(server: ForkServer) -> None:
    def fail() -> "subprocess.Popen[bytes]":
        raise OSError("too many processes")

    start = Start()
    start.anew = fail  # type: ignore[method-assign]
    process = start.of(server)
    server.kill()
    assert process.wait(TIMEOUT_S) == os.EX_OSERR
    assert start.num_released == 1


def test_descriptors_of_a_request_are_not_leaked(server: ForkServer) -> None:
    wait_until(lambda: server.is_alive() and server.ready_s is not None)
    own, of_server = psutil.Process(), psutil.Process(server.pid)
    before = own.num_fds(), of_server.num_fds()
    for _ in range(3):
        assert Start().of(server).wait(TIMEOUT_S) == STATUS_OF_FORKED
    assert (own.num_fds(), of_server.num_fds()) == before


class Many:
    """Fork servers, of which the first one runs. Made in a test: a fixture has other variables."""

    def __init__(self) -> None:
        self.first = new_server()
        self.servers = ForkServers(LogRelay(io.StringIO()), self.first)

    def fork(self, environment: Mapping[str, str], module: str = FORKED_MODULE) -> int | None:
        """Its exit status; None if no fork server is asked."""
        start = Start()
        with open(os.devnull, "wb") as output:
            process = self.servers.fork(
                module,
                COMMAND,
                environment,
                {},
                [output.fileno()],
                start_anew=start.anew,
                release=start.release,
            )
        return None if process is None else process.wait(TIMEOUT_S)


def test_one_that_has_ended_is_replaced_when_everything_runs() -> None:
    many = Many()
    try:
        assert many.fork(NO_BLAS_THREADS, "longshore.scheduler") is None
        (memory,) = many.servers.memory().items()
        assert memory[0] == many.first.pid
        assert memory[1] > 0
        assert many.fork(NO_BLAS_THREADS) == STATUS_OF_FORKED
        os.kill(many.first.pid, signal.SIGKILL)
        wait_until(lambda: not many.servers.running)
        many.servers.keep(is_calm=False)
        assert many.servers.running == []
        assert many.servers.memory() == {}
        assert many.fork(NO_BLAS_THREADS) is None
        many.servers.keep(is_calm=True)
        (successor,) = many.servers.running
        assert successor.pid != many.first.pid
        assert many.fork(NO_BLAS_THREADS) == STATUS_OF_FORKED
    finally:
        many.servers.close()
    assert not psutil.pid_exists(successor.pid)


def test_each_set_of_variables_has_its_own() -> None:
    many = Many()
    other = {**NO_BLAS_THREADS, "OMP_NUM_THREADS": "2"}
    try:
        assert many.fork(other) is None
        assert many.servers.due_s(is_calm=True) <= time.monotonic()
        many.servers.keep(is_calm=True)
        assert len(many.servers.running) == 2
        assert many.fork(other) == STATUS_OF_FORKED
    finally:
        many.servers.close()
