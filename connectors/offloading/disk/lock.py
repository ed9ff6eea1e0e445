"""The lock of one rank's store, so that only one process writes to it."""

import fcntl
import json
import os
import socket
import time
from typing import Final

from longshore.connectors.offloading.disk.errors import StoreInUse
from longshore.protocol.private_files import Folder

LOCK_FILE: Final = "lock"
NUM_TRIES: Final = 5
RETRY_S: Final = 0.02


class StoreLock:
    """Held until `close` or the end of the process. Raises StoreInUse if it is held already, with
    the holder's name, and OSError."""

    def __init__(self, directory: Folder) -> None:
        self._fd = directory.open_file(LOCK_FILE, os.O_RDWR | os.O_CREAT)
        if not _lock(self._fd):
            holder = _holder(self._fd)
            os.close(self._fd)
            raise StoreInUse(
                f"the disk store {directory.path} is in use by {holder}. Stop that process, or "
                "give this engine another path."
            )
        content = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, content, 0)

    def close(self) -> None:
        os.close(self._fd)


def _lock(fd: int) -> bool:
    """Whether the lock is ours now. `is_locked` of another process has it for a moment."""
    for _ in range(NUM_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(RETRY_S)
        else:
            return True
    return False


def is_locked(directory: Folder) -> bool:
    """Whether a process has opened this store for writing."""
    try:
        fd = directory.open_file(LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _holder(fd: int) -> str:
    try:
        content = json.loads(os.pread(fd, 1024, 0))
        return f"process {content['pid']} on host {content['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
