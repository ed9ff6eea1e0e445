"""What a config.json says about some modules of a model: by their names, or by patterns of names.

The patterns are other people's. Each name is compared with them in a bounded time.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from longshore.protocol.errors import shortened
from longshore.protocol.pattern_cost import max_steps
from longshore.worker.models.json_fields import JsonFields

T = TypeVar("T")

MAX_NAME: Final = 128
"""Characters in the name of a module; the longest ones of published models have some 80."""
MAX_STEPS: Final = 1 << 24
"""Of all patterns, to compare them with one name: at most some 100 ms, and usually microseconds."""


@dataclass(frozen=True)
class ByModule(Generic[T]):
    """exact: by names. patterns: in order; they match the beginning of a name."""

    exact: Mapping[str, T] = field(default_factory=dict)
    patterns: tuple[tuple[re.Pattern[str], T], ...] = ()

    def of(self, name: str, default: T) -> T:
        """That of the name, else that of the first pattern, else the default."""
        if name in self.exact:
            return self.exact[name]
        return next((value for pattern, value in self.patterns if pattern.match(name)), default)


def read_patterns(
    fields: JsonFields, key: str, texts: Iterable[tuple[str, T]]
) -> tuple[tuple[re.Pattern[str], T], ...]:
    """texts: patterns, which are under `key`. Raises BrokenCheckpoint for one that is not valid, or
    could take long."""
    found = []
    num_steps = 0
    for text, value in texts:
        try:
            found.append((re.compile(text), value))
        except (re.error, OverflowError, RecursionError) as error:
            raise fields.wrong(key, f"valid patterns ({shortened(repr(text))}: {error})") from None
        try:
            num_steps += max_steps(text, MAX_NAME)
            if num_steps > MAX_STEPS:
                raise ValueError("repeats too much")
        except ValueError as error:
            raise fields.wrong(
                key, f"patterns that take little time, but {shortened(repr(text))} {error}"
            ) from None
    return tuple(found)
