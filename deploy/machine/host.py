"""What the doctor reads from a machine: files below a root, and results of a few system calls."""

import ctypes
import errno
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from longshore.deploy.supervisor.state_dir import default_state_dir

IO_URING_SETUP: Final = 425  # the same number on every architecture
TIME_ERROR: Final = 5  # adjtimex: the clock is not synchronised


def _temp_dir() -> Path:
    """The folder of temporary files, even if it is not writable."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return Path(os.environ.get("TMPDIR", "/tmp"))


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def _io_uring_errno() -> int:
    """errno of an io_uring_setup call without parameters: EFAULT if io_uring is available."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(IO_URING_SETUP, 1, None)
    return ctypes.get_errno()


def _clock_state() -> int:
    """The result of adjtimex; -1 if it is not available or not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.adjtimex(ctypes.create_string_buffer(512))) if hasattr(libc, "adjtimex") else -1


def _port_problem(port: int) -> str | None:
    """Why a server could not listen on this port of 127.0.0.1; None if it could."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.strerror or str(error)
    return None


@dataclass(frozen=True)
class Host:
    """This machine; tests pass another root and other functions.

    state_dir:    the default state directory. Raises ConfigError if there is none.
    limit:        (soft, hard) of a RLIMIT_*; RLIM_INFINITY is unlimited.
    free_bytes:   free bytes on the file system of a folder. Raises OSError.
    allowed_cpus: CPUs that this process may run on.
    """

    root: Path = Path("/")
    temp_dir: Path = field(default_factory=_temp_dir)
    state_dir: Callable[[], Path] = default_state_dir
    allowed_cpus: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    free_bytes: Callable[[Path], int] = _free_bytes
    io_uring_errno: Callable[[], int] = _io_uring_errno
    clock_state: Callable[[], int] = _clock_state
    port_problem: Callable[[int], str | None] = _port_problem

    def text(self, path: str) -> str | None:
        """Content of a file, stripped; None if it cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text("utf-8", "replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """Content of a file as an integer; None if it is not one."""
        text = self.text(path)
        return int(text) if text is not None and text.lstrip("-").isdecimal() else None

    def paths(self, pattern: str) -> list[Path]:
        """Paths below the root that match, sorted."""
        return sorted(self.root.glob(pattern.lstrip("/")))


def errno_name(number: int) -> str:
    return errno.errorcode.get(number, str(number))
