"""The supervisor with real child processes that behave, fail, hang, die or ignore signals."""

import contextlib
import functools
import io
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from longshore.deploy.supervisor import process_set, restarts
from longshore.deploy.supervisor.log_relay import LogRelay
from longshore.deploy.supervisor.process import MAX_LATE_S, ManagedProcess, ProcessSpec
from longshore.deploy.supervisor.process_set import ProcessSet
from longshore.deploy.supervisor.restart_history import read_restarts
from longshore.deploy.supervisor.runtime_dir import RuntimeDir, read_progress_note
from longshore.deploy.supervisor.stop_signals import StopSignals
from longshore.deploy.supervisor.supervisor import (
    StartFailed,
    StopRequested,
    Supervisor,
)
from longshore.protocol.transport.lifeline import STOP_SIGNAL
from tests.conftest import ROOT
from tests.deploy.fake_child import FakeChildConfig

ENVIRONMENT = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}


def spec(name: str, behaviour: str, **fields: Any) -> ProcessSpec:
    return ProcessSpec(
        name,
        "tests.deploy.fake_child",
        FakeChildConfig(behaviour),
        environment=ENVIRONMENT,
        **fields,
    )


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def supervisor(output: io.StringIO) -> Iterator[Supervisor]:
    supervisor = Supervisor(RuntimeDir(), output)
    yield supervisor
    supervisor.stop_now()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)


def restarts_of(supervisor: Supervisor) -> dict[tuple[str, str], int]:
    """What gateways show; without zeros."""
    counts = read_restarts(supervisor.runtime_dir.path).counts
    return {
        (process, reason): count
        for process, by_reason in counts.items()
        for reason, count in by_reason.items()
        if count
    }


def nothing_is_left(supervisor: Supervisor) -> bool:
    return not supervisor.processes and not supervisor.runtime_dir.path.exists()


def test_configuration_is_private_and_deleted_once_read(
    supervisor: Supervisor, output: io.StringIO
) -> None:
    folder = supervisor.runtime_dir.path
    for _ in range(2):  # it is written again for a restart
        process = ManagedProcess(spec("worker 0", "serve"), folder, LogRelay(output))
        file = folder / "worker-0.json"
        try:
            with contextlib.suppress(FileNotFoundError):
                assert file.stat().st_mode & 0o777 == 0o600
            while process.ready is None:
                select.select([process], [], [])
                process.read_lifeline()
            assert not file.exists()
        finally:
            process.kill()
            process.close()


def test_a_process_is_told_to_stop_once(supervisor: Supervisor, output: io.StringIO) -> None:
    folder = supervisor.runtime_dir.path
    process = ManagedProcess(spec("worker 0", "await others"), folder, LogRelay(output))
    other = folder / "waits.1"
    other.touch()
    try:
        while process.ready is None:
            select.select([process], [], [])
            process.read_lifeline()
        process.terminate()
        wait_until(lambda: "told to stop" in output.getvalue())
        process.terminate()
        assert not process.wait(0.1)
        other.unlink()
        assert process.wait(60)
        assert process.poll() == 0
    finally:
        process.kill()
        process.close()
    assert output.getvalue().count("told to stop") == 1


