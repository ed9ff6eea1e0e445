"""Structured log records, sent between processes as one line each.

A supervised process writes each log record as a line of JSON that begins with RECORD_MARK. The
supervisor, which relays the output, turns it into text or JSON and can distinguish it from output
that no logger wrote. A logging call passes its fields as `extra=fields(request_id=...)`.
"""

import contextlib
import json
import logging
import math
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, TypeAlias

import msgspec

Field: TypeAlias = str | int | float | bool | None

RECORD_MARK: Final = "\x1e"  # ASCII record separator, as in RFC 7464
MAX_FIELD_CHARACTERS: Final = 500
MAX_MESSAGE_CHARACTERS: Final = 4000

logger = logging.getLogger(__name__)

_ATTRIBUTE: Final = "fields"


class Record(msgspec.Struct, frozen=True):
    """One log record.

    time_s:    seconds since 1970.
    context:   fields of the process, the same in all its records.
    traceback: traceback of the logged exception, in several lines.
    """

    time_s: float
    level: str
    logger: str
    message: str
    fields: dict[str, Field] = {}
    context: dict[str, Field] = {}
    traceback: str | None = None


def fields(**values: Field) -> dict[str, dict[str, Field]]:
    """The `extra` argument of a logging call. Names end in their unit; None values are omitted.

    Use `request_id` for what concerns a request, and `step_id` for what concerns a step.
    """
    return {_ATTRIBUTE: {name: value for name, value in values.items() if value is not None}}


def record_of(record: logging.LogRecord, context: Mapping[str, Field] = {}) -> Record:
    """Converts the record of a logger: overlong texts are cut, and undecodable ones escaped."""
    exception = record.exc_info
    return Record(
        record.created,
        record.levelname,
        record.name,
        _cut(record.getMessage(), MAX_MESSAGE_CHARACTERS),
        {name: _field(value) for name, value in getattr(record, _ATTRIBUTE, {}).items()},
        dict(context),
        _encodable(logging.Formatter().formatException(exception)) if exception else None,
    )


def _field(value: Field) -> Field:
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else str(value)
    return _cut(value, MAX_FIELD_CHARACTERS) if isinstance(value, str) else value


def _cut(text: str, max_characters: int) -> str:
    return _encodable(text if len(text) <= max_characters else f"{text[:max_characters]}...")


def _encodable(text: str) -> str:
    """Escapes surrogates, which UTF-8 cannot represent."""
    return text.encode("utf-8", "backslashreplace").decode()


def read_record(line: str) -> Record | None:
    """Decodes a line of a process's output; None if it is not a log record."""
    if line.startswith(RECORD_MARK):
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(line[len(RECORD_MARK) :], type=Record)
    return None


def show_record(record: Record) -> str:
    """Text for a terminal: one line, and one marked line per line of the traceback. At info, which
    is the normal course of things, without level and logger."""
    shown = [f"{name}={_show(value)}" for name, value in record.fields.items()]
    head = printable(record.message)
    if record.level != "INFO":
        head = f"{record.level} {record.logger}: {head}"
    lines = [f"{head} [{' '.join(shown)}]" if shown else head]
    if record.traceback is not None:
        lines += [f"  | {printable(line)}" for line in record.traceback.splitlines()]
    return "\n".join(lines)


def _show(value: Field) -> str:
    text = str(value)
    is_plain = text and not any(character in ' "=[]' for character in text)
    return printable(text) if is_plain else printable(json.dumps(text, ensure_ascii=False))


def printable(text: str) -> str:
    """Escapes non-printable characters, so that text cannot start a line or control a terminal."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character == "\t"
        else character.encode("unicode_escape").decode()
        for character in text
    )


class FramedFormatter(logging.Formatter):
    """Formats records as lines for a process that relays them."""

    def __init__(self, context: Mapping[str, Field] = {}) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, Any] = msgspec.structs.asdict(record_of(record, self._context))
        return RECORD_MARK + json.dumps(content)  # ASCII, and therefore one line


class _TextFormatter(logging.Formatter):
    """Formats records as text for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return show_record(record_of(record))


def send_records(level: str, *, is_relayed: bool, **context: Field) -> None:
    """Write records of `level` and above to standard error: framed if another process relays them,
    else as text. Uncaught exceptions are logged, too. `context` is added to each framed record."""
    write_records(level, FramedFormatter(context) if is_relayed else _TextFormatter())
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(
        args.exc_type, args.exc_value, args.exc_traceback
    )


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None
) -> None:
    if issubclass(kind, Exception) and error is not None:
        about = (kind, error, traceback)
        logger.error("uncaught exception: %s", kind.__name__, exc_info=about)


def write_records(level: str, formatter: logging.Formatter) -> None:
    """Write records of `level` and above to standard error, in the format of `formatter`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
