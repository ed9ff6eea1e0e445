"""Restarts and commands of an operator, with real child processes."""

import io
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import psutil
import pytest

from longshore.deploy.supervisor import group_restarts, restarts
from longshore.deploy.supervisor.orders import Orders, RestartGroup
from longshore.deploy.supervisor.process import ManagedProcess, ProcessSpec
from longshore.deploy.supervisor.restart_history import read_restarts
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.supervisor.stop_signals import StopSignals
from longshore.deploy.supervisor.supervisor import Supervisor
from longshore.protocol.commands import (
    CommandAnswer,
    DescribeState,
    Pause,
    Resume,
    SetLogLevel,
    Sleep,
    Wake,
)
from tests.deploy.fake_child import FakeChildConfig
from tests.deploy.supervisor.test_supervisor import spec, wait_until

WAIT_S = 60.0


@dataclass
class Running:
    """A supervisor in another thread; `ends` has how that ended."""

    supervisor: Supervisor
    stop_signal: StopSignals
    ends: list[str | None] = field(default_factory=list)

    @property
    def pids(self) -> dict[str, int]:
        return {process.name: process.pid for process in self.supervisor.processes}

    def named(self, name: str) -> ManagedProcess:
        return next(each for each in self.supervisor.processes if each.name == name)

    def freeze(self, name: str) -> None:
        """Stop a process, as if it hung, and wait until the system has stopped it."""
        process = psutil.Process(self.named(name).pid)
        process.suspend()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)

    def restart(self, group: str) -> None:
        self.supervisor.orders.restart(group).result(WAIT_S)


@contextmanager
def running(behaviour: str = "serve", max_restarts: int = 5) -> Iterator[Running]:
    """Engine 0 has one process, engine 1 has two with this behaviour."""
    with StopSignals() as stop_signal, Supervisor(RuntimeDir(), io.StringIO()) as supervisor:
        run = Running(supervisor, stop_signal)
        supervisor.start(
            [
                spec("scheduler 0", "serve", restart_group="engine-0"),
                spec("worker 1", behaviour, restart_group="engine-1"),
                spec("scheduler 1", behaviour, restart_group="engine-1"),
            ],
            timeout_s=WAIT_S,
        )

        def keep_running() -> None:
            run.ends.append(
                supervisor.keep_running(
                    max_restarts=max_restarts, start_timeout_s=WAIT_S, stop_signal=stop_signal
                )
            )

        thread = threading.Thread(target=keep_running)
        thread.start()
        try:
            wait_until(lambda: supervisor.orders.is_open)
            yield run
        finally:
            stop_signal.request()
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_the_processes_of_a_group_end_by_themselves_and_start_again() -> None:
    with running(max_restarts=0) as run:  # which a death would use up
        for _ in range(2):
            before, old = run.pids, [run.named("worker 1"), run.named("scheduler 1")]
            run.restart("engine-1")
            changed = {name for name, pid in run.pids.items() if pid != before[name]}
            assert changed == {"worker 1", "scheduler 1"}
            assert [process.poll() for process in old] == [0, 0]
            assert all(process.ready is not None for process in run.supervisor.processes)
        counts = read_restarts(run.supervisor.runtime_dir.path).counts
        assert counts["worker 1"] == {"death": 0, "hang": 0, "operator": 2}
        assert counts["scheduler 0"] == {"death": 0, "hang": 0, "operator": 0}
    assert run.ends == [None]


def test_processes_that_do_not_end_in_time_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_restarts, "STOP_TIMEOUT_S", 0.1)
    with running("deaf") as run:
        old = run.named("worker 1")
        run.restart("engine-1")
        assert old.poll() == -signal.SIGKILL
        assert run.named("worker 1").ready is not None
    assert run.ends == [None]


def test_a_group_is_restarted_once_at_a_time() -> None:
    with running() as run:
        run.freeze("worker 1")  # it does not end
        future = run.supervisor.orders.restart("engine-1")
        with pytest.raises(RuntimeError, match="engine-1 is being started, restarted"):
            run.supervisor.orders.restart("engine-1")
        run.restart("engine-0")  # another one may be restarted meanwhile
        os.kill(run.named("worker 1").pid, signal.SIGCONT)
        future.result(WAIT_S)


