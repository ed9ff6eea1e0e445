"""How a process that has loaded torch ends."""

import logging
import os
import signal
import sys
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

RETRY_S: Final = 0.01


def exit_at(signals: Iterable[signal.Signals]) -> None:
    """At one of these signals, run every `finally` and exit with status 0: it is not an error.

    Python discards what a handler raises within a callback, such as the ones that the import of a
    module leaves behind. Then the exit is tried again.
    """
    for number in (*signals, signal.SIGALRM):
        signal.signal(number, _exit)
    sys.unraisablehook = _retry_exit


def ignore(signals: Iterable[signal.Signals]) -> None:
    """Ignore these signals from now on."""
    for number in (*signals, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def _retry_exit(discarded: "UnraisableHookArgs") -> None:
    if isinstance(discarded.exc_value, SystemExit):
        signal.setitimer(signal.ITIMER_REAL, RETRY_S)
    else:
        sys.__unraisablehook__(discarded)


def end_process(status: object) -> NoReturn:
    """End this process without what Python does at its end, but with all that was logged.

    Python ends a daemon thread that returns from a library at that time by unwinding its stack, and
    the destructors of C++ on it answer by aborting the process.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status if isinstance(status, int) else 0)
