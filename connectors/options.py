"""Options of connectors, from `--kv-connector-config`: every error names the connector and the key.

An object of this class is used once, when a connector is built; what it returns goes into a frozen
settings class of the connector.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from longshore.protocol.errors import ConfigError
from longshore.protocol.private_files import Folder

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)

MAX_SIZE_BYTES: Final = 1 << 60


class Options:
    """The options of one connector. Raises ConfigError for a key that is not in `keys`. setting:
    where they were given."""

    def __init__(
        self,
        connector: str,
        options: Mapping[str, Any],
        keys: Sequence[str],
        setting: str = "--kv-connector-config",
    ) -> None:
        self._connector = connector
        self._setting = setting
        self._options = options
        unknown = sorted(set(options) - set(keys))
        if unknown:
            has = "its options are" if len(keys) > 1 else "its only option is"
            raise self.error(f"no option {unknown[0]!r}; {has} {', '.join(keys)}", verb="has")

    def error(self, text: str, *, verb: str = "needs") -> ConfigError:
        """A ConfigError that names the connector."""
        return ConfigError(f"{self._setting}: the connector {self._connector} {verb} {text}")

    def text(self, key: str, example: str) -> str:
        """A text that is not empty. example: shown if it is missing."""
        value = self._options.get(key)
        if not isinstance(value, str) or not value:
            raise self.error(f"{key!r}, a text such as {example!r}; it is {value!r}")
        return value

    def choice(self, key: str, choices: Sequence[str]) -> str:
        """One of `choices`; the first is the default."""
        value = self._options.get(key, choices[0])
        if value not in choices:
            names = " or ".join(map(repr, choices))
            raise self.error(f"{key!r} to be {names}; it is {value!r}")
        return str(value)

    def integer(self, key: str, default: int, *, minimum: int) -> int:
        value = self._options.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(f"{key!r} to be a whole number of at least {minimum}; it is {value!r}")
        return value

    def number(self, key: str, default: float, *, minimum: float = -math.inf) -> float:
        """A finite number."""
        value = self._options.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and math.isfinite(value) and value >= minimum):
            limit = "" if minimum == -math.inf else f" of at least {minimum:g}"
            raise self.error(f"{key!r} to be a finite number{limit}; it is {value!r}")
        return float(value)

    def size_bytes(self, key: str) -> int:
        """A positive number of bytes: an integer, or a text such as `8GiB`. Required."""
        value = self._options.get(key)
        if not isinstance(value, int | str) or isinstance(value, bool):
            raise self.error(
                f"{key!r}, a number of bytes such as '8GiB' or 8589934592; it is {value!r}"
            )
        return parse_size(key, value)


def make_folder(connector: str, path: Path, option: str = "path") -> None:
    """Create a connector's folder, with mode 0700, if it is missing. Raises ConfigError, also if
    other users can write to it. option: that names it."""
    where = f"--kv-connector-config: the connector {connector} cannot use its folder, {option}"
    try:
        Folder.make(path).close()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{where}: {error}. Give one that exists or can be created.") from error


def parse_size(name: str, value: int | str) -> int:
    """Bytes from a number or from text such as "8GiB" (units of 1024, with or without the i).
    Raises ConfigError."""
    if isinstance(value, int):
        num_bytes = value
    else:
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise ConfigError(
                f"{name}={value!r} is not a size; use a number of bytes, or text such as '8GiB'"
            )
        number = float(match[1]) * _UNITS[match[2].upper()]
        num_bytes = int(min(number, MAX_SIZE_BYTES + 1))
    if num_bytes < 1:
        raise ConfigError(f"{name}={value!r} must be at least one byte")
    if num_bytes > MAX_SIZE_BYTES:
        raise ConfigError(f"{name}={value!r} is more than 1 EiB; no machine has that much")
    return num_bytes
