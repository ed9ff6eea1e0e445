"""Where to keep the files of a user without a home that can be written to: a uid without a passwd
entry, as OpenShift gives to containers, or a container whose file system is read-only.

Imports little, because the command calls `provide_caches` before all else.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

from longshore.protocol.errors import ConfigError

_CACHES: Final = {
    "HF_HOME": "~/.cache/huggingface",
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "CUPY_CACHE_DIR": "~/.cupy/kernel_cache",
}
"""Variables of libraries that write below the home directory, with their defaults."""


def temporary_home() -> Path:
    """The directory of this user in `TMPDIR`. It is the same for all processes of the user, and may
    not exist yet. Raises ConfigError."""
    return temp_dir() / f"longshore-home-{os.geteuid()}"


def temp_dir() -> Path:
    """The system's temporary directory. Raises ConfigError if none can be written to."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(
            "no temporary directory can be written to, but sockets and configurations need one. "
            "Mount a writable volume at /tmp, or set TMPDIR to a directory that can be written to."
        ) from error


def can_create(path: Path) -> bool:
    """Whether this process can create a file in the folder, or the folder itself."""
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def provide_caches(variables: MutableMapping[str, str]) -> None:
    """Set the variables of caches that neither exist nor can be created to folders in
    `temporary_home`, unless another user has taken its name."""
    missing = {
        name: path for name, path in _CACHES.items() if not (name in variables or _is_usable(path))
    }
    if not missing:
        return
    with contextlib.suppress(OSError, ConfigError):
        home = temporary_home()
        home.mkdir(mode=0o700, exist_ok=True)
        status = home.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            variables.update({name: str(home / Path(path).name) for name, path in missing.items()})


def _is_usable(path: str) -> bool:
    """Whether a folder below the home directory exists, perhaps only to be read, or can be made."""
    folder = Path(os.path.expanduser(path))
    return folder.is_absolute() and (folder.is_dir() or can_create(folder))
