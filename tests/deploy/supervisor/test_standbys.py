"""Standbys that take over, die, load and fail, with real child processes."""

import contextlib
import io
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from longshore.deploy.supervisor.process import ManagedProcess, ProcessSpec
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.supervisor.supervisor import Supervisor
from tests.deploy.fake_child import FakeChildConfig
from tests.deploy.supervisor.test_supervisor import Watch, spec, wait_until

ENGINE = "engine-0"


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def supervisor(output: io.StringIO) -> Iterator[Supervisor]:
    supervisor = Supervisor(RuntimeDir(), output)
    yield supervisor
    supervisor.stop_now()


def worker(
    rank: int = 0,
    standby: str = "stand by",
    num_standbys: int = 1,
    behaviour: str = "serve",
) -> ProcessSpec:
    return spec(
        f"worker {rank}",
        behaviour,
        restart_group=ENGINE,
        num_standbys=num_standbys,
        config_of_standby=lambda config, number: FakeChildConfig(standby),
    )


def scheduler(num_workers: int = 1) -> ProcessSpec:
    survives = tuple(f"worker {rank}" for rank in range(num_workers))
    return spec("scheduler", "listen", restart_group=ENGINE, survives=survives, is_told=True)


class Engine:
    """An engine that is kept running until the end of the test."""

    def __init__(self, supervisor: Supervisor, *specs: ProcessSpec, **settings: Any) -> None:
        self.supervisor = supervisor
        supervisor.start(specs, timeout_s=60)
        self.watch = Watch(supervisor, max_restarts=5, **settings)

    def find(self, name: str) -> ManagedProcess | None:
        return next((each for each in list(self.supervisor.processes) if each.name == name), None)

    def named(self, name: str) -> ManagedProcess:
        found = self.find(name)
        assert found is not None, name
        return found

    def is_ready(self, name: str, *, other_than: int | None = None) -> bool:
        process = self.find(name)
        return process is not None and process.ready is not None and process.pid != other_than

    def wait_for_standby(self, name: str, *, other_than: int | None = None) -> int:
        """Its process id, once it can take over."""
        wait_until(lambda: self.is_ready(name, other_than=other_than))
        return self.named(name).pid


StartEngine = Callable[..., Engine]


@pytest.fixture
def start(supervisor: Supervisor, caplog: pytest.LogCaptureFixture) -> Iterator[StartEngine]:
    caplog.set_level("INFO")
    engines = []

    def start_(*specs: ProcessSpec, **settings: Any) -> Engine:
        engines.append(Engine(supervisor, *specs, **settings))
        return engines[-1]

    yield start_
    for engine in engines:
        engine.watch.stop()
        assert engine.watch.given_up == [None]
        assert supervisor.stop(drain_timeout_s=60)


def test_a_standby_takes_the_place_of_a_worker_that_dies_and_a_next_one_is_started(
    start: StartEngine, caplog: pytest.LogCaptureFixture, output: io.StringIO
) -> None:
    engine = start(worker(), scheduler())
    standby = engine.wait_for_standby("worker 0 standby")
    for _ in range(2):  # the second worker is a former standby
        surviving, dead = engine.named("scheduler").pid, engine.named("worker 0").pid
        os.kill(dead, signal.SIGKILL)
        wait_until(lambda dead=dead: engine.is_ready("worker 0", other_than=dead))
        assert [process.name for process in engine.supervisor.processes[:2]] == [
            "worker 0",
            "scheduler",
        ]
        assert engine.named("worker 0").pid == standby
        assert engine.named("scheduler").pid == surviving
        standby = engine.wait_for_standby("worker 0 standby", other_than=standby)
    assert caplog.messages.count("engine-0 is ready again") == 2
    assert "[worker 0] takes over" in output.getvalue()  # from now on it logs by this name


def test_standbys_that_still_load_make_room_for_new_processes(
    start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(worker(standby="hang"), scheduler())
    wait_until(lambda: engine.find("worker 0 standby") is not None)
    standby, dead = engine.named("worker 0 standby").pid, engine.named("worker 0").pid
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: engine.is_ready("worker 0", other_than=dead))
    assert engine.named("worker 0").pid != standby
    assert not psutil.pid_exists(standby)
    assert "takes the place" not in caplog.text
    reason = "no standby of engine-0 is ready (worker 0 standby: "
    assert f"{reason}thinking)" in caplog.text or f"{reason}starting)" in caplog.text
    wait_until(lambda: engine.find("worker 0 standby") is not None)  # the next one


