"""The features that a client program uses, one after the other.

A program runs in the client's environment, with the server's URL and model as arguments. It prints
the name of each feature, and ends with an error at the first one that fails.
"""

import sys
from collections.abc import Callable
from typing import Final

URL: Final = sys.argv[1]
MODEL: Final = sys.argv[2]
QUESTION: Final = "C417 B42 red\nC009 B07 blue\nWhere is C417?"
ANSWER: Final = "C417 B42 red"
"""The demo model's only correct one."""

_features: list[Callable[[], None]] = []


def feature(use: Callable[[], None]) -> Callable[[], None]:
    """The function's name says what it uses, and it raises if that does not work."""
    _features.append(use)
    return use


def use_all() -> None:
    for use in _features:
        use()
        print(use.__name__, flush=True)
