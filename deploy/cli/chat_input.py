"""Messages typed or pasted into `longshore chat`: one line, or several."""

import contextlib
import importlib
import select
import sys
from typing import Final

PASTE_GAP_S: Final = 0.02
"""The lines of one paste arrive within this time of each other."""
_CONTINUATION: Final = "\\"


def use_line_editing() -> None:
    """Enable line editing, history and multi-line pastes if readline is available."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")


def read_message(prompt: str) -> str:
    """Read a line, with the lines pasted together with it and those that continue one that ends
    with a backslash. A command, `/...`, is one line. Raises EOFError or KeyboardInterrupt when the
    user quits."""
    lines = [input(prompt)]
    while not lines[0].startswith("/"):
        if lines[-1].endswith(_CONTINUATION):
            lines[-1] = lines[-1].removesuffix(_CONTINUATION)
        elif not select.select([sys.stdin], [], [], PASTE_GAP_S)[0]:
            break
        lines.append(input())
    return "\n".join(lines)
