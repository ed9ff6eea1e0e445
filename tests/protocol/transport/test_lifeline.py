"""The lifeline between real processes."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from longshore.protocol.commands import (
    Command,
    CommandAnswer,
    DescribeState,
    NumberedCommand,
    Profile,
    SetLogLevel,
)
from longshore.protocol.transport.lifeline import (
    EXIT_SUPERVISOR_GONE,
    Alive,
    Failed,
    Lifeline,
    Progress,
    Ready,
    TakeOver,
    decode_report,
    encode_event,
)

CHILD = """
import sys, threading
from pathlib import Path
from longshore.protocol.transport.lifeline import Failed, Lifeline, Progress, Ready
lifeline = Lifeline(int(sys.argv[1]), Path(sys.argv[2]))
lifeline.report(Progress("loading"))
lifeline.report(Ready({"num_blocks": "7"}))
threading.Event().wait(60)
"""
WAIT_S = 60.0
IS_DEBUG = "my level is debug"


def start_child(
    runtime_dir: Path, program: str = CHILD
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(theirs.fileno()), str(runtime_dir)],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    ours.settimeout(WAIT_S)
    return child, ours


@pytest.fixture
def runtime_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    (folder / "socket").write_bytes(b"")
    return folder


def test_reports_arrive_and_the_child_leaves_nothing_behind_when_its_supervisor_exits(
    runtime_dir: Path,
) -> None:
    child, ours = start_child(runtime_dir)
    try:
        with ours, ours.makefile("rb") as lines:
            assert decode_report(lines.readline()) == Progress("loading")
            assert decode_report(lines.readline()) == Ready({"num_blocks": "7"})
            assert child.poll() is None
        assert child.wait(WAIT_S) == EXIT_SUPERVISOR_GONE
    finally:
        child.kill()
        child.wait()
    assert not runtime_dir.exists()


def test_the_supervisor_notices_that_a_child_died(runtime_dir: Path) -> None:
    child, ours = start_child(runtime_dir, CHILD.replace("threading.Event().wait(60)", ""))
    with ours, ours.makefile("rb") as lines:
        assert len(lines.readlines()) == 2  # up to the end of file
    assert child.wait(WAIT_S) == 0
    assert runtime_dir.exists()


def test_data_from_the_supervisor_does_not_end_the_child(runtime_dir: Path) -> None:
    child, ours = start_child(runtime_dir)
    try:
        with ours, ours.makefile("rb") as lines:
            lines.readline()
            ours.sendall(b"ignored")
            lines.readline()
            assert child.poll() is None
        assert child.wait(WAIT_S) == EXIT_SUPERVISOR_GONE
    finally:
        child.kill()
        child.wait()


def test_commands_that_every_process_takes_are_carried_out(
    runtime_dir: Path, tmp_path: Path
) -> None:
    program = CHILD.replace(
        "threading.Event().wait(60)",
        """
import logging, time
while logging.getLogger().level != logging.DEBUG:
    time.sleep(0.01)
lifeline.report(Progress("my level is debug"))
threading.Event().wait(60)
""",
    )
    child, ours = start_child(runtime_dir, program)
    try:
        with ours, ours.makefile("rb") as lines:
            lines.readline(), lines.readline()
            ours.sendall(b"not a command\n" + encoded(7, SetLogLevel("debug")))
            answer = CommandAnswer(7, True, "logs debug and above")
            reports = [decode_report(lines.readline()) for _ in range(2)]
            assert sorted(map(str, reports)) == sorted(map(str, (answer, Progress(IS_DEBUG))))
            path = tmp_path / "stacks.folded"
            profile = encoded(8, Profile(0.1, str(path)))
            ours.sendall(profile[:10])
            ours.sendall(profile[10:])
            done = decode_report(lines.readline())
            assert isinstance(done, CommandAnswer)
            assert (done.number, done.ok, done.values["path"]) == (8, True, str(path))
            assert path.read_text()
            ours.sendall(encoded(9, Profile(0.1, str(path))))
            failed = decode_report(lines.readline())
            assert isinstance(failed, CommandAnswer)
            assert not failed.ok
            assert "File exists" in failed.message
            ours.sendall(encoded(10, DescribeState()))  # for schedulers
            refused = decode_report(lines.readline())
            assert isinstance(refused, CommandAnswer)
            assert not refused.ok
    finally:
        child.kill()
        child.wait()


def test_a_standby_reports_to_be_alive_until_it_takes_over(runtime_dir: Path) -> None:
    waiting = "lifeline.wait_for_take_over()\nlifeline.report(Ready())"
    child, ours = start_child(runtime_dir, CHILD.replace("threading.Event().wait(60)", waiting))
    try:
        with ours, ours.makefile("rb") as lines:
            reports = [decode_report(lines.readline()) for _ in range(4)]
            assert reports[2:] == [Alive(), Alive()]
            ours.sendall(encode_event(TakeOver()))
            while (report := decode_report(lines.readline())) == Alive():
                pass
            assert report == Ready()
    finally:
        child.kill()
        child.wait()


def encoded(number: int, command: Command) -> bytes:
    return msgspec.json.encode(NumberedCommand(number, command)) + b"\n"


def test_without_a_supervisor_reports_are_discarded() -> None:
    num_threads = threading.active_count()
    lifeline = Lifeline(None)
    lifeline.report(Ready())
    assert threading.active_count() == num_threads


def test_a_process_reports_to_be_alive_at_once_when_it_is_ready_again(runtime_dir: Path) -> None:
    """A hang is noticed only after the first report."""
    again = "lifeline.report_alive()\nlifeline.report(Ready())\nlifeline.report_alive()\n"
    child, ours = start_child(
        runtime_dir, CHILD.replace("threading.Event", again + "threading.Event")
    )
    try:
        with ours, ours.makefile("rb") as lines:
            reports = [decode_report(lines.readline()) for _ in range(5)]
        assert reports[2:] == [Alive(), Ready(), Alive()]
    finally:
        child.kill()
        child.wait()


def test_a_report_to_a_supervisor_that_has_just_exited_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    ours, theirs = socket.socketpair()
    lifeline = Lifeline(theirs.detach())
    ours.close()
    for thread in threading.enumerate():
        if thread.name == "lifeline":
            thread.join(WAIT_S)
    assert exits == [EXIT_SUPERVISOR_GONE]
    lifeline.report(Ready())
    assert lifeline._socket is not None
    lifeline._socket.close()


@pytest.mark.parametrize("line", [b"", b"{}", b'{"type": "other"}', b'{"type": "failed"}', b"\xff"])
def test_a_line_that_is_not_a_report_is_rejected(line: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_report(line)


def test_every_report_survives_encoding() -> None:
    for report in (Ready({"a": "b"}), Failed("two\nlines"), Progress("doing")):
        line = msgspec.json.encode(report)
        assert b"\n" not in line
        assert decode_report(line) == report