def test_settings_in_variables_do_not_reach_the_children(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSHORE_API_KEY", "an api key")
    monkeypatch.setenv("ANOTHER_VARIABLE", "kept")
    supervisor.start([spec("gateway", "serve")], timeout_s=60)
    (child,) = supervisor.processes
    variables = psutil.Process(child.pid).environ()
    assert variables["ANOTHER_VARIABLE"] == "kept"
    assert [name for name in variables if name.startswith("LONGSHORE_")] == []


def test_children_start_report_and_stop_in_reverse_order(
    supervisor: Supervisor, output: io.StringIO
) -> None:
    assert supervisor.runtime_dir.path.stat().st_mode & 0o777 == 0o700
    ready = supervisor.start([spec("worker 0", "serve"), spec("gateway", "socket")], timeout_s=60)
    assert ready["gateway"].details == {"answer": "42"}
    assert supervisor.find_death() is None
    assert supervisor.stop(drain_timeout_s=60)
    assert nothing_is_left(supervisor)
    lines = [line.partition(" ")[2] for line in output.getvalue().splitlines()]
    assert sorted(lines) == [
        "[gateway] this is socket",
        "[gateway] told to stop",
        "[worker 0] this is serve",
        "[worker 0] told to stop",
    ]
    assert lines.index("[gateway] told to stop") < lines.index("[worker 0] told to stop")


def test_reason_of_a_child_that_cannot_start_is_the_error(supervisor: Supervisor) -> None:
    with pytest.raises(StartFailed, match=r"^worker 0: no such model; choose another$"):
        supervisor.start([spec("worker 0", "fail"), spec("scheduler", "hang")], timeout_s=60)
    assert nothing_is_left(supervisor)


def test_reason_of_the_first_failure_is_the_error_not_what_follows_from_it(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_set, "FAILURE_WINDOW_S", 60.0)  # they start one after another
    specs = [spec("worker 0", "suffer"), spec("worker 1", "fail"), spec("scheduler", "suffer")]
    with pytest.raises(StartFailed, match=r"^worker 1: no such model; choose another$"):
        supervisor.start(specs, timeout_s=60)


@pytest.mark.parametrize("teller", ["tell", "outlive"])
def test_children_that_another_tells_to_end_are_not_told_by_the_supervisor(
    supervisor: Supervisor, output: io.StringIO, teller: str
) -> None:
    told = [
        spec(f"worker {rank}", "wait", stop_group="workers", stopped_by="scheduler")
        for rank in range(2)
    ]
    supervisor.start([*told, spec("scheduler", teller)], timeout_s=60)
    assert supervisor.stop(drain_timeout_s=60)
    assert nothing_is_left(supervisor)
    assert output.getvalue().count("told to stop") == 1
    assert output.getvalue().count("heard of it") == 2


def test_children_whose_teller_fails_are_told_by_the_supervisor(
    supervisor: Supervisor, output: io.StringIO
) -> None:
    told = [
        spec(f"worker {rank}", "serve", stop_group="workers", stopped_by="scheduler")
        for rank in range(2)
    ]
    supervisor.start([*told, spec("scheduler", "deaf")], timeout_s=60)
    assert not supervisor.stop(drain_timeout_s=0.2)
    assert nothing_is_left(supervisor)
    assert output.getvalue().count("told to stop") == 2


def test_children_that_end_together_are_told_at_once(
    supervisor: Supervisor, output: io.StringIO
) -> None:
    """Each of the last two processes ends only when the other one has been told to stop, too."""
    workers = [spec(f"worker {engine}.0", "serve", stop_group="workers") for engine in range(2)]
    gateways = [spec(f"gateway {n}", "await others", stop_group="gateways") for n in range(2)]
    supervisor.start([*workers, *gateways], timeout_s=60)
    assert supervisor.stop(drain_timeout_s=60)
    assert nothing_is_left(supervisor)
    told = [line.split("[")[1] for line in output.getvalue().splitlines() if "told" in line]
    assert [name[:7] for name in told] == ["gateway"] * 2 + ["worker "] * 2


def test_child_that_dies_at_start_without_a_word_is_named(supervisor: Supervisor) -> None:
    with pytest.raises(StartFailed, match=r"worker 0 has died \(exit status 3\)"):
        supervisor.start([spec("worker 0", "die")], timeout_s=60)


def test_child_that_is_never_ready_is_named_with_what_it_does(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with pytest.raises(StartFailed, match=r"worker 0 \(thinking\)"):
        supervisor.start([spec("worker 0", "hang")], timeout_s=5, remind_every_s=1)
    assert nothing_is_left(supervisor)
    assert "worker 0: thinking" in caplog.messages
    reminders = [message for message in caplog.messages if "still starting after" in message]
    assert reminders
    assert reminders[-1].endswith("s: worker 0 (thinking)")


def test_what_is_waited_for_can_be_read_until_all_are_ready(supervisor: Supervisor) -> None:
    runtime_dir = supervisor.runtime_dir.path
    assert read_progress_note(runtime_dir) is None
    with StopSignals() as stop_signal:
        starting = threading.Thread(target=_stop_once_thinking, args=(runtime_dir,))
        starting.start()
        with pytest.raises(StopRequested):
            supervisor.start(
                [spec("worker 0", "serve"), spec("worker 1", "hang")],
                timeout_s=60,
                stop_signal=stop_signal,
            )
        starting.join()
    assert read_progress_note(runtime_dir) is None


def _stop_once_thinking(runtime_dir: Path) -> None:
    wait_until(lambda: read_progress_note(runtime_dir) == "worker 1 (thinking)")
    os.kill(os.getpid(), signal.SIGTERM)


def test_killed_child_is_named_although_others_fail_after_it(supervisor: Supervisor) -> None:
    supervisor.start([spec("worker 0", "serve"), spec("scheduler", "serve")], timeout_s=60)
    os.kill(supervisor.processes[1].pid, signal.SIGKILL)
    os.kill(supervisor.processes[0].pid, STOP_SIGNAL)
    death = supervisor.wait_for_death(timeout_s=60)
    assert death is not None
    assert death.startswith("scheduler was killed (SIGKILL)")
    supervisor.stop_now()
    assert nothing_is_left(supervisor)


class Watch:
    """`keep_running` on another thread, until `stop`."""

    def __init__(self, supervisor: Supervisor, *, max_restarts: int = 2, **settings: float) -> None:
        self.given_up: list[str | None] = []
        self._read_end, self._write_end = socket.socketpair()
        settings.setdefault("start_timeout_s", 60.0)
        self._thread = threading.Thread(
            target=lambda: self.given_up.append(
                supervisor.keep_running(max_restarts=max_restarts, stop_signal=self, **settings)
            )
        )
        self._thread.start()

    def fileno(self) -> int:
        return self._read_end.fileno()

    def is_set(self) -> bool:
        return bool(select.select([self._read_end], [], [], 0)[0])

    def stop(self) -> None:
        self._write_end.send(b"x")
        self.join()

    def join(self) -> None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        self._read_end.close()
        self._write_end.close()


def test_the_group_of_a_killed_child_is_started_again_and_no_other(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    def next_config(config: FakeChildConfig) -> FakeChildConfig:
        return FakeChildConfig("socket" if config.behaviour == "serve" else "serve")

    caplog.set_level("INFO")
    supervisor.start(
        [
            spec("worker 0.0", "serve", restart_group="engine-0"),
            spec("worker 1.0", "serve", restart_group="engine-1"),
            spec("scheduler 0", "serve", restart_group="engine-0", config_after=next_config),
            spec("scheduler 1", "serve", restart_group="engine-1"),
        ],
        timeout_s=60,
    )
    former = list(supervisor.processes)
    os.kill(former[2].pid, signal.SIGSTOP)  # a stopped process does not survive its group either
    os.kill(former[0].pid, signal.SIGKILL)
    watch = Watch(supervisor)
    wait_until(lambda: "engine-0 is ready again" in caplog.messages)
    assert [process.name for process in supervisor.processes] == [one.name for one in former]
    assert [new is old for new, old in zip(supervisor.processes, former, strict=True)] == [
        False,
        True,
        False,
        True,
    ]
    assert not psutil.pid_exists(former[2].pid)
    assert "worker 0.0 was killed (SIGKILL)" in caplog.text
    assert supervisor.processes[2].spec.config == FakeChildConfig("socket")
    watch.stop()
    assert watch.given_up == [None]
    assert supervisor.stop(drain_timeout_s=60)
    assert nothing_is_left(supervisor)


def test_a_child_survives_the_first_death_of_the_one_it_waits_for(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    group = {"restart_group": "engine-0"}
    supervisor.start(
        [
            spec("worker 0", "serve", survives=("scheduler",), **group),
            spec("scheduler", "serve", **group),
        ],
        timeout_s=60,
    )
    watch = Watch(supervisor, max_restarts=5)
    pids = []
    for num_restarts in range(1, 4):
        pids.append([process.pid for process in supervisor.processes])
        victims = supervisor.processes[0 if num_restarts == 3 else 1 :]
        os.kill(victims[0].pid, signal.SIGKILL)
        wait_until(
            lambda n=num_restarts: caplog.messages.count("engine-0 is ready again") == n  # type: ignore[misc]
        )
    pids.append([process.pid for process in supervisor.processes])
    watch.stop()
    workers, schedulers = zip(*pids, strict=True)
    assert len(set(schedulers)) == 4
    assert workers[0] == workers[1], "it survives the first death of the scheduler"
    assert len(set(workers)) == 3, "not the second in a row, and not its own"


def test_a_child_survives_every_death_that_is_the_first_in_a_row_but_no_failure(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends by itself tells the others to end, too."""
    monkeypatch.setattr(restarts, "STABLE_S", 0.0)
    caplog.set_level("INFO")
    group = {"restart_group": "engine-0"}
    supervisor.start(
        [
            spec("worker 0", "serve", survives=("scheduler",), **group),
            spec("scheduler", "serve", **group),
        ],
        timeout_s=60,
    )
    watch = Watch(supervisor)
    workers = [supervisor.processes[0].pid]
    for num_restarts, number in enumerate((signal.SIGKILL, signal.SIGKILL, STOP_SIGNAL), start=1):
        os.kill(supervisor.processes[1].pid, number)
        wait_until(
            lambda n=num_restarts: caplog.messages.count("engine-0 is ready again") == n  # type: ignore[misc]
        )
        workers.append(supervisor.processes[0].pid)
    watch.stop()
    assert len(set(workers[:3])) == 1
    assert workers[3] != workers[2]


@pytest.mark.parametrize("is_late", [False, True])
def test_ranks_outlive_their_scheduler_together_or_not_at_all(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture, is_late: bool
) -> None:
    """A rank cannot go on with a new process in another's place."""
    caplog.set_level("INFO")
    group = {"restart_group": "engine-0"}
    supervisor.start(
        [
            spec("worker 0", "serve", survives=("scheduler",), **group),
            spec("worker 1", "serve", survives=("scheduler",), **group),
            spec("scheduler", "serve", **group),
        ],
        timeout_s=60,
    )
    former = [process.pid for process in supervisor.processes]
    if is_late:
        supervisor.processes[1].was_ready = False
    os.kill(former[2], signal.SIGKILL)
    watch = Watch(supervisor)
    wait_until(lambda: "engine-0 is ready again" in caplog.messages)
    watch.stop()
    kept = [process.pid in former for process in supervisor.processes]
    assert kept == [not is_late, not is_late, False]


def test_a_child_that_is_told_outlives_the_others_and_hears_why(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture, output: io.StringIO
) -> None:
    """Killed children are none of its faults. What fails by itself a second time in a row may fail
    because of what the survivor remembers."""
    caplog.set_level("INFO")
    group = {"restart_group": "engine-0"}
    supervisor.start(
        [
            spec("worker 0", "serve", **group),
            spec("worker 1", "serve", **group),
            spec("scheduler", "listen", survives=("worker 0", "worker 1"), is_told=True, **group),
        ],
        timeout_s=60,
    )
    watch = Watch(supervisor, max_restarts=5)
    pids = [[process.pid for process in supervisor.processes]]
    for num_restarts, number in enumerate((signal.SIGKILL, signal.SIGKILL, STOP_SIGNAL), start=1):
        os.kill(supervisor.processes[0].pid, number)
        wait_until(
            lambda n=num_restarts: caplog.messages.count("engine-0 is ready again") == n  # type: ignore[misc]
        )
        pids.append([process.pid for process in supervisor.processes])
    watch.stop()
    first, second, schedulers = zip(*pids, strict=True)
    assert len(set(first)) == len(set(second)) == 4, "all ranks are replaced together"
    assert not any(psutil.pid_exists(pid) for pid in (*first[:-1], *second[:-1]))
    assert len(set(schedulers[:3])) == 1
    assert schedulers[3] != schedulers[2]
    assert output.getvalue().count("heard: worker 0 was killed (SIGKILL)") == 2


def test_a_child_that_is_told_takes_care_of_children_that_lack_memory(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture, output: io.StringIO
) -> None:
    """However often they do: it makes their steps smaller."""
    caplog.set_level("INFO")
    group = {"restart_group": "engine-0"}
    supervisor.start(
        [
            spec("worker 0", "lack", **group),
            spec("scheduler", "listen", survives=("worker 0",), is_told=True, **group),
        ],
        timeout_s=60,
    )
    scheduler = supervisor.processes[1]
    watch = Watch(supervisor, max_restarts=1)
    for num_restarts in range(1, 4):
        os.kill(supervisor.processes[0].pid, STOP_SIGNAL)
        wait_until(
            lambda n=num_restarts: caplog.messages.count("engine-0 is ready again") == n  # type: ignore[misc]
        )
    watch.stop()
    assert output.getvalue().count("heard: worker 0: no memory (smaller steps)") == 3
    assert scheduler is supervisor.processes[1]


def test_a_survivor_that_hangs_before_it_has_heard_of_the_restart_is_restarted_too(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    group = {"restart_group": "engine-0"}
    supervisor.start(
        [
            spec("worker 0", "serve", **group),
            spec("scheduler", "alive", survives=("worker 0",), is_told=True, **group),
        ],
        timeout_s=60,
    )
    former = list(supervisor.processes)
    wait_until(lambda: bool(former[1].read_lifeline() or former[1].alive_s))
    for process, number in zip(former, (signal.SIGKILL, signal.SIGSTOP), strict=True):
        os.kill(process.pid, number)
    watch = Watch(supervisor, hang_timeout_s=2.0)
    wait_until(lambda: "engine-0 is ready again" in caplog.messages)
    watch.stop()
    assert "scheduler hangs or is stopped" in caplog.text
    assert not any(psutil.pid_exists(process.pid) for process in former)


def test_a_survivor_that_hangs_while_the_others_start_is_restarted_too(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    group = {"restart_group": "engine-0"}
    supervisor.start(
        [
            spec("worker 0", "serve", **group),
            spec("scheduler", "mute", survives=("worker 0",), is_told=True, **group),
        ],
        timeout_s=60,
    )
    scheduler = supervisor.processes[1]
    wait_until(lambda: bool(scheduler.read_lifeline() or scheduler.alive_s))
    os.kill(supervisor.processes[0].pid, signal.SIGKILL)
    watch = Watch(supervisor, hang_timeout_s=2.0)
    wait_until(lambda: "engine-0 is ready again" in caplog.messages)
    watch.stop()
    assert "scheduler hangs or is stopped" in caplog.text
    assert supervisor.processes[1] is not scheduler
    restarts = restarts_of(supervisor)
    assert restarts.pop(("worker 0", "death")) == 1
    assert set(restarts) <= {("worker 0", "hang"), ("scheduler", "hang")}


def test_a_child_that_is_told_does_not_outlive_the_end_of_the_restarts(
    supervisor: Supervisor,
) -> None:
    group = {"restart_group": "engine-0"}
    supervisor.start(
        [
            spec("worker 0", "serve", **group),
            spec("scheduler", "listen", survives=("worker 0",), is_told=True, **group),
        ],
        timeout_s=60,
    )
    os.kill(supervisor.processes[0].pid, signal.SIGKILL)
    watch = Watch(supervisor, max_restarts=0)
    watch.join()
    assert supervisor.processes[1].poll() is not None


def test_a_child_that_waits_for_one_that_is_not_restarted_is_ended_with_the_deployment(
    supervisor: Supervisor,
) -> None:
    """Otherwise its clients would wait for the whole drain."""
    group = {"restart_group": "engine-0"}
    supervisor.start(
        [
            spec("worker 0", "serve", **group),
            spec("scheduler", "deaf", survives=("worker 0",), is_told=True, **group),
        ],
        timeout_s=60,
    )
    worker = supervisor.processes[0]
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: bool(worker.read_lifeline() or worker.lifeline_closed))
    assert supervisor.stop(drain_timeout_s=600)
    assert nothing_is_left(supervisor)


def test_a_group_that_cannot_be_started_is_given_up(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    supervisor.start([spec("worker 0", "serve", restart_group="engine-0")], timeout_s=60)
    os.kill(supervisor.processes[0].pid, signal.SIGKILL)
    monkeypatch.setattr(ProcessSet, "launch", fail)
    watch = Watch(supervisor, max_restarts=1)
    watch.join()
    (reason,) = watch.given_up
    assert reason is not None
    assert reason.startswith("engine-0 cannot be started: [Errno 28] No space left on device.")


def test_a_stopped_child_counts_as_dead(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    specs = [spec(f"worker {n}", "alive", restart_group=f"engine-{n}") for n in range(2)]
    supervisor.start(specs, timeout_s=60)
    former = list(supervisor.processes)
    watch = Watch(supervisor, hang_timeout_s=5.0)
    os.kill(former[0].pid, signal.SIGSTOP)
    wait_until(lambda: "engine-0 is ready again" in caplog.messages)
    watch.stop()
    assert "worker 0 hangs or is stopped: it has not reported for" in caplog.text
    assert supervisor.processes[1] is former[1]
    assert "worker 1" not in caplog.text
    assert restarts_of(supervisor) == {("worker 0", "hang"): 1}
    assert not psutil.pid_exists(former[0].pid)


@pytest.mark.parametrize("behaviour", ["hang", "serve"])
def test_a_child_that_is_stopped_while_the_processes_start_fails_the_start(
    supervisor: Supervisor, behaviour: str
) -> None:
    """Before it is ready, or before it has first reported to be alive."""
    specs = [spec("worker 0", behaviour), spec("worker 1", "hang")]
    stopping = threading.Thread(target=_stop_first, args=(supervisor,))
    stopping.start()
    try:
        with pytest.raises(StartFailed, match=r"^worker 0 \(\w+\) is stopped, as by SIGSTOP or"):
            supervisor.start(specs, timeout_s=60, hang_timeout_s=1.0)
    finally:
        stopping.join()
    assert nothing_is_left(supervisor)


def _stop_first(supervisor: Supervisor) -> None:
    """Stop the first child once both have begun."""
    wait_until(lambda: len(supervisor.processes) == 2)
    os.kill(supervisor.processes[0].pid, signal.SIGSTOP)


def test_a_child_that_starts_for_long_does_not_hang(supervisor: Supervisor) -> None:
    with pytest.raises(StartFailed, match=r"^not ready in time: worker 0 \(thinking\)"):
        supervisor.start([spec("worker 0", "hang")], timeout_s=8, hang_timeout_s=0.1)


def test_a_child_that_is_stopped_while_it_starts_again_is_started_once_more(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    behaviours = iter(["hang", "alive"])
    supervisor.start(
        [
            spec(
                "worker 0",
                "alive",
                restart_group="engine-0",
                config_after=lambda _: FakeChildConfig(next(behaviours)),
            )
        ],
        timeout_s=60,
    )
    watch = Watch(supervisor, hang_timeout_s=2.0)
    first = supervisor.processes[0].pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: supervisor.processes[0].pid != first)
    second = supervisor.processes[0].pid
    os.kill(second, signal.SIGSTOP)
    wait_until(lambda: "engine-0 is ready again" in caplog.messages)
    watch.stop()
    assert "worker 0 (" in caplog.text
    assert "is stopped, as by SIGSTOP or a debugger: it has not run for" in caplog.text
    assert restarts_of(supervisor) == {("worker 0", "death"): 1, ("worker 0", "hang"): 1}
    assert not psutil.pid_exists(second)


def test_a_time_for_which_the_supervisor_did_not_run_does_not_count_as_stopped(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor.start([spec("worker 0", "serve")], timeout_s=60)
    (process,) = supervisor.processes
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    counted = []
    for now_s in (1000.0, 1001.0, 1500.0):  # noqa: B007  # read by the clock
        counted.append(process.stopped_s())
    assert counted == [0.0, 1.0, 1.0 + MAX_LATE_S]
    monkeypatch.undo()
    os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: process.stopped_s() == 0.0)


def test_a_child_that_reports_to_be_late_counts_as_dead(supervisor: Supervisor) -> None:
    supervisor.start([spec("worker 0", "late", restart_group="engine-0")], timeout_s=60)
    wait_until(lambda: supervisor.find_death() == "worker 0 hangs: step 3 takes too long.")
    watch = Watch(supervisor, max_restarts=0, hang_timeout_s=60.0)
    watch.join()
    assert watch.given_up == ["worker 0 hangs: step 3 takes too long."]


def test_a_child_that_never_reports_is_no_problem_without_a_hang_timeout(
    supervisor: Supervisor,
) -> None:
    supervisor.start([spec("worker 0", "late", restart_group="engine-0")], timeout_s=60)
    watch = Watch(supervisor, hang_timeout_s=0.0)
    time.sleep(0.5)
    watch.stop()
    assert watch.given_up == [None]


def test_a_group_that_dies_again_and_again_is_given_up(supervisor: Supervisor) -> None:
    dies = functools.partial(FakeChildConfig, "die")
    supervisor.start(
        [spec("worker 0", "serve", restart_group="engine-0", config_after=lambda _: dies())],
        timeout_s=60,
    )
    os.kill(supervisor.processes[0].pid, signal.SIGKILL)
    watch = Watch(supervisor, max_restarts=1)
    watch.join()
    assert watch.given_up == [
        "worker 0 has died (exit status 3). See its log lines above. engine-0 has died 2 times in "
        "a row; giving up."
    ]


def test_a_group_that_is_not_ready_in_time_is_given_up(supervisor: Supervisor) -> None:
    hangs = functools.partial(FakeChildConfig, "hang")
    supervisor.start(
        [spec("worker 0", "serve", restart_group="engine-0", config_after=lambda _: hangs())],
        timeout_s=60,
    )
    os.kill(supervisor.processes[0].pid, signal.SIGKILL)
    watch = Watch(supervisor, max_restarts=1, start_timeout_s=0.5)
    watch.join()
    (reason,) = watch.given_up
    assert reason is not None
    assert reason.startswith("Not ready in time: worker 0 (")


def test_without_restarts_the_first_death_is_the_end(supervisor: Supervisor) -> None:
    supervisor.start([spec("worker 0", "serve", restart_group="engine-0")], timeout_s=60)
    os.kill(supervisor.processes[0].pid, signal.SIGKILL)
    watch = Watch(supervisor, max_restarts=0)
    watch.join()
    (reason,) = watch.given_up
    assert reason is not None
    assert reason.startswith("worker 0 was killed (SIGKILL)")
    assert "giving up" not in reason


def test_the_death_of_a_child_without_a_group_is_the_end(supervisor: Supervisor) -> None:
    supervisor.start(
        [spec("store", "serve"), spec("worker 0", "serve", restart_group="engine-0")], timeout_s=60
    )
    os.kill(supervisor.processes[0].pid, signal.SIGKILL)
    watch = Watch(supervisor)
    watch.join()
    (reason,) = watch.given_up
    assert reason is not None
    assert reason.startswith("store was killed (SIGKILL)")


def test_child_that_ignores_the_request_to_stop_is_killed(supervisor: Supervisor) -> None:
    supervisor.start([spec("worker 0", "deaf")], timeout_s=60)
    child = psutil.Process(supervisor.processes[0].pid)
    assert not supervisor.stop(drain_timeout_s=0.2)
    assert not child.is_running()
    assert nothing_is_left(supervisor)


def test_stop_signal_interrupts_the_start(supervisor: Supervisor) -> None:
    with StopSignals() as stop_signal:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopRequested):
            supervisor.start([spec("worker 0", "hang")], timeout_s=60, stop_signal=stop_signal)
    assert nothing_is_left(supervisor)


PARENT = """
import sys, time
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.supervisor.supervisor import Supervisor
from tests.deploy.supervisor.test_supervisor import spec
supervisor = Supervisor(RuntimeDir(), sys.stderr)
supervisor.start([spec("worker 0", "deaf"), spec("gateway", "socket")], timeout_s=60)
print(supervisor.runtime_dir.path, *(process.pid for process in supervisor.processes), flush=True)
time.sleep(60)
"""


def test_killed_supervisor_leaves_no_process_and_no_directory() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT},
        cwd=ROOT,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        runtime_dir, *pids = parent.stdout.readline().split()
        children = [psutil.Process(int(pid)) for pid in pids]
        parent.kill()
        psutil.wait_procs(children, timeout=60)
    wait_until(lambda: not any(child.is_running() for child in children))
    wait_until(lambda: not Path(runtime_dir).exists())


def test_the_death_of_another_engines_worker_does_not_disturb_an_orderly_end(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [
        spec(f"worker {n}.0", "wait", stop_group="workers", stopped_by=f"scheduler {n}")
        for n in range(2)
    ]
    schedulers = [
        spec("scheduler 0", "serve", stop_group="schedulers"),
        spec("scheduler 1", "outlive", stop_group="schedulers"),
    ]
    supervisor.start([*workers, *schedulers], timeout_s=60)
    worker = supervisor.processes[0]
    waits_for_this_process = supervisor.runtime_dir.path / f"waits.{os.getpid()}"
    waits_for_this_process.touch()
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: worker.poll() is not None)
    timer = threading.Timer(0.5, waits_for_this_process.unlink)
    timer.start()
    assert not supervisor.stop(drain_timeout_s=60)  # because of the worker
    timer.join()
    assert nothing_is_left(supervisor)
    assert "scheduler 1" not in caplog.text
