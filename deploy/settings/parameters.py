"""Makes flags, environment variables and help of settings, for cyclopts."""

from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, Final, TypeVar, get_type_hints

from cyclopts import Group, Parameter

from longshore.deploy.settings.counts import read_count
from longshore.protocol.settings import Setting, Settings

_SECTIONS: Final = {
    name: Group.create_ordered(name)
    for name in (
        "Model",
        "Server",
        "KV cache",
        "Scheduling",
        "Speculative decoding",
        "Several workers",
        "Several hosts",
        "KV beyond the device",
        "KV events",
        "Operation",
    )
}
"""Sections of `--help`, in this order."""

_SettingsT = TypeVar("_SettingsT", bound=Settings)


def _demo_model(folders: object) -> str:
    return "the bundled demo model"


def _one_model(kind: type, value: str, *, delimiter: str | None = None) -> list[str]:
    return [value]


SHOWN_AS_DEMO_MODEL: Final = Parameter(show_default=_demo_model, env_var_split=_one_model)
"""A model argument. In `--help`, its default has no path, which depends on the machine. A variable
has one model, whose id may contain a colon."""


def with_parameters(options: type[_SettingsT]) -> type[_SettingsT]:
    """Decorator of a dataclass composed of settings: annotates the fields, inherited ones too, with
    cyclopts' parameters. Environment variables have the names of the flags."""
    hints = get_type_hints(options, include_extras=True)
    options.__annotations__ = {
        each.name: _with_parameter(hints[each.name]) for each in fields(options)
    }
    return options


def with_parameters_of(
    settings: type[Settings],
) -> Callable[[type[_SettingsT]], type[_SettingsT]]:
    """Decorator of settings that repeat some of another command's: fields with the name of one of
    `settings` take its type, bounds, help and flag; their defaults are their own."""
    theirs = get_type_hints(settings, include_extras=True)

    def annotate(options: type[_SettingsT]) -> type[_SettingsT]:
        own = get_type_hints(options, include_extras=True)
        options.__annotations__ = {
            each.name: _without_section(theirs[each.name])
            if each.name in theirs
            else own[each.name]
            for each in fields(options)
        }
        return options

    return annotate


def _without_section(hint: Any) -> Any:
    (setting,) = (mark for mark in hint.__metadata__ if isinstance(mark, Setting))
    marks = (mark for mark in hint.__metadata__ if not isinstance(mark, Parameter))
    return Annotated[(hint.__origin__, *marks, _parameter(setting))]


def _with_parameter(hint: Any) -> Any:
    if any(isinstance(mark, Parameter) for mark in hint.__metadata__):
        return hint  # inherited from a class that has been through this
    (setting,) = (mark for mark in hint.__metadata__ if isinstance(mark, Setting))
    section = Parameter(group=_SECTIONS[setting.section])
    return Annotated[hint, Parameter.combine(_parameter(setting), section)]


def _parameter(setting: Setting) -> Parameter:
    return Parameter(
        help=setting.help,
        alias=setting.alias,
        converter=read_count if setting.is_count else None,
    )
