"""The private directory of one deployment: configuration files and sockets, gone when it ends."""

import shutil
import tempfile
from pathlib import Path
from typing import Final

from longshore.protocol.channel import Endpoint
from longshore.protocol.errors import ConfigError

# sockaddr_un holds 107 characters and a final zero.
MAX_SOCKET_PATH_BYTES: Final = 107


class RuntimeDir:
    """A 0700 directory below the system's temporary directory (`TMPDIR` moves it)."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="longshore-"))  # mkdtemp makes it 0700

    def endpoint(self, name: str) -> Endpoint:
        """A socket inside. Raises ConfigError if the path is too long for a socket."""
        path = self.path / f"{name}.sock"
        if len(bytes(path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{path} is longer than the {MAX_SOCKET_PATH_BYTES} bytes that a socket's path may "
                "have. Set TMPDIR to a shorter directory."
            )
        return Endpoint(f"ipc://{path}")

    def remove(self) -> None:
        """Delete it and everything inside; nothing happens if it is gone already."""
        shutil.rmtree(self.path, ignore_errors=True)