def new_engine(behaviour: str = "serve") -> list[ProcessSpec]:
    return [
        spec("worker 2", "serve", stop_group="workers", restart_group="engine-2"),
        spec("scheduler 2", behaviour, stop_group="schedulers", restart_group="engine-2"),
    ]


def test_a_group_is_started_watched_and_stopped_while_the_others_run() -> None:
    with running() as run:
        before = run.pids
        run.supervisor.orders.start("engine-2", new_engine()).result(WAIT_S)
        assert {**run.pids, **before} == run.pids
        killed = run.named("worker 2")
        os.kill(killed.pid, signal.SIGKILL)
        wait_until(
            lambda: read_restarts(run.supervisor.runtime_dir.path).counts["worker 2"]["death"]
        )
        wait_until(lambda: run.named("worker 2") is not killed)
        wait_until(lambda: all(process.ready is not None for process in run.supervisor.processes))
        run.restart("engine-2")
        old = run.named("scheduler 2")
        run.supervisor.orders.stop("engine-2").result(WAIT_S)
        assert run.pids == before
        assert old.poll() == 0
        assert set(read_restarts(run.supervisor.runtime_dir.path).counts) == set(before)
        with pytest.raises(RuntimeError, match="engine-2 does not exist"):
            run.supervisor.orders.stop("engine-2").result(WAIT_S)
    assert run.ends == [None]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [("fail", "no such model; choose another"), ("die", "scheduler 2 has died")],
)
def test_a_group_that_does_not_start_leaves_nothing_and_the_others_run(
    behaviour: str, reason: str
) -> None:
    with running(max_restarts=0) as run:
        before = run.pids
        with pytest.raises(RuntimeError, match=reason):
            run.supervisor.orders.start("engine-2", new_engine(behaviour)).result(WAIT_S)
        assert run.pids == before
        assert set(read_restarts(run.supervisor.runtime_dir.path).counts) == set(before)
        run.supervisor.orders.start("engine-2", new_engine()).result(WAIT_S)
    assert run.ends == [None]


def test_a_group_that_is_being_restarted_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 1000.0)
    with running() as run:
        run.supervisor.orders.start("engine-2", new_engine()).result(WAIT_S)
        before = {name: pid for name, pid in run.pids.items() if not name.endswith("2")}
        for num_deaths in (1, 2):  # the second restart is late
            counts = read_restarts(run.supervisor.runtime_dir.path).counts
            assert counts["worker 2"]["death"] == num_deaths - 1
            wait_until(lambda: run.named("worker 2").ready is not None)
            os.kill(run.named("worker 2").pid, signal.SIGKILL)
            if num_deaths == 1:
                wait_until(
                    lambda: (
                        read_restarts(run.supervisor.runtime_dir.path).counts["worker 2"]["death"]
                        == 1
                    )
                )
        wait_until(lambda: run.named("worker 2").lifeline_closed)
        run.supervisor.orders.stop("engine-2").result(WAIT_S)
        assert run.pids == before


def test_a_new_process_has_its_place_in_the_stop_order() -> None:
    with running() as run:
        run.supervisor.orders.start("engine-2", new_engine()).result(WAIT_S)
        more = [msgspec.structs.replace(one, name=f"{one.name}.1") for one in new_engine()]
        more = [msgspec.structs.replace(one, restart_group="engine-3") for one in more]
        run.supervisor.orders.start("engine-3", more).result(WAIT_S)
        names = ["worker 2", "worker 2.1", "scheduler 2", "scheduler 2.1"]
        assert [name for name in run.pids if "2" in name] == names


def test_a_call_is_made_in_the_loop() -> None:
    with running() as run:
        threads: list[str] = []
        call = run.supervisor.orders.call(lambda: threads.append(threading.current_thread().name))
        call.result(WAIT_S)
        assert threads != [threading.current_thread().name]


def test_an_order_is_not_carried_out_before_the_loop_has_taken_it() -> None:
    """A group that becomes ready after a death, just when a restart is ordered."""
    orders = Orders()
    orders.open()
    try:
        future = orders.restart("engine-1")
        orders.finish("engine-1")
        assert not future.done()
        assert orders.take_new() == [RestartGroup("engine-1")]
        orders.finish("engine-1")
        assert future.done()
    finally:
        orders.close("the test has ended")


