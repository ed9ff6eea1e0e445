"""Keys for what an API key must not do, such as `/admin`: each in a file of its own."""

import re
from pathlib import Path
from typing import Final

from longshore.protocol.errors import ConfigError
from longshore.protocol.private_files import read_private

MIN_CHARACTERS: Final = 16
MAX_CHARACTERS: Final = 512


def read_private_key(path: Path, setting: str) -> str:
    """The key in a file that a setting names. Raises ConfigError if the file cannot be read, is not
    private, or has no usable key."""
    try:
        key = read_private(path, MAX_CHARACTERS + 2).decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(f"{setting}={str(path)!r} cannot be read ({error.strerror})") from error
    if not re.fullmatch(rf"[!-~]{{{MIN_CHARACTERS},{MAX_CHARACTERS}}}", key):
        raise ConfigError(
            f"{setting}={str(path)!r} must contain one line of {MIN_CHARACTERS} to "
            f"{MAX_CHARACTERS} visible ASCII characters, such as `openssl rand -hex 32` prints"
        )
    return key
