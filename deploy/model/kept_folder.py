"""Folders that are fetched or made once for a model, and kept in the state directory."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from longshore.deploy.supervisor.state_dir import StateDir
from longshore.protocol.errors import ConfigError
from longshore.protocol.model_files import exists


def kept_folder(
    state_dir: Path | None,
    kind: str,
    key: str,
    make: Callable[[Path], None],
    is_whole: Callable[[Path], bool] = lambda folder: True,
) -> Path:
    """The folder `kind`/`key` in the state directory. If it is not there, or not whole, `make`
    writes it into an empty folder, which is then renamed.

    is_whole: may raise OSError or ValueError for "no". Raises ConfigError if nothing can be
    written, and what `make` raises.
    """
    parent = StateDir(state_dir).path.absolute() / kind
    folder = parent / key
    try:
        if exists(folder) and not _is(is_whole, folder):
            _remove(folder)
        if not exists(folder):
            parent.mkdir(mode=0o700, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=".", dir=parent))
            try:
                make(made)
                os.rename(made, folder)
            except BaseException:
                shutil.rmtree(made, ignore_errors=True)
                if not exists(folder):  # else another process was faster
                    raise
    except OSError as error:
        raise ConfigError(
            f"{parent} cannot be written to ({error.strerror}), and files of the model have to be "
            "kept there. Set state_dir (--state-dir) to a directory that you can write to."
        ) from error
    return folder


def hold(folder: Path) -> None:
    """Keep a folder from `remove_unless_held`, as long as this process lives."""
    with suppress(OSError):  # a file system without locks: nothing is removed
        _lock(folder, folder.stat().st_ino)


@cache
def _lock(folder: Path, inode: int) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def remove_unless_held(folder: Path) -> bool:
    """Remove a folder that no process holds. Returns whether it did."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
        finally:
            os.close(descriptor)
    except OSError:  # it is held, or another process was faster
        return False
    return True


def _remove(folder: Path) -> None:
    """At once for other processes."""
    removed = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        os.rename(folder, removed / folder.name)
    finally:
        shutil.rmtree(removed)


def _is(is_whole: Callable[[Path], bool], folder: Path) -> bool:
    try:
        return is_whole(folder)
    except (OSError, ValueError):
        return False
