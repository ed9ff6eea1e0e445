"""Fields of a request that this server does not know.

Clients for other servers send such fields, and most have no effect on the answer. They are ignored,
and named in a response header and in the log. With `--strict-requests` they are rejected.
"""

import re
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Final

from longshore.deploy.requests.errors import RequestError, invalid
from longshore.protocol.errors import shortened

IGNORED_FIELDS_HEADER: Final = b"x-longshore-ignored-fields"
MAX_NAMES: Final = 32
MAX_NAME_CHARACTERS: Final = 64

_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9_.\[\]-]")


class IgnoredFields:
    """The ignored fields of one HTTP request.

    is_strict: reject them instead.
    names:     the first ones, as clients see them: short, and without characters that a header or a
               log line gives a meaning to.
    """

    def __init__(self, *, is_strict: bool) -> None:
        self.is_strict = is_strict
        self.names: list[str] = []

    def add(self, names: Iterable[str]) -> None:
        """Raises RequestError, naming the first one, in strict mode."""
        for name in names:
            if self.is_strict:
                raise unknown_field(name)
            shown = _NOT_IN_A_NAME.sub("?", name[:MAX_NAME_CHARACTERS]) or "?"
            if len(self.names) < MAX_NAMES and shown not in self.names:
                self.names.append(shown)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response header; none if nothing was ignored."""
        if not self.names:
            return []
        return [(IGNORED_FIELDS_HEADER, ", ".join(self.names).encode())]


_current: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)


def begin_request(*, is_strict: bool) -> IgnoredFields:
    """Collect the ignored fields of the request that the current task serves."""
    fields = IgnoredFields(is_strict=is_strict)
    _current.set(fields)
    return fields


def are_rejected() -> bool:
    """Whether unknown fields of the current request are rejected."""
    current = _current.get()
    return current is not None and current.is_strict


def ignore_fields(names: Iterable[str]) -> None:
    """The current request has these unknown fields. Raises RequestError in strict mode."""
    current = _current.get()
    if current is not None:
        current.add(names)


def unknown_field(name: str) -> RequestError:
    return invalid(f"unknown parameter {shortened(name)!r}", param=name, code="unknown_parameter")
