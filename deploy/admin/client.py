"""A client of the admin socket, and how it finds the deployments of this user."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from longshore.deploy.admin.actions import SOCKET_NAME, Action, Answer
from longshore.protocol.errors import ConfigError, LongshoreError

CONNECT_TIMEOUT_S: Final = 5.0
MAX_LISTED: Final = 10


class AdminFailed(LongshoreError):
    """The deployment cannot be reached, or did not answer."""


@contextmanager
def perform(path: Path, action: Action) -> Iterator[tuple[Answer, BinaryIO]]:
    """Send an action; gives its answer, and the content that follows it. Waits as long as the
    action takes; the socket closes when the deployment ends. Raises AdminFailed."""
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as content:
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect(str(path))
            connection.settimeout(None)
            connection.sendall(msgspec.json.encode(action) + b"\n")
            line = content.readline()
        except OSError as error:
            raise AdminFailed(
                f"{path} does not answer: {error}. Is `longshore serve` still running?"
            ) from error
        if not line:
            raise AdminFailed("the deployment ended before it answered")
        yield msgspec.json.decode(line, type=Answer), content


def find_socket() -> Path:
    """The admin socket of the only deployment that this user runs on this machine. Raises
    ConfigError if there is none, or more than one."""
    folder = Path(tempfile.gettempdir())
    paths = [path for path in folder.glob(f"longshore-*/{SOCKET_NAME}.sock") if _is_served(path)]
    if len(paths) == 1:
        return paths[0]
    if not paths:
        raise ConfigError(
            f"no deployment of this user has a socket in {folder}. Start `longshore serve`, or set "
            "--socket to the path that its log names."
        )
    listed = ", ".join(map(str, paths[:MAX_LISTED]))
    raise ConfigError(
        f"{len(paths)} deployments are running; select one of them with --socket: {listed}"
    )


def _is_served(path: Path) -> bool:
    """Whether it belongs to this user, so that nobody else answers, and somebody listens."""
    try:
        if any(each.st_uid != os.geteuid() for each in (path.parent.lstat(), path.parent.stat())):
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CONNECT_TIMEOUT_S)
            probe.connect(str(path))
        return True
    except OSError:
        return False
