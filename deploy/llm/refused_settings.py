"""Settings of vLLM that a class here does not have: they are rejected by name."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

Refused: TypeAlias = Mapping[str, tuple[tuple[object, ...], str]]
"""Setting: values that change nothing, beside None, and what to do instead of another value."""

KindT = TypeVar("KindT")


def refusing(refused: Refused) -> Callable[[type[KindT]], type[KindT]]:
    """A decorator of classes whose constructors take keywords. Their constructors then raise
    ValueError for a setting that is refused."""

    def decorate(kind: type[KindT]) -> type[KindT]:
        init: Callable[..., None] = kind.__init__

        @functools.wraps(init)
        def __init__(self: KindT, **settings: Any) -> None:
            for name in refused.keys() & settings.keys():
                neutral, advice = refused[name]
                value = settings.pop(name)
                if value is not None and value not in neutral:
                    raise ValueError(f"{kind.__name__}: {name} is not supported; {advice}")
            init(self, **settings)

        kind.__init__ = __init__  # type: ignore[method-assign, assignment]
        return kind

    return decorate
