"""The supervisor with real child processes that behave, fail, hang, die or ignore signals."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from longshore.deploy.supervisor.process import ProcessSpec
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

ENVIRONMENT = {"PYTHONPATH": str(ROOT)}


def spec(name: str, behaviour: str, **fields: str) -> ProcessSpec:
    return ProcessSpec(
        name,
        "tests.deploy.fake_child",
        FakeChildConfig(behaviour),
        environment=ENVIRONMENT,
        **fields,  # type: ignore[arg-type]
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


def nothing_is_left(supervisor: Supervisor) -> bool:
    return not supervisor.processes and not supervisor.runtime_dir.path.exists()


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
    supervisor: Supervisor,
) -> None:
    specs = [spec("worker 0", "suffer"), spec("worker 1", "fail"), spec("scheduler", "hang")]
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
    caplog.set_level("INFO")
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
