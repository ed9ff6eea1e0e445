"""Files and folders that other users of the machine can neither read nor replace: secrets, stored
KV, and what processes write.

Where another user can create files, they can plant a link to a file of ours, a pipe, or a file that
they hold open. So a file is checked when it is open, not before, and its name is not followed if it
is a link. The files of a folder are opened through the folder's descriptor, which stays the same
when a folder above it is renamed.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from longshore.protocol.errors import ConfigError
from longshore.protocol.model_files import open_regular

_ANY_USE: Final = 0o077
_WRITING: Final = 0o022
_BUT_GROUP_READING: Final = 0o037
_OPEN_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NOT_PLANTED: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def check_private(path: Path) -> None:
    """Raise ConfigError if other users can use a file or folder. Raises OSError if it does not
    exist."""
    _check_link(path)
    _check(path, path.stat(), _ANY_USE)


def read_private(path: Path, max_bytes: int) -> bytes:
    """The first `max_bytes` of a file. Raises ConfigError if other users can use it, and OSError,
    also if it is not a regular file. Root may share its file with the group of this process, as
    Kubernetes does with secrets (`fsGroup`)."""
    _check_link(path)
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        is_shared_by_root = status.st_uid == 0 != os.geteuid()
        forbidden = _BUT_GROUP_READING if is_shared_by_root else _ANY_USE
        _check(path, status, forbidden, trusted_uid=0)
        return file.read(max_bytes)


class Folder:
    """An open folder. Its methods raise OSError with the whole path."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> "Folder":
        """An existing folder, of any user, but no link."""
        with _naming(path):
            return cls(path, os.open(path, _OPEN_FOLDER | os.O_NOFOLLOW))

    @classmethod
    def make(cls, path: Path) -> "Folder":
        """A folder that only this user can write to, or a link to one. It is created with mode 0700
        if it is missing. Raises ConfigError if other users can write to it; root's are trusted."""
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_link(path)
        folder = cls(path, os.open(path, _OPEN_FOLDER))
        with _closing_after_errors(folder):
            _check(path, os.fstat(folder.descriptor), _WRITING, trusted_uid=0)
        return folder

    def make_folder(self, name: str) -> "Folder":
        """A folder within that only this user can use, which is created if it is missing. Raises
        ConfigError if other users can use it."""
        path = self.path / name
        with _naming(path):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.descriptor)
            flags = _OPEN_FOLDER | os.O_NOFOLLOW
            folder = Folder(path, os.open(name, flags, dir_fd=self.descriptor))
        with _closing_after_errors(folder):
            _check(path, os.fstat(folder.descriptor), _ANY_USE)
        return folder

    def open_file(self, name: str, flags: int) -> int:
        """The descriptor of a regular file, which is created with mode 0600 if `flags` say so.
        Links are not followed, and pipes do not block."""
        path = self.path / name
        with _naming(path):
            descriptor = os.open(name, flags | _NOT_PLANTED, 0o600, dir_fd=self.descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        os.set_blocking(descriptor, True)  # io_uring would not wait for the disk
        return descriptor

    def open_own_file(self, name: str, flags: int) -> int:
        """Open like `open_file`. Raises OSError if the file belongs to another user than root, who
        could read what is written to it."""
        descriptor = self.open_file(name, flags)
        owner = os.fstat(descriptor).st_uid
        if owner not in (0, os.geteuid()):
            os.close(descriptor)
            why = f"it belongs to another user (uid {owner}). Delete it"
            raise OSError(errno.EPERM, why, str(self.path / name))
        return descriptor

    def create_file(self, name: str) -> int:
        """The descriptor of a new file, in place of one that exists."""
        self.unlink(name)
        return self.open_own_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def file_size(self, name: str) -> int | None:
        """Bytes; None if there is no such file."""
        try:
            with _naming(self.path / name):
                status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(self.path / name))
        return status.st_size

    def names(self) -> list[str]:
        return os.listdir(self.descriptor)

    def replace(self, name: str, new_name: str) -> None:
        with _naming(self.path / new_name):
            os.replace(name, new_name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def unlink(self, name: str) -> None:
        """Delete a file, if it exists."""
        with _naming(self.path / name), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _closing_after_errors(folder: Folder) -> Iterator[None]:
    try:
        yield
    except BaseException:
        folder.close()
        raise


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Gives errors the whole path, and other words if it is a link."""
    try:
        yield
    except OSError as error:
        text = "it is a symbolic link, which is not followed" if path.is_symlink() else None
        raise OSError(error.errno, text or error.strerror, str(path)) from error


def _check_link(path: Path) -> None:
    """Raises ConfigError if another user can let the path lead elsewhere."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path} is a link of another user (uid {status.st_uid}), who can let it lead "
            "elsewhere. Delete it, or use another path."
        )


def _check(
    path: Path, status: os.stat_result, forbidden: int, *, trusted_uid: int | None = None
) -> None:
    """Raises ConfigError if others have a permission that is `forbidden`, or own it."""
    if status.st_uid not in (os.geteuid(), trusted_uid):
        raise ConfigError(
            f"{path} belongs to another user (uid {status.st_uid}), who could read or replace what "
            f"is stored in it. Run: chown {os.geteuid()} {path}, or use another."
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & forbidden:
        can = "write to" if forbidden == _WRITING else "use"
        private = "700" if stat.S_ISDIR(status.st_mode) else "600"
        if forbidden == _BUT_GROUP_READING:
            private = "440"
        raise ConfigError(
            f"{path} has mode {mode:04o}, so other users can {can} it. "
            f"Run: chmod {private} {path}, or use another."
        )
