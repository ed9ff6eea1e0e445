"""The end of a process that has loaded torch."""

import logging
import os
import sys
from typing import NoReturn


def end_process(status: object) -> NoReturn:
    """End this process without what Python does at its end, but with all that was logged.

    Python ends a daemon thread that returns from a library at that time by unwinding its stack, and
    the destructors of C++ on it answer by aborting the process.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status if isinstance(status, int) else 0)
