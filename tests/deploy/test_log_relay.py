"""Lines of several processes on one stream."""

import io
import json
from datetime import datetime, timedelta

from longshore.deploy.log_lines import json_line
from longshore.deploy.log_relay import ERASE_TO_END, LogRelay


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


def test_a_record_is_an_object_for_programs() -> None:
    stream = io.StringIO()
    relay = LogRelay(stream, json_line)
    relay.feed("gateway", b'INFO longshore.deploy: "quoted": one\n')
    relay.feed("worker 0", "Traceback ü:\n".encode())
    record, other = map(json.loads, stream.getvalue().splitlines())
    assert datetime.fromisoformat(record.pop("time")).utcoffset() == timedelta(0)
    assert record == {
        "process": "gateway",
        "level": "INFO",
        "logger": "longshore.deploy",
        "message": '"quoted": one',
    }
    assert (other["process"], other["level"], other["logger"]) == ("worker 0", None, None)
    assert other["message"] == "Traceback ü:"
