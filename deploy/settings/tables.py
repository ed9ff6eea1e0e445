"""Settings in tables of TOML files."""

import difflib
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints

import msgspec

from longshore.deploy.settings.options import ServeOptions
from longshore.protocol.errors import ConfigError
from longshore.protocol.model_files import open_regular

MAX_FILE_BYTES: Final = 1 << 20

_FileT = TypeVar("_FileT", bound=msgspec.Struct)


def read_toml(path: Path, kind: type[_FileT], what: str) -> tuple[_FileT, bytes]:
    """A TOML file, as a struct and as it is. what: it is, for messages. Raises ConfigError, with
    the path of the key, for a file that cannot be read, unknown keys and values of wrong types."""
    try:
        with open_regular(path) as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{what} {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return msgspec.convert(tomllib.loads(content.decode()), kind), content
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} is not valid TOML: {error}") from error
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{what} {path}: {readable(error)}") from error


def with_table(
    base: ServeOptions,
    values: Mapping[str, Any],
    where: str,
    *,
    known: Collection[str],
    others: Iterable[str] = (),
    elsewhere: Mapping[str, str],
) -> ServeOptions:
    """`base` with the values of a table. Raises ConfigError.

    where:     the file and the table, for messages.
    known:     settings that the table can have. others: what it can have beside settings.
    elsewhere: of settings that it cannot have, what to do instead.
    """
    for name in values:
        if (advice := elsewhere.get(name)) is not None:
            raise ConfigError(f"{where}.{name} cannot be set here: {advice}")
        if name not in known:
            nearest = difflib.get_close_matches(name, [*known, *others], n=1, cutoff=0.7)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ConfigError(f"{where}.{name} is not a setting{hint}")
    given = dict(values)
    for name in ("kv_connector_config", "ec_connector_config", "speculative_config"):
        if isinstance(given.get(name), dict):
            given[name] = msgspec.json.encode(given[name]).decode()
    try:  # the types first; values are checked by the class, which knows all of them
        read = msgspec.convert(given, _typed_settings(), dec_hook=_path)
    except msgspec.ValidationError as error:
        raise ConfigError(readable(error, where)) from error
    try:
        return replace(base, **{name: getattr(read, name) for name in given})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


@cache
def _typed_settings() -> type[msgspec.Struct]:
    """The settings with their types only: values of one table are not complete."""
    hints = get_type_hints(ServeOptions)
    return msgspec.defstruct(
        "Settings", [(each.name, hints[each.name], msgspec.UNSET) for each in fields(ServeOptions)]
    )


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"Expected `str`, got {type(value).__name__}")


def readable(error: Exception, where: str = "") -> str:
    """msgspec's message, with the path of the key in front: `engines[0].port: Expected ...`."""
    message, _, path = str(error)[:1000].partition(" - at `")
    path = path.rstrip("`").removeprefix("key in ").removeprefix("$").lstrip(".")
    parts = [part for part in (where, path) if part]
    joined = ".".join(parts)
    return f"{joined}: {message}" if joined else message
