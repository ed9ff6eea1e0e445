"""Formats of a log line: text, or JSON for programs."""

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias

from longshore.protocol.logs.records import (
    printable,
    read_record,
    show_record,
)

LogFormat: TypeAlias = Literal["text", "json"]
LineFormat: TypeAlias = Callable[[str, str], str]
"""Formats a line that a process wrote, given its name and the line, without a line end."""


def text_line(process: str, line: str) -> str:
    """Local time, process, message, and fields in brackets. A record with a traceback has several
    lines, all with time and process."""
    record = read_record(line)
    shown = printable(line) if record is None else show_record(record)
    at_s = None if record is None else record.time_s
    head = f"{time.strftime('%H:%M:%S', time.localtime(at_s))} [{process}]"
    return "\n".join(f"{head} {each}" for each in shown.split("\n"))


def json_line(process: str, line: str) -> str:
    """An object with `time` (UTC, ISO 8601), `process`, `level`, `logger` and `message`, then the
    record's fields by name, and `traceback`. Output that was not logged has null as level and
    logger."""
    record = read_record(line)
    content: dict[str, Any]
    if record is None:
        content = {"process": process, "level": None, "logger": None, "message": line}
    else:
        content = {
            "process": process,
            "level": record.level,
            "logger": record.logger,
            "message": record.message,
            **record.context,
            **record.fields,
        }
        if record.traceback is not None:
            content["traceback"] = record.traceback
    at_s = time.time() if record is None else record.time_s
    content = {
        "time": datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
    } | content
    text = json.dumps(content, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(content)


LINE_FORMATS: Final[dict[LogFormat, LineFormat]] = {"text": text_line, "json": json_line}
