"""`python -P -m longshore.worker.process.fork_server FD MODULE...`: has imported torch, and forks
workers.

Importing torch is most of the time in which a worker starts. The supervisor starts this process
first of all, and lets it fork the workers, which then begin with everything imported. A new worker
is a child of the supervisor, not of this process (CLONE_PARENT): the supervisor waits for its end,
and nothing depends on this process afterwards. Where it cannot fork, the supervisor starts a new
interpreter.

A forked process has one thread, so this one must have no other: it only imports, and pools of
threads are started by the workers. It must not initialise CUDA either.
"""

import contextlib
import ctypes
import fcntl
import gc
import os
import platform
import resource
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from longshore.protocol.transport.fork_requests import (
    Forked,
    ForkRequest,
    ForkServerReady,
    NotForked,
    close_all,
    receive_request,
    send_answer,
)
from longshore.protocol.transport.lifeline import SERVICE_SIGNALS
from longshore.worker.process.command_line import show_command_line
from longshore.worker.process.ending import end_process

EXIT_NO_WORKER: Final = 70

_CLONE_NUMBERS: Final = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT: Final = 0x8000
_CLONE_CHILD_CLEARTID: Final = 0x200000
_CLONE_CHILD_SETTID: Final = 0x1000000
_PR_GET_TID_ADDRESS: Final = 40


def serve(control: socket.socket, modules: Sequence[str]) -> None:
    """Import the modules and fork until the supervisor closes its end. In each new process, run the
    program that was requested."""
    for number in SERVICE_SIGNALS:  # as workers do: only the supervisor obeys them
        signal.signal(number, signal.SIG_IGN)
    gc.disable()
    for module in modules:
        import_module(module)
    gc.collect()
    gc.freeze()  # the collector of a worker would write to these objects, and so copy their pages
    send_answer(control, ForkServerReady())
    while (received := receive_request(control)) is not None:
        request, (answer_fd, *descriptors) = received
        with socket.socket(fileno=answer_fd) as answer:
            if _fork(answer):
                control.detach()
                return _run(request, answer.detach(), descriptors)
        close_all(descriptors)


def _fork(answer: socket.socket) -> bool:
    """True in the new process. If there is none, say why."""
    if answer.fileno() in dict(_hung_up(answer)):
        return False  # the supervisor does not want it any more
    try:
        refused = why_not_to_fork()
        if refused is None:
            return clone_sibling() == 0
        failed = NotForked(refused, is_final=True)
    except OSError as error:
        failed = NotForked(f"it cannot fork: {error.strerror}", is_final=False)
    with contextlib.suppress(OSError):
        send_answer(answer, failed)
    return False


def _hung_up(answer: socket.socket) -> list[tuple[int, int]]:
    poll = select.poll()
    poll.register(answer, 0)  # reports POLLHUP only
    return poll.poll(0)


def why_not_to_fork() -> str | None:
    """Why a copy of this process would not work; None if it would."""
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads != 1:
        return f"something that it imports has started threads ({num_threads} run)"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "something that it imports has initialised CUDA"
    if platform.machine() not in _CLONE_NUMBERS:
        return f"it does not know how to fork on {platform.machine()}"
    return None


def clone_sibling() -> int:
    """Fork like os.fork, but the new process is a child of this one's parent. Raises OSError.

    The flags are those of fork(3), which also lets the kernel keep the thread's id where the C
    library reads it.
    """
    library = ctypes.PyDLL(None, use_errno=True)  # which keeps the GIL
    tid = ctypes.c_void_p()
    if library.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(tid), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    flags = _CLONE_PARENT | _CLONE_CHILD_CLEARTID | _CLONE_CHILD_SETTID | signal.SIGCHLD
    number = ctypes.c_long(_CLONE_NUMBERS[platform.machine()])
    python = ctypes.pythonapi
    null = ctypes.c_void_p()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    python.PyOS_BeforeFork()
    # The machines differ in the order of the last two; the other one is not used.
    pid = int(library.syscall(number, ctypes.c_ulong(flags), null, null, tid, tid))
    errno = ctypes.get_errno()
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(errno, os.strerror(errno))
    return pid


def _run(request: ForkRequest, answer_fd: int, descriptors: Sequence[int]) -> None:
    """In the new process: make it what `python -m MODULE ARGUMENT...`, the end of `command`, would
    have started."""
    try:
        os.setsid()  # before the supervisor knows its id, by which it kills the group
        with socket.socket(fileno=answer_fd) as answer:
            send_answer(answer, Forked(os.getpid()))
        cwd_fd, output_fd, *inherited = descriptors
        os.fchdir(cwd_fd)
        _place_descriptors(output_fd, dict(zip(request.numbers, inherited, strict=True)))
        for name, value in request.environment.items():
            os.environ[name] = value
        for which, soft, hard in request.limits:
            resource.setrlimit(which, (soft, hard))
        os.sched_setaffinity(0, request.affinity)
        if "numpy" in sys.modules:  # Python's own generator is seeded again
            sys.modules["numpy"].random.seed()
        show_command_line(request.command)
        sys.argv = [*request.command[request.command.index("-m") + 1 :]]
    except Exception:
        traceback.print_exc()
        sys.exit(EXIT_NO_WORKER)
    gc.enable()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _place_descriptors(output_fd: int, by_number: dict[int, int]) -> None:
    """Give each descriptor its number, output those of stdout and stderr, and close all others."""
    first_free = max((*by_number, *by_number.values(), output_fd)) + 1
    null_fd = os.open(os.devnull, os.O_RDWR)
    wanted = {0: null_fd, 1: output_fd, 2: output_fd, **by_number}
    free = {
        number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, first_free) for number, fd in wanted.items()
    }
    for number, fd in free.items():  # none of them is where another one goes
        os.dup2(fd, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in wanted:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(number)


if __name__ == "__main__":
    exit_status: object = 0
    try:
        serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    except SystemExit as stopped:  # of what it has forked
        exit_status = stopped.code
    end_process(exit_status)