def test_a_standby_imports_in_advance_what_its_worker_has_imported(start: StartEngine) -> None:
    engine = start(worker(behaviour="import"), scheduler())
    engine.wait_for_standby("worker 0 standby")
    config = engine.named("worker 0 standby").spec.config
    assert isinstance(config, FakeChildConfig)
    assert config.late_imports == ("late",)


def test_the_standbys_of_all_ranks_take_over_together(start: StartEngine) -> None:
    engine = start(worker(0), worker(1), scheduler(2))
    names = ["worker 0", "worker 1"]
    standbys = [engine.wait_for_standby(f"{name} standby") for name in names]
    dead = engine.named("worker 1").pid
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: engine.is_ready("worker 1", other_than=dead))
    assert [engine.named(name).pid for name in names] == standbys


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_that_dies_or_hangs_is_replaced_and_disturbs_no_other_process(
    start: StartEngine, caplog: pytest.LogCaptureFixture, fault: signal.Signals
) -> None:
    engine = start(worker(), scheduler(), hang_timeout_s=3.0)
    standby = engine.wait_for_standby("worker 0 standby")
    wait_until(lambda: engine.named("worker 0 standby").alive_s is not None)
    former = list(engine.supervisor.processes[:2])
    os.kill(standby, fault)
    engine.wait_for_standby("worker 0 standby", other_than=standby)
    assert engine.supervisor.processes[:2] == former
    assert all(process.poll() is None for process in former)
    assert "The engine runs on; a new standby is started in 0.0 s." in caplog.text
    assert "Restarting" not in caplog.text
    assert not psutil.pid_exists(standby)


def test_a_standby_that_is_stopped_while_it_loads_is_replaced(
    start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(worker(standby="hang"), scheduler(), hang_timeout_s=1.0)
    wait_until(lambda: engine.find("worker 0 standby") is not None)
    standby = engine.named("worker 0 standby").pid
    os.kill(standby, signal.SIGSTOP)
    wait_until(lambda: "is stopped, as by SIGSTOP or a debugger" in caplog.text)
    wait_until(lambda: not psutil.pid_exists(standby))
    assert "The engine runs on; a new standby is started in 0.0 s." in caplog.text


def test_without_a_living_standby_a_new_process_is_started(
    start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(worker(), scheduler())
    standby, dead = engine.wait_for_standby("worker 0 standby"), engine.named("worker 0").pid
    os.kill(standby, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # the supervisor may know it already
        os.waitid(os.P_PID, standby, os.WEXITED | os.WNOWAIT)  # until then, it could take over
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: engine.is_ready("worker 0", other_than=dead))
    assert engine.named("worker 0").pid != standby
    assert "takes the place" not in caplog.text
    engine.wait_for_standby("worker 0 standby", other_than=standby)


def test_a_standby_that_cannot_start_is_tried_again_and_again_while_the_engine_runs(
    start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(worker(standby="fail"), scheduler())
    failure = "worker 0 standby: no such model; choose another The engine runs on"
    wait_until(lambda: caplog.text.count(failure) == 3)
    assert "is started in 1.0 s" in caplog.text  # after 0 s and 0.5 s
    dead = engine.named("worker 0").pid
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: engine.is_ready("worker 0", other_than=dead))


def test_there_can_be_several_sets(start: StartEngine) -> None:
    engine = start(worker(num_standbys=2), scheduler())
    names = ["worker 0 standby 1", "worker 0 standby 2"]
    standbys = [engine.wait_for_standby(name) for name in names]
    dead = engine.named("worker 0").pid
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: engine.is_ready("worker 0", other_than=dead))
    assert engine.named("worker 0").pid in standbys


def test_a_restart_by_an_operator_starts_new_processes_and_new_standbys(
    start: StartEngine,
) -> None:
    engine = start(worker(), scheduler())
    former = engine.wait_for_standby("worker 0 standby"), engine.named("worker 0").pid
    engine.supervisor.orders.restart(ENGINE).result(60)
    assert engine.named("worker 0").pid not in former
    engine.wait_for_standby("worker 0 standby", other_than=former[0])


def test_standbys_end_before_the_others_drain(supervisor: Supervisor, output: io.StringIO) -> None:
    engine = Engine(supervisor, worker(), scheduler())
    standby = engine.wait_for_standby("worker 0 standby")
    engine.watch.stop()
    assert [process.name for process in supervisor.processes] == ["worker 0", "scheduler"]
    assert not psutil.pid_exists(standby)
    assert supervisor.stop(drain_timeout_s=60)
    assert "[worker 0 standby] told to stop" not in output.getvalue()
