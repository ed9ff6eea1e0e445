"""Log records from a logger to the process that shows them."""

import logging
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.protocol.logs.records import (
    MAX_MESSAGE_CHARACTERS,
    RECORD_MARK,
    FramedFormatter,
    Record,
    fields,
    printable,
    read_record,
    show_record,
)

TEXT = st.text(st.characters(), max_size=40)  # including surrogates and control characters


def frame(message: str, **about: str | float | None) -> str:
    extra = fields(**about)
    record = logging.LogRecord("longshore.a", logging.WARNING, "a.py", 1, message, (), None)
    record.__dict__.update(extra)
    return FramedFormatter({"rank": 3}).format(record)


@given(TEXT, TEXT)
def test_a_framed_record_is_one_line_that_can_be_read_back(message: str, value: str) -> None:
    line = frame(message, request_id=value)
    assert line.isascii()
    assert "\n" not in line
    record = read_record(line)
    assert record is not None
    assert (record.level, record.logger, record.message) == ("WARNING", "longshore.a", message)
    assert record.fields == {"request_id": value}
    assert record.context == {"rank": 3}


@given(TEXT, TEXT)
def test_shown_text_cannot_start_a_line_or_control_a_terminal(message: str, id_: str) -> None:
    shown = show_record(Record(0.0, "INFO", "a", message, {"request_id": id_}))
    assert shown.replace("\t", " ").isprintable()


def test_fields_follow_the_message_and_those_that_are_none_are_omitted() -> None:
    record = read_record(frame("ended", request_id="r 1", ttft_ms=1.23456, tokens=7, row=None))
    assert record is not None
    assert show_record(record) == (
        'WARNING longshore.a: ended [request_id="r 1" ttft_ms=1.235 tokens=7]'
    )


def test_level_and_logger_are_shown_of_what_is_not_the_normal_course() -> None:
    shown = {level: show_record(Record(0.0, level, "a", "m")) for level in ("DEBUG", "INFO")}
    assert shown == {"DEBUG": "DEBUG a: m", "INFO": "m"}


@pytest.mark.parametrize("request_id", ["a", "failed", "a request has failed"])
def test_an_id_that_the_message_happens_to_contain_is_shown(request_id: str) -> None:
    shown = show_record(
        Record(0.0, "INFO", "a", "a request has failed", {"request_id": request_id})
    )
    assert "[request_id=" in shown


def test_an_overlong_field_or_message_is_cut() -> None:
    record = read_record(frame("m" * 300_000, request_id="x" * 10_000))
    assert record is not None
    assert len(str(record.fields["request_id"])) < 600
    assert len(record.message) == MAX_MESSAGE_CHARACTERS + len("...")


def test_values_that_json_cannot_represent_become_text() -> None:
    line = frame("bad \ud800", request_id="\udfff", idle_s=math.inf, ttft_ms=math.nan)
    record = read_record(line)
    assert record is not None
    assert record.message == "bad \\ud800"
    assert record.fields == {"request_id": "\\udfff", "idle_s": "inf", "ttft_ms": "nan"}


def test_lines_of_a_traceback_are_marked_so_that_none_looks_like_a_record() -> None:
    traceback = "Traceback:\nValueError: a\n12:00:00 [gateway] ERROR forged"
    shown = show_record(Record(0.0, "ERROR", "a", "m", traceback=traceback)).splitlines()
    assert shown[0] == "ERROR a: m"
    assert all(line.startswith("  | ") for line in shown[1:])


def test_a_line_that_is_not_a_record_is_none() -> None:
    for line in ("", "INFO a: b", RECORD_MARK, f"{RECORD_MARK}[]", f"{RECORD_MARK}{{"):
        assert read_record(line) is None


def test_printable_text_is_unchanged() -> None:
    assert printable("grüße 你好\tx") == "grüße 你好\tx"
    assert printable("a\x1b[31m\u2028\u202eb\n") == "a\\x1b[31m\\u2028\\u202eb\\n"


@pytest.mark.parametrize("where", ["{}", "threading.Thread(target=lambda: {}).start()"])
def test_an_uncaught_exception_is_one_record(where: str) -> None:
    code = (
        "import threading; from longshore.protocol.logs.records import send_records\n"
        f"send_records('info', is_relayed=True, rank=1)\n{where.format('1 / 0')}"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    (line,) = run.stderr.removesuffix("\n").split("\n")
    record = read_record(line)
    assert record is not None
    assert (record.level, record.context) == ("ERROR", {"rank": 1})
    assert "ZeroDivisionError" in record.message
    assert "Traceback" in (record.traceback or "")
