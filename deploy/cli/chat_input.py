"""What a person at a terminal says to `longshore chat`: a line, or several at once."""

import contextlib
import importlib
import select
import sys
from typing import Final

PASTE_GAP_S: Final = 0.02
"""Lines of one paste come closer together than this."""
_GOES_ON: Final = "\\"


def use_line_editing() -> None:
    """Edit what is typed, call it back, and take a paste in as a whole, where readline is there."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")


def read_message(prompt: str) -> str:
    """A line, with those that were pasted with it or that follow one with a backslash at its end. A
    command, `/...`, is one line. Raises EOFError or KeyboardInterrupt where somebody leaves."""
    lines = [input(prompt)]
    while not lines[0].startswith("/"):
        if lines[-1].endswith(_GOES_ON):
            lines[-1] = lines[-1].removesuffix(_GOES_ON)
        elif not select.select([sys.stdin], [], [], PASTE_GAP_S)[0]:
            break
        lines.append(input())
    return "\n".join(lines)