def test_a_start_ends_with_the_deployment() -> None:
    with running() as run:
        future = run.supervisor.orders.start("engine-2", new_engine("hang"))
        run.stop_signal.request()
        with pytest.raises(RuntimeError, match="is being stopped"):
            future.result(WAIT_S)


def test_a_restart_ends_with_the_deployment() -> None:
    with running() as run:
        run.freeze("worker 1")
        future = run.supervisor.orders.restart("engine-1")
        run.stop_signal.request()
        with pytest.raises(RuntimeError, match="is being stopped"):
            future.result(WAIT_S)
        wait_until(lambda: not run.supervisor.orders.is_open)
        with pytest.raises(RuntimeError, match="starting or stopping"):
            run.supervisor.orders.restart("engine-0")


def test_a_death_during_a_restart_is_restarted_too() -> None:
    with running() as run:
        run.freeze("worker 1")
        future = run.supervisor.orders.restart("engine-1")
        os.kill(run.named("worker 1").pid, signal.SIGKILL)
        future.result(WAIT_S)
    assert run.ends == [None]


def test_a_request_to_stop_is_no_second_signal() -> None:
    with StopSignals() as stop_signal:
        stop_signal.request()
        assert stop_signal.is_set()
        stop_signal.clear()
        stop_signal.request()
        assert not stop_signal.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_signal.is_set()


def test_answers_go_to_who_asked() -> None:
    with running() as run:
        process = run.named("worker 1")
        first = process.send_command(SetLogLevel("debug"))
        second = process.send_command(DescribeState())
        assert first.result(WAIT_S) == CommandAnswer(0, True, "logs debug and above")
        assert (second.result(WAIT_S).number, second.result(WAIT_S).ok) == (1, False)


def test_what_an_operator_has_set_holds_after_a_restart() -> None:
    def config_of(name: str) -> FakeChildConfig:
        config = run.named(name).spec.config
        assert isinstance(config, FakeChildConfig)
        return config

    with running() as run:
        for command in (SetLogLevel("debug"), Pause("keep")):
            run.named("worker 1").send_command(command).result(WAIT_S)
        for _ in range(2):
            run.restart("engine-1")
            assert (config_of("worker 1").log_level, config_of("worker 1").paused) == (
                "debug",
                "keep",
            )
            assert config_of("scheduler 1") == FakeChildConfig("serve")
        run.named("worker 1").send_command(Resume()).result(WAIT_S)
        run.restart("engine-1")
        assert config_of("worker 1").paused is None


def test_a_sleep_holds_after_a_restart_and_its_epoch_is_not_used_again() -> None:
    def config() -> FakeChildConfig:
        config = run.named("scheduler 1").spec.config
        assert isinstance(config, FakeChildConfig)
        return config

    with running() as run:
        process = run.named("scheduler 1")
        process.send_command(Sleep(0.0)).result(WAIT_S)
        for epoch in (4, 3):
            process._note(CommandAnswer(99, True, "asleep", {"epoch": epoch}))
        run.restart("engine-1")
        assert (config().is_asleep, config().epoch) == (True, 4)
        run.named("scheduler 1").send_command(Wake()).result(WAIT_S)
        run.restart("engine-1")
        assert not config().is_asleep


def test_commands_fail_with_their_process(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    with running() as run:
        process = run.named("worker 1")
        run.freeze("worker 1")
        unanswered = process.send_command(SetLogLevel("debug"))
        assert not unanswered.done()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(OSError, match="the process has ended"):
            unanswered.result(WAIT_S)
        with pytest.raises(OSError):  # noqa: PT011  # the system's message, or the one above
            process.send_command(SetLogLevel("debug")).result(WAIT_S)


def test_commands_to_a_process_that_does_not_read_fail() -> None:
    with running() as run:
        process = run.named("worker 1")
        run.freeze("worker 1")
        futures = [process.send_command(SetLogLevel("debug")) for _ in range(5_000)]
        assert any(future.done() and future.exception() is not None for future in futures)
