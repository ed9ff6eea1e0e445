"""The private directory of one deployment, with configuration files and sockets; temporary. Also
owns the memory that its processes share, which has no name in the file system."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import zmq

from longshore.deploy.supervisor.abandoned_dirs import PREFIX, claim, remove_abandoned
from longshore.deploy.supervisor.home_dir import temp_dir
from longshore.protocol.errors import ConfigError
from longshore.protocol.transport.channel import Endpoint
from longshore.protocol.transport.security import CurveKeys, new_secret

# sockaddr_un has 107 bytes and a terminating zero.
MAX_SOCKET_PATH_BYTES: Final = 107
_DEATH_NOTE: Final = "death.txt"
_PROGRESS_NOTE: Final = "progress.txt"
_URL_NOTE: Final = "url.txt"


class RuntimeDir:
    """A 0700 directory in the system's temporary directory (set by `TMPDIR`). Creating one removes
    those that killed deployments have left.

    client_keys: for processes of this deployment, where sockets accept lists of public keys.
    """

    def __init__(self) -> None:
        remove_abandoned(temp_dir())
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))  # mkdtemp makes it 0700
        self._lock_fd: int | None = claim(self.path)
        self._memory_fds: list[int] = []
        self._secret = new_secret()
        public, secret = zmq.curve_keypair()
        self.client_keys = CurveKeys(public.decode(), secret.decode())

    def endpoint(self, name: str) -> Endpoint:
        """A ZMQ socket in this directory, for the processes of this deployment only: they get its
        secret with their configuration. Raises ConfigError if its path is too long."""
        return Endpoint(f"ipc://{self.socket_path(name)}", secret=self._secret)

    def socket_path(self, name: str) -> Path:
        """Works like `endpoint`, for sockets other than ZMQ's."""
        path = self.path / f"{name}.sock"
        check_socket_path(path, "Set TMPDIR to a directory with a shorter path.")
        return path

    def shared_memory(self, name: str) -> int:
        """The descriptor of new, empty memory for several processes to inherit. It lives as long as
        this object or one of them has it open."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        self._memory_fds.append(fd)
        return fd

    def release_memory(self, descriptors: Iterable[int]) -> None:
        """Close descriptors of shared memory, whose processes have ended."""
        for descriptor in {*descriptors} & {*self._memory_fds}:
            self._memory_fds.remove(descriptor)
            os.close(descriptor)

    def remove_files(self, *patterns: str) -> None:
        """Delete what processes that have ended left in the directory."""
        for pattern in patterns:
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)

    def write_keys(self, content: bytes) -> Path:
        """Write the file with the API keys, by digest, in place of the former one."""
        path = self.path / "api-keys.json"
        new = path.with_suffix(".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        return new.replace(path)

    def note_death(self, reason: str) -> None:
        """Record why all processes are stopped, so that gateways can tell their clients."""
        self._note(_DEATH_NOTE, reason)

    def note_progress(self, progress: str) -> None:
        """Record the progress of the startup, so that gateways can report it."""
        self._note(_PROGRESS_NOTE, progress)

    def note_url(self, url: str) -> None:
        """Record where the deployment serves, so that operators can tell it from others."""
        self._note(_URL_NOTE, url)

    def _note(self, name: str, text: str) -> None:
        with contextlib.suppress(OSError):  # the disk may be full, or the directory deleted
            (self.path / name).write_text(text, encoding="utf-8")

    def remove(self) -> None:
        """Delete the directory and its content, if it still exists, and release shared memory."""
        while self._memory_fds:
            os.close(self._memory_fds.pop())
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def check_socket_path(path: Path, advice: str = "Use a shorter path.") -> None:
    """Raise ConfigError if a socket cannot have this path."""
    if len(bytes(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"{path} is longer than {MAX_SOCKET_PATH_BYTES} bytes, the limit of a socket path. "
            f"{advice}"
        )


def read_death_note(runtime_dir: Path | None) -> str | None:
    """Why the supervisor stops the deployment of this directory; None if not recorded."""
    return _read_note(runtime_dir, _DEATH_NOTE)


def read_progress_note(runtime_dir: Path | None) -> str | None:
    """What the processes that are not ready are doing; None if not recorded."""
    return _read_note(runtime_dir, _PROGRESS_NOTE)


def read_url(runtime_dir: Path) -> str:
    """Where the deployment of this directory serves."""
    return _read_note(runtime_dir, _URL_NOTE) or "no URL"


def _read_note(runtime_dir: Path | None, name: str) -> str | None:
    if runtime_dir is None:
        return None
    try:
        return (runtime_dir / name).read_text(encoding="utf-8") or None  # empty while written
    except OSError:
        return None
