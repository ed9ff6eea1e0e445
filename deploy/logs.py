"""Log handlers of the processes here: one line per record."""

import logging

from longshore.deploy.log_lines import LineFormat
from longshore.protocol.log_records import FramedFormatter, send_records, write_records


class _Line(FramedFormatter):
    """As the supervisor would relay it."""

    def __init__(self, format_line: LineFormat) -> None:
        super().__init__()
        self._format_line = format_line

    def format(self, record: logging.LogRecord) -> str:
        return self._format_line("supervisor", super().format(record))


def set_up_logging(
    level: str, format_line: LineFormat | None = None, *, is_relayed: bool = False
) -> None:
    """Send records of `level` and above to standard error.

    format_line: of the process that relays the others' lines.
    is_relayed:  of one of those.
    """
    if format_line is None:
        send_records(level, is_relayed=is_relayed)
    else:
        write_records(level, _Line(format_line))
    for noisy in ("asyncio", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(max(logging.getLogger().level, logging.WARNING))
    # It warns of every form that is none, which the client is told: logs are not for clients.
    parser = logging.getLogger("python_multipart")
    parser.setLevel(max(logging.getLogger().level, logging.ERROR))
