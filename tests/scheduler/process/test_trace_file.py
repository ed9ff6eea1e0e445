"""The file of a scheduler trace, and the thread that writes it."""

import json
import logging
import os
import stat
import threading
from pathlib import Path

import pytest

from longshore.scheduler.process import trace_file
from longshore.scheduler.process.trace_file import TraceFile, open_trace
from tests.harness.driver import Driver
from tests.harness.tokens import prompt_of


def test_lines_are_written_in_order_by_the_time_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    file = TraceFile(os.open(path, os.O_WRONLY | os.O_CREAT))
    for number in range(100):
        file.write(b"%d\n" % number)
    file.close()
    assert path.read_bytes().split() == [b"%d" % number for number in range(100)]


def test_the_file_is_private(tmp_path: Path) -> None:
    opened = open_trace(tmp_path / "trace.jsonl", "engine-0")
    assert opened is not None
    opened[1].close()
    assert stat.S_IMODE((tmp_path / "trace.jsonl").stat().st_mode) == 0o600


def test_an_existing_file_is_kept_and_the_next_free_name_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "trace.jsonl").write_text("of another run")
    for name in ("trace.1.jsonl", "trace.2.jsonl"):
        opened = open_trace(tmp_path / "trace.jsonl", "engine-0")
        assert opened is not None
        opened[1].close()
        assert f"is written to {tmp_path / name}" in caplog.text
    assert (tmp_path / "trace.jsonl").read_text() == "of another run"


@pytest.mark.req("TRC-06")
def test_without_a_place_for_the_file_there_is_no_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_trace(tmp_path / "missing" / "trace.jsonl", "engine-0") is None
    assert "there is no scheduler trace" in caplog.text


@pytest.mark.req("TRC-06")
def test_a_disk_that_hangs_drops_records_and_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace"
    writes, is_writing = threading.Event(), threading.Event()

    def write(file: int, data: memoryview) -> int:
        is_writing.set()
        assert writes.wait(60)
        return os_write(file, data)

    os_write = os.write
    monkeypatch.setattr(trace_file.os, "write", write)
    file = TraceFile(os.open(path, os.O_WRONLY | os.O_CREAT), max_queued_bytes=10)
    file.write(b"first\n")
    assert is_writing.wait(60)
    file.write(b"more\n")  # 11 bytes would wait
    file.write(b"a\nb\n")  # exactly 10
    file.write(b"c\n")
    writes.set()
    file.close()
    lines = path.read_bytes().splitlines()
    assert lines[0] == b"first"
    dropped = [json.loads(line) for line in lines if line.startswith(b"{")]
    assert [record["record"] for record in dropped] == ["records_dropped"] * len(dropped)
    assert sum(record["count"] for record in dropped) == 2, "'more' and 'c'"
    assert [line for line in lines if not line.startswith(b"{")] == [b"first", b"a", b"b"]


@pytest.mark.req("TRC-06")
def test_a_trace_ends_at_its_largest_size_and_the_scheduling_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = open_trace(tmp_path / "trace.jsonl", "engine-0", max_bytes=1000)
    assert opened is not None
    trace, file = opened
    driver = Driver(scheduler={"trace": trace})
    keys = [driver.add(str(number), prompt_of(9), max_tokens=9) for number in range(4)]
    driver.run()
    file._thread.join(60)
    more = driver.add("more", prompt_of(9), max_tokens=9)
    driver.run()
    driver.check_complete(*keys, more)
    assert trace.is_over
    assert "scheduling goes on: [Errno 27] it has 0.000953674 MiB (sched_trace_mib)" in caplog.text
    lines = (tmp_path / "trace.jsonl").read_bytes().splitlines()
    assert all(json.loads(line) for line in lines), "the last line is whole"
    assert b'"more"' not in lines[-1]


@pytest.mark.req("TRC-06")
def test_a_full_disk_ends_the_trace_and_not_the_scheduling(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    file = TraceFile(os.open("/dev/full", os.O_WRONLY))
    trace = trace_file.SchedulerTrace(file.write)
    driver = Driver(scheduler={"trace": trace})
    file._thread.join(60)  # the first record has ended it
    key = driver.add("r", prompt_of(9), max_tokens=9)
    driver.run()
    driver.check_complete(key)
    assert trace.is_over
    assert "scheduling goes on: [Errno 28] No space left on device" in caplog.text
