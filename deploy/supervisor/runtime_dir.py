"""The private directory of one deployment: configuration files and sockets, gone when it ends."""

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Final

from longshore.protocol.errors import ConfigError
from longshore.protocol.transport.channel import Endpoint

# sockaddr_un holds 107 characters and a final zero.
MAX_SOCKET_PATH_BYTES: Final = 107
_DEATH_NOTE: Final = "death.txt"
_PROGRESS_NOTE: Final = "progress.txt"


class RuntimeDir:
    """A 0700 directory below the system's temporary directory (`TMPDIR` moves it)."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="longshore-"))  # mkdtemp makes it 0700

    def endpoint(self, name: str) -> Endpoint:
        """A socket inside. Raises ConfigError if the path is too long for a socket."""
        return Endpoint(f"ipc://{self.socket_path(name)}")

    def socket_path(self, name: str) -> Path:
        """As `endpoint`, for a socket that is not ZMQ's."""
        path = self.path / f"{name}.sock"
        if len(bytes(path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{path} is longer than the {MAX_SOCKET_PATH_BYTES} bytes that a socket's path may "
                "have. Set TMPDIR to a shorter directory."
            )
        return path

    def note_death(self, reason: str) -> None:
        """Before the processes are stopped because one has died: let the others tell why."""
        self._note(_DEATH_NOTE, reason)

    def note_progress(self, doing: str) -> None:
        """While the deployment starts: let the gateway tell what it is waited for."""
        self._note(_PROGRESS_NOTE, doing)

    def _note(self, name: str, text: str) -> None:
        with contextlib.suppress(OSError):  # a disk may be full, or somebody has cleaned up
            (self.path / name).write_text(text, encoding="utf-8")

    def remove(self) -> None:
        """Delete it and everything inside; nothing happens if it is gone already."""
        shutil.rmtree(self.path, ignore_errors=True)


def read_death_note(runtime_dir: Path | None) -> str | None:
    """Why the supervisor stops the deployment whose directory this is; None if it has not said."""
    return _read_note(runtime_dir, _DEATH_NOTE)


def read_progress_note(runtime_dir: Path | None) -> str | None:
    """What the processes that are not ready are doing, in the supervisor's words; None if it has
    not said."""
    return _read_note(runtime_dir, _PROGRESS_NOTE)


def _read_note(runtime_dir: Path | None, name: str) -> str | None:
    if runtime_dir is None:
        return None
    try:
        return (runtime_dir / name).read_text(encoding="utf-8") or None  # it may just be written
    except OSError:
        return None
