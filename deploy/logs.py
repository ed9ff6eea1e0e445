"""Log handlers: one line per record. The supervisor adds time and name to what others print."""

import logging
import sys
from typing import Final

from longshore.deploy.log_lines import LineFormat

RELAYED: Final = "%(levelname)s %(name)s: %(message)s"


class _Line(logging.Formatter):
    """As the supervisor would relay it."""

    def __init__(self, format_line: LineFormat) -> None:
        super().__init__(RELAYED)
        self._format_line = format_line

    def format(self, record: logging.LogRecord) -> str:
        return self._format_line("supervisor", super().format(record))


def set_up_logging(level: str, format_line: LineFormat | None = None) -> None:
    """Send records of `level` and above to standard error.

    format_line: of the process that relays the others' lines; None: of one of those.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(RELAYED) if format_line is None else _Line(format_line))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("asyncio", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(max(logging.getLogger().level, logging.WARNING))
    # It warns of every form that is none, which the client is told: logs are not for clients.
    parser = logging.getLogger("python_multipart")
    parser.setLevel(max(logging.getLogger().level, logging.ERROR))
