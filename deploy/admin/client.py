"""A client of the admin socket, and how it finds the deployments of this user."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import urlsplit

import msgspec

from longshore.deploy.admin.actions import SOCKET_NAME, Action, Answer
from longshore.deploy.supervisor.home_dir import temp_dir
from longshore.deploy.supervisor.runtime_dir import read_url
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


def find_socket(url: str | None = None) -> Path:
    """The admin socket of the deployment that this user runs on this machine at a URL; None: of the
    only one. Raises ConfigError if there is none, or more than one."""
    found = deployments()
    chosen = {path: of for path, of in found.items() if url is None or _same_url(of, url)}
    if len(chosen) == 1:
        return next(iter(chosen))
    listed = ", ".join(f"{of} ({path})" for path, of in list(found.items())[:MAX_LISTED])
    if not found:
        raise ConfigError(
            f"no deployment of this user has a socket in {temp_dir()}. Start `longshore serve`, or "
            "set --socket to the path that its log names."
        )
    if not chosen:
        raise ConfigError(f"no deployment of this user is at {url}; select one of: {listed}")
    raise ConfigError(
        f"{len(chosen)} deployments are running; select one of them with --url, or with --socket: "
        f"{listed}"
    )


def deployments() -> dict[Path, str]:
    """The admin sockets of the deployments that this user runs on this machine, with their URLs."""
    sockets = sorted(temp_dir().glob(f"longshore-*/{SOCKET_NAME}.sock"))
    return {path: read_url(path.parent) for path in sockets if _is_served(path)}


def _same_url(one: str, other: str) -> bool:
    parts = [urlsplit(each if "://" in each else f"http://{each}") for each in (one, other)]
    hosts = {"127.0.0.1" if each.hostname == "localhost" else each.hostname for each in parts}
    return len(hosts) == 1 and parts[0].port == parts[1].port


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
