"""Removes runtime directories whose processes were all killed at once, so that none of them could.

The supervisor holds a lock on a file of its directory as long as it lives. A directory without this
file, or with a file that is locked, is not touched.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

PREFIX: Final = "longshore-"
_LOCK_FILE: Final = "supervisor.lock"


def claim(path: Path) -> int:
    """Lock a new runtime directory for this process; returns the descriptor that holds the lock."""
    new = path / f"{_LOCK_FILE}.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: nothing is ever removed
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(path / _LOCK_FILE)  # only now do others look at it
    return descriptor


def remove_abandoned(folder: Path) -> None:
    """Remove the directories of this user in `folder` that no supervisor holds."""
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    """Raises OSError if it is in use, or no runtime directory of this user."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    descriptor = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        logger.info("removing %s, left by a deployment whose processes were all killed", path)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
