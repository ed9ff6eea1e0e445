"""What users can set: one annotated field says a setting's type, bounds, section and help.

    max_num_seqs: Annotated[
        int, Meta(ge=1, le=1 << 16), Setting("Scheduling", "Maximum number of running requests.")
    ] = 256

Each component has such fields in a class of its own, beside its config. `deploy/` composes these
classes by inheritance, makes flags and environment variables of the fields, and hands each
component its part back: see `part_of`. No component knows the command line.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from inspect import signature
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from longshore.protocol.errors import ConfigError

MAX_TIMEOUT_S: Final = 7 * 24 * 3600
Duration: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT_S)]
"""A limit in seconds."""

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class Setting:
    """Marks a field that users can set: its environment variable and its flag have its name.

    section: of `--help`.
    help:    what it does, for users.
    alias:   a further flag.
    is_count: may be written as 32k (32,000) or 32K (32,768).
    because: why a value outside of the bounds is rejected, if that is not plain.
    """

    section: str
    help: str
    alias: str | None = None
    is_count: bool = False
    because: str | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of the settings of a component. Raises ConfigError naming the first one whose value is
    outside of its bounds (`msgspec.Meta`), or is none of its choices (`Literal`)."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, check in _checks(kind):
            if (value := getattr(self, name)) is not None:
                check(value)


def part_of(kind: type[ConfigT], settings: Settings, /, **others: Any) -> ConfigT:
    """An instance of the dataclass or Struct `kind` with the values of all fields that `settings`
    has, too, and with `others`, which take precedence."""
    names = signature(kind).parameters.keys() & {each.name for each in fields(settings)}
    return kind(**{name: getattr(settings, name) for name in names} | others)


def read_config(path: Path, kind: type[ConfigT]) -> ConfigT:
    """Read the configuration of a process. Raises ConfigError for a file that is not one."""
    try:
        content = path.read_bytes()
        config = msgspec.json.decode(content, type=kind)
        if unknown := _unknown(msgspec.json.decode(content), msgspec.to_builtins(config)):
            raise ConfigError(f"{path}: {unknown} is not a setting")
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return config


def _unknown(given: object, known: object) -> str | None:
    """The path of a key that decoding has ignored, as msgspec does for dataclasses."""
    match given, known:
        case dict(), dict():
            pairs = [(key, value, known.get(key)) for key, value in given.items()]
            missing = next((key for key in given if key not in known), None)
        case list(), list():
            pairs = [(index, *pair) for index, pair in enumerate(zip(given, known, strict=True))]
            missing = None
        case _:
            return None
    if missing is not None:
        return str(missing)
    found = ((key, _unknown(value, other)) for key, value, other in pairs)
    return next((f"{key}.{path}" for key, path in found if path is not None), None)


@cache
def _checks(kind: Any) -> list[tuple[str, Callable[[Any], None]]]:
    """The fields of a class of settings whose values are limited, each with its check."""
    hints = get_type_hints(kind, include_extras=True)
    found = ((each.name, _check_of(each.name, hints[each.name])) for each in fields(kind))
    return [(name, check) for name, check in found if check is not None]


def _check_of(name: str, hint: Any) -> Callable[[Any], None] | None:
    marks, choices = _parts(hint)
    if choices:

        def check_choice(value: object) -> None:
            if value not in choices:
                raise ConfigError(f"{name}={value!r} is unknown; use one of {', '.join(choices)}")

        return check_choice
    bounds = next((mark for mark in marks if isinstance(mark, msgspec.Meta)), None)
    if bounds is None:
        return None
    least = -math.inf if bounds.ge is None else bounds.ge
    most = math.inf if bounds.le is None else bounds.le
    above = -math.inf if bounds.gt is None else bounds.gt
    because = next((mark.because for mark in marks if isinstance(mark, Setting)), None)
    said = _said(bounds) + ("" if because is None else f", because {because}")

    def check_bounds(value: float) -> None:
        if not (least <= value <= most and above < value):
            raise ConfigError(f"{name}={value} must be {said}")

    return check_bounds


def _parts(hint: Any) -> tuple[list[object], tuple[str, ...]]:
    """What a type is annotated with, at any depth, and the strings that it is limited to."""
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return [], arguments
    marks: list[object] = []
    if get_origin(hint) is Annotated:
        hint, *marks = arguments
        arguments = (hint,)
    elif get_origin(hint) not in (Union, UnionType):
        return [], ()
    choices: tuple[str, ...] = ()
    for argument in arguments:
        inner, found = _parts(argument)
        marks += inner
        choices += found
    return marks, choices


def _said(bounds: msgspec.Meta) -> str:
    match bounds.ge, bounds.gt, bounds.le:
        case None, least, None:
            return f"above {least}"
        case None, least, most:
            return f"above {least} and at most {most}"
        case least, _, None:
            return f"at least {least}"
        case least, _, most:
            return f"between {least} and {most}"
