"""Reads the files of a model folder. Others have made them, so they can be anything: pipes, which
block until someone writes, devices without an end, links in a circle, JSON nested too deeply."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

MAX_FILE_BYTES: Final = 256 << 20
"""Limit of a file that is read as a whole; the largest tokenizers have a tenth of it."""


def exists(path: Path) -> bool:
    """Whether the folder has this entry. Unlike `Path.exists`, true for a link that leads nowhere
    or in a circle: reading it raises OSError with the reason, instead of it being ignored."""
    return os.path.lexists(path)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, without blocking. Raises OSError, also if this is no regular
    file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises OSError, also if it has more than MAX_FILE_BYTES."""
    with open_regular(path) as file:
        # Memory for all that is asked for is allocated first.
        size_bytes = os.fstat(file.fileno()).st_size
        content = file.read(min(size_bytes, MAX_FILE_BYTES) + 1)
    if len(content) > MAX_FILE_BYTES:
        text = f"it has more than {MAX_FILE_BYTES:,} bytes"
        raise OSError(errno.EFBIG, text, str(path))
    return content


def read_json(path: Path) -> object:
    """The content of a JSON file. Raises OSError or ValueError."""
    return parse_json(read_bytes(path))


def parse_json(content: bytes) -> object:
    """Decode JSON. Raises ValueError, also for arrays and objects that are nested too deeply to be
    decoded."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it has arrays or objects that are nested too deeply") from None
