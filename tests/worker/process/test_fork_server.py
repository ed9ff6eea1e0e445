"""The fork server, from the side of a supervisor: what it forks is like a new interpreter."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from longshore.protocol.transport.fork_requests import (
    MAX_MESSAGE_BYTES,
    Forked,
    ForkRequest,
    NotForked,
    receive_answer,
    send_request,
    socket_pair,
)

TIMEOUT_S = 60.0
ROOT = Path(__file__).resolve().parents[3]  # where MODULE is found, from any working directory
PATHS = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
PROGRAM = """
import sys, socket
from longshore.worker.process import fork_server
{patch}
fork_server.serve(socket.socket(fileno=int(sys.argv[1])), {modules!r})
"""
MODULE = "tests.worker.process.shown_facts"


class Server:
    """A fork server that runs MODULE."""

    def __init__(self, patch: str = "", modules: tuple[str, ...] = ()) -> None:
        self.control, other_end = socket_pair()
        with other_end:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c"),
                    PROGRAM.format(patch=patch, modules=modules),
                    str(other_end.fileno()),
                ],
                pass_fds=[other_end.fileno()],
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": PATHS},
                start_new_session=True,
            )
        self.control.settimeout(TIMEOUT_S)
        self.pids: list[int] = []

    def wait_until_ready(self) -> None:
        assert b"ready" in self.control.recv(MAX_MESSAGE_BYTES)

    def ask(
        self, output: int, *passed: tuple[int, int], environment: dict[str, str] | None = None
    ) -> socket.socket:
        """Request a worker that gets descriptors (number, ours); returns where it answers."""
        answer, other_end = socket_pair()
        answer.settimeout(TIMEOUT_S)
        cwd = os.open("/", os.O_PATH)
        with other_end:
            send_request(
                self.control,
                ForkRequest(
                    ("python", "-P", "-m", MODULE, "/tmp/worker-0.json"),
                    environment or {},
                    tuple(number for number, _ in passed),
                    (min(os.sched_getaffinity(0)),),
                ),
                [other_end.fileno(), cwd, output, *(fd for _, fd in passed)],
            )
        os.close(cwd)
        return answer

    def fork(self, output: int, *passed: tuple[int, int], **settings: dict[str, str]) -> int:
        with self.ask(output, *passed, **settings) as answer:
            forked = receive_answer(answer)
        assert isinstance(forked, Forked), forked
        self.pids.append(forked.pid)
        return forked.pid

    def close(self) -> None:
        self.control.close()
        self.process.wait(TIMEOUT_S)


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start_(*arguments: str, **settings: tuple[str, ...]) -> Server:
        started.append(Server(*arguments, **settings))
        return started[-1]

    yield start_
    for server in started:
        server.close()


def test_a_forked_worker_is_our_child_and_like_a_new_interpreter(
    start: Callable[..., Server],
) -> None:
    server = start()
    reader, writer = os.pipe()
    # The numbers that it gets are in use by others in the fork server.
    pid = server.fork(writer, (3, reader), (40, writer), environment={"LATE": "a value"})
    with open(reader, "rb") as lines:
        os.close(writer)
        facts = json.loads(lines.readline())
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert lines.read() == b"", "nobody else has its output open"
    assert facts["ppid"] == os.getpid()
    assert facts["sid"] == pid
    assert facts["argv"][1:] == ["/tmp/worker-0.json"]
    assert facts["name"] == "__main__"
    assert facts["collects"]
    assert facts["cwd"] == "/"
    assert facts["value"] == "a value"
    assert {*facts["fds"]} - {0, 1, 2, 3, 40} == {4}, "4: of the list itself"
    assert facts["cpus"] == [min(os.sched_getaffinity(0))]
    assert facts["threads"] == 1
    assert facts["ignores_term"]
    assert server.process.poll() is None
    assert psutil.Process(server.process.pid).children() == []


def test_each_forked_worker_draws_its_own_random_numbers(
    start: Callable[..., Server],
) -> None:
    server, drawn = start(modules=("numpy.random",)), set()
    for _ in range(2):
        reader, writer = os.pipe()
        pid = server.fork(writer)
        os.close(writer)
        with open(reader, "rb") as lines:
            drawn.add(json.loads(lines.readline())["random"])
        os.waitpid(pid, 0)
    assert len(drawn) == 2
    assert None not in drawn


def test_ps_shows_a_forked_worker_as_one(start: Callable[..., Server]) -> None:
    server = start()
    pid = server.fork(2, environment={"STAY": "1"})
    process = psutil.Process(pid)
    deadline_s = time.monotonic() + TIMEOUT_S
    while (line := process.cmdline())[-1] != "/tmp/worker-0.json":
        assert time.monotonic() < deadline_s, line
    assert line == ["python", "-P", "-m", MODULE, "/tmp/worker-0.json"]
    assert process.environ() == {**psutil.Process(server.process.pid).environ(), "STAY": "1"}
    process.kill()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9


def test_a_worker_outlives_its_fork_server(start: Callable[..., Server]) -> None:
    server = start()
    reader, writer = os.pipe()
    pid = server.fork(writer, environment={"STAY": "1"})
    server.process.kill()
    server.process.wait()
    os.close(writer)
    with open(reader, "rb") as lines:
        assert json.loads(lines.readline())["ppid"] == os.getpid()
    os.kill(pid, 9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9


def test_it_ends_when_the_supervisor_has_ended(start: Callable[..., Server]) -> None:
    server = start()
    server.wait_until_ready()
    server.control.close()
    assert server.process.wait(TIMEOUT_S) == 0


def test_a_request_that_is_not_wanted_any_more_starts_nothing(start: Callable[..., Server]) -> None:
    server = start("import time; time.sleep(0.5)")
    server.ask(2).close()
    with server.ask(2) as answer:
        assert isinstance(receive_answer(answer), Forked)
        os.wait()
    assert psutil.Process(server.process.pid).children() == []


@pytest.mark.parametrize(
    ("patch", "reason", "is_final"),
    [
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True)"
            ".start()",
            "something that it imports has started threads (2 run)",
            True,
        ),
        (
            "import types\nsys.modules['torch'] = types.SimpleNamespace(cuda="
            "types.SimpleNamespace(is_initialized=lambda: True))",
            "something that it imports has initialised CUDA",
            True,
        ),
        (
            "def fail(): raise OSError(12, 'Cannot allocate memory')\n"
            "fork_server.clone_sibling = fail",
            "it cannot fork: Cannot allocate memory",
            False,
        ),
    ],
    ids=["threads", "CUDA", "memory"],
)
def test_it_says_why_it_does_not_fork(
    patch: str, reason: str, is_final: bool, start: Callable[..., Server]
) -> None:
    server = start(patch)
    with server.ask(2) as answer:
        assert receive_answer(answer) == NotForked(reason, is_final)


def test_what_workers_import_starts_no_thread_and_does_not_initialise_cuda() -> None:
    code = (
        "from longshore.worker.process import fork_server, startup\n"
        "print(fork_server.why_not_to_fork())"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "None\n"


@pytest.mark.parametrize("data", [b"x", b'{"type":"fork"}', b"x" * (2 * MAX_MESSAGE_BYTES)])
def test_a_message_that_is_no_request_ends_it_without_a_fork(
    data: bytes, start: Callable[..., Server], capfd: pytest.CaptureFixture[str]
) -> None:
    server = start()
    server.wait_until_ready()
    server.control.send(data)
    assert server.process.wait(TIMEOUT_S) == 1
    capfd.readouterr()
