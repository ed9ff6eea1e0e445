"""A line of the log: for people, or as JSON for programs."""

import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias

LogFormat: TypeAlias = Literal["text", "json"]
LineFormat: TypeAlias = Callable[[str, str], str]
"""From the name of a process and what it wrote, a line without its end."""

_RECORD: Final = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)", re.DOTALL)


def text_line(process: str, text: str) -> str:
    """The local time of day first."""
    return f"{time.strftime('%H:%M:%S')} [{process}] {text}"


def json_line(process: str, text: str) -> str:
    """An object: `time` (UTC, ISO 8601), `process`, `level`, `logger` and `message`. What is no
    record of a logger, as a line of a traceback, has neither level nor logger."""
    record = _RECORD.fullmatch(text)
    level, logger, message = (None, None, text) if record is None else record.groups()
    return json.dumps(
        {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "process": process,
            "level": level,
            "logger": logger,
            "message": message,
        },
        ensure_ascii=False,
    )


LINE_FORMATS: Final[dict[LogFormat, LineFormat]] = {"text": text_line, "json": json_line}
