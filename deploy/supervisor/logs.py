"""Log handlers of the supervisor and the gateways: one line per record."""

import logging

from longshore.deploy.supervisor.log_lines import LineFormat, json_line
from longshore.protocol.logs.records import (
    FramedFormatter,
    send_records,
    write_records,
)


class _Line(FramedFormatter):
    """Formats the supervisor's own records like relayed ones."""

    def __init__(self, format_line: LineFormat) -> None:
        super().__init__()
        self.format_line = format_line

    def format(self, record: logging.LogRecord) -> str:
        return self.format_line("supervisor", super().format(record))


def writes_json() -> bool:
    """Whether this process writes its records as JSON: then nothing else may be between them."""
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    return any(isinstance(each, _Line) and each.format_line is json_line for each in formatters)


def set_up_logging(
    level: str, format_line: LineFormat | None = None, *, is_relayed: bool = False
) -> None:
    """Write records of `level` and above to standard error.

    format_line: line format, for the process that relays the others' lines.
    is_relayed:  for a process whose lines are relayed.
    """
    if format_line is None:
        send_records(level, is_relayed=is_relayed)
    else:
        write_records(level, _Line(format_line))
        logging.captureWarnings(format_line is json_line)  # of libraries, which print them
    # The last two warn about every malformed request or form, so that clients could fill the log.
    # The client gets the error in its response.
    for noisy, minimum in (
        ("asyncio", logging.WARNING),
        ("uvicorn.error", logging.ERROR),
        ("python_multipart", logging.ERROR),
    ):
        logging.getLogger(noisy).setLevel(max(logging.getLogger().level, minimum))
