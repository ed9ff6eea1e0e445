"""The settings of a server as its clients may see them: without secrets."""

import re
from dataclasses import fields
from pathlib import PurePath
from typing import Any, Final

import msgspec

from longshore.protocol.settings import Settings

HIDDEN: Final = "***"
_USER: Final = re.compile(r"(?<=://)[^/@\s]+@")


def shown_settings(settings: Settings) -> dict[str, Any]:
    """All settings by name, as plain data. Hidden are those that are left out of their `repr`, and
    users and passwords in URLs."""
    return {
        field.name: HIDDEN if value is not None and not field.repr else _shown(value)
        for field in fields(settings)
        for value in (getattr(settings, field.name),)
    }


def _shown(value: object) -> object:
    plain = msgspec.to_builtins(value, enc_hook=_path)
    return _USER.sub(f"{HIDDEN}@", plain) if isinstance(plain, str) else plain


def _path(value: object) -> str:
    if isinstance(value, PurePath):
        return str(value)
    raise NotImplementedError(type(value).__name__)
