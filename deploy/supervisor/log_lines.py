"""A line of the log: for people, or as JSON for programs."""

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
"""From the name of a process and a line that it wrote, what to show, without its end."""


def text_line(process: str, line: str) -> str:
    """The local time of day first; behind the message, in brackets, its fields. A record with a
    traceback is several lines, each of which begins so."""
    record = read_record(line)
    shown = printable(line) if record is None else show_record(record)
    at_s = None if record is None else record.time_s
    head = f"{time.strftime('%H:%M:%S', time.localtime(at_s))} [{process}]"
    return "\n".join(f"{head} {each}" for each in shown.split("\n"))


def json_line(process: str, line: str) -> str:
    """An object: `time` (UTC, ISO 8601), `process`, `level`, `logger` and `message`, then what the
    record has: its fields by their names, and `traceback`. What is no record of a logger has
    neither level nor logger."""
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
