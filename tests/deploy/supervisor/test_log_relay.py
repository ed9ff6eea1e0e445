"""Log lines of several processes on one stream."""

import errno
import io
import json
import logging
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.deploy.supervisor.log_lines import (
    LineFormat,
    json_line,
    text_line,
)
from longshore.deploy.supervisor.log_relay import ERASE_TO_END, MAX_LINE_BYTES, LogRelay
from longshore.protocol.logs.records import FramedFormatter, fields


def at_noon(process: str, text: str) -> str:
    return f"noon [{process}] {text}"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_get_the_name_of_their_process_however_they_are_cut() -> None:
    stream = io.StringIO()
    relay = LogRelay(stream, at_noon)
    relay.feed("worker 0", b"load")
    relay.feed("gateway", b"one\ntwo\nthr")
    relay.feed("worker 0", b"ing\n\xff bad\n")
    relay.end("gateway")
    assert stream.getvalue().splitlines() == [
        "noon [gateway] one",
        "noon [gateway] two",
        "noon [worker 0] loading",
        "noon [worker 0] � bad",
        "noon [gateway] thr",
    ]


def test_progress_bar_leaves_only_its_last_state_in_a_file() -> None:
    stream = io.StringIO()
    relay = LogRelay(stream, at_noon)
    for chunk in (b"\r 10%", b"\r 50%", b"\r100%", b"\ndone\n"):
        relay.feed("worker 0", chunk)
    assert stream.getvalue() == "noon [worker 0] 100%\nnoon [worker 0] done\n"


def test_progress_bar_is_drawn_in_place_on_a_terminal() -> None:
    stream = Terminal()
    relay = LogRelay(stream, at_noon)
    relay.feed("worker 0", b"\r 10%")
    relay.feed("worker 0", b"\r100%\n")
    assert (
        stream.getvalue()
        == f"noon [worker 0]  10%{ERASE_TO_END}\rnoon [worker 0] 100%{ERASE_TO_END}\n"
    )


def test_closed_stream_is_no_error() -> None:
    stream = io.StringIO()
    relay = LogRelay(stream, at_noon)
    stream.close()
    relay.feed("worker 0", b"too late\n")


def framed(message: str, **about: str | int) -> bytes:
    """A record as a process writes it."""
    record = logging.LogRecord("longshore.deploy", logging.INFO, "a.py", 1, message, (), None)
    record.__dict__.update(fields(**about))
    return f"{FramedFormatter().format(record)}\n".encode()


def test_a_record_is_an_object_for_programs() -> None:
    stream = io.StringIO()
    relay = LogRelay(stream, json_line)
    relay.feed("gateway", framed('"quoted": one', request_id="r", step_id=4))
    relay.feed("worker 0", "Traceback ü:\n".encode())
    record, other = map(json.loads, stream.getvalue().splitlines())
    assert datetime.fromisoformat(record.pop("time")).utcoffset() == timedelta(0)
    assert record == {
        "process": "gateway",
        "level": "INFO",
        "logger": "longshore.deploy",
        "message": '"quoted": one',
        "request_id": "r",
        "step_id": 4,
    }
    assert (other["process"], other["level"], other["logger"]) == ("worker 0", None, None)
    assert other["message"] == "Traceback ü:"


def test_a_record_is_a_line_for_people() -> None:
    stream = io.StringIO()
    relay = LogRelay(stream, text_line)
    relay.feed("gateway", framed("done", request_id="r", step_id=4))
    time, _, rest = stream.getvalue().partition(" ")
    assert len(time) == len("12:00:00")
    assert rest == "[gateway] done [request_id=r step_id=4]\n"


@pytest.mark.parametrize("format_line", [text_line, json_line])
@given(text=st.text(max_size=30))
def test_what_a_stranger_chose_is_one_line_in_either_format(
    format_line: LineFormat, text: str
) -> None:
    nasty = f"{text}\r\n12:00:00 [gateway] ERROR a: forged\x1b[2J\x9b\u2028"
    stream = io.StringIO()
    relay = LogRelay(stream, format_line)
    relay.feed("gateway", framed(nasty, request_id=nasty))
    relay.feed("gateway", f"{nasty.splitlines()[0]}\x1b[2J\n".encode())
    shown = stream.getvalue()
    assert shown.endswith("\n")
    for line in shown.removesuffix("\n").split("\n"):
        assert line.replace("\t", " ").isprintable()
    if format_line is json_line:
        assert json.loads(shown.split("\n")[0])["request_id"] == nasty
    else:
        assert len(shown.splitlines()) <= 3  # output that was not logged may have line ends


class FullDisk(io.StringIO):
    """Accepts nothing while `is_full`."""

    is_full = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_a_line_that_cannot_be_written_is_lost_and_the_next_one_is_not() -> None:
    stream = FullDisk()
    relay = LogRelay(stream, at_noon)
    for number, stream.is_full in enumerate([False, True, False]):
        relay.feed("worker 0", f"line {number}\n".encode())
    assert stream.getvalue() == "noon [worker 0] line 0\nnoon [worker 0] line 2\n"


def test_a_record_after_an_unfinished_line_is_a_record() -> None:
    stream = io.StringIO()
    relay = LogRelay(stream, json_line)
    relay.feed("worker 0", b"progress 10%\rprogress 50%" + framed("it broke", request_id="r"))
    other, record = map(json.loads, stream.getvalue().splitlines())
    assert (other["message"], other["level"]) == ("progress 50%", None)
    assert (record["message"], record["request_id"]) == ("it broke", "r")


def test_a_line_without_an_end_is_written_in_parts() -> None:
    stream = io.StringIO()
    relay = LogRelay(stream, at_noon)
    for _ in range(48):
        relay.feed("worker 0", b"x" * 65_536)
    num_written = stream.getvalue().count("x")
    assert 48 * 65_536 - MAX_LINE_BYTES <= num_written < 48 * 65_536
    assert max(map(len, stream.getvalue().splitlines())) <= MAX_LINE_BYTES + 20
    relay.end("worker 0")
    assert stream.getvalue().count("x") == 48 * 65_536
