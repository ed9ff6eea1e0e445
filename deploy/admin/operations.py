"""Carries out the actions of an operator on the processes of a supervisor."""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, assert_never

from longshore.deploy.admin.actions import (
    Action,
    Answer,
    Drain,
    KVSnapshot,
    PauseEngine,
    ProfileProcesses,
    ResetConnectorCache,
    ResetEncoderCache,
    ResetPrefixCache,
    Restart,
    Result,
    ResumeEngine,
    SetLevel,
    Status,
)
from longshore.deploy.supervisor.process import ManagedProcess
from longshore.deploy.supervisor.replica import Replica
from longshore.deploy.supervisor.supervisor import Supervisor
from longshore.protocol.commands import (
    Command,
    CommandAnswer,
    DescribeState,
    DrainEngine,
    Pause,
    Profile,
    ResetCache,
    Resume,
    SetLogLevel,
    WriteKVSnapshot,
)

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S: Final = 10.0
"""How long a process may take to begin with a command."""
SNAPSHOT_TIMEOUT_S: Final = 300.0
SUPERVISOR: Final = "supervisor"


class InvalidAction(Exception):
    """The action names an engine or process that does not exist."""


class Operations:
    """Thread-safe. Not for the supervisor's own thread, which must read the answers meanwhile.

    stop:      begins to stop the deployment, as SIGTERM does.
    state_dir: profiles are written to its folder `profiles`.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        replicas: Sequence[Replica],
        *,
        stop: Callable[[], None],
        state_dir: Path,
        drain_timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self._supervisor = supervisor
        self._replicas = replicas
        self._stop = stop
        self._profiles = state_dir / "profiles"
        self._drain_timeout_s = drain_timeout_s
        self._start_timeout_s = start_timeout_s
        self._file_numbers = itertools.count()

    def perform(self, action: Action) -> tuple[Answer, list[Path]]:
        """Carry out an action; returns the answer, and files to send after it and delete."""
        if not isinstance(action, Status):
            logger.info("an operator asks for %s", action)
        try:
            if isinstance(action, KVSnapshot):
                return self._write_snapshots(action)
            return self._perform(action), []
        except InvalidAction as error:
            return Answer(False, error=str(error)), []

    def _perform(self, action: Action) -> Answer:
        match action:
            case Status():
                return self._status(action)
            case PauseEngine(mode=mode, timeout_s=timeout_s):
                return self._ask_engines(action.engine, Pause(mode, timeout_s), timeout_s)
            case ResumeEngine():
                return self._ask_engines(action.engine, Resume())
            case ResetPrefixCache(preempt=preempt):
                return self._ask_engines(action.engine, ResetCache("prefix", preempt))
            case ResetEncoderCache():
                return self._ask_engines(action.engine, ResetCache("encoder"))
            case ResetConnectorCache():
                return self._ask_engines(action.engine, ResetCache("connector"))
            case ProfileProcesses():
                return self._profile(action)
            case SetLevel():
                return self._set_level(action)
            case Restart():
                return self._restart(action)
            case Drain():
                self._stop()
                patience = f"running requests have {self._drain_timeout_s:g} s to finish"
                return Answer.of(Result("deployment", True, f"stopping; {patience}"))
            case KVSnapshot():
                raise AssertionError("this action has files")
            case _:
                assert_never(action)

    # Engines

    def _engines(self, engine: int | None) -> Sequence[Replica]:
        if engine is None:
            return self._replicas
        found = [each for each in self._replicas if each.number == engine]
        if not found:
            numbers = [str(each.number) for each in self._replicas]
            known = ", ".join(numbers) if numbers else "on other nodes"
            raise InvalidAction(f"engine={engine} does not exist here; the engines are {known}")
        return found

    def _scheduler(self, engine: Replica) -> ManagedProcess:
        found = [each for each in list(self._supervisor.processes) if each.name == engine.scheduler]
        if not found:
            raise InvalidAction("the deployment is starting or stopping")
        return found[0]

    def _ask_engines(self, engine: int | None, command: Command, wait_s: float = 0.0) -> Answer:
        asked = [(self._scheduler(each), command) for each in self._engines(engine)]
        return Answer.of(*_ask(asked, wait_s + ANSWER_TIMEOUT_S))

    def _write_snapshots(self, action: KVSnapshot) -> tuple[Answer, list[Path]]:
        folder, asked = self._supervisor.runtime_dir.path, []
        for engine in self._engines(action.engine):
            path = folder / f"kv-snapshot-{next(self._file_numbers)}.jsonl"
            asked.append((self._scheduler(engine), WriteKVSnapshot(str(path))))
        answer = Answer.of(*_ask(asked, SNAPSHOT_TIMEOUT_S))
        return answer, [Path(command.path) for _, command in asked]

    def _restart(self, action: Restart) -> Answer:
        results: list[Result] = []
        for engine in self._engines(action.engine):
            results.append(self._restart_one(engine, action.timeout_s))
            if not results[-1].ok:
                break  # the other engines still serve
        return Answer.of(*results)

    def _restart_one(self, engine: Replica, timeout_s: float | None) -> Result:
        """Let its requests finish, restart its processes, and wait until they are ready. Requests
        that have not finished go on afterwards, or on another engine."""
        if timeout_s is None:
            timeout_s = self._drain_timeout_s
        scheduler = self._scheduler(engine)
        group = scheduler.spec.restart_group
        assert group is not None
        name, begin_s = f"engine {engine.number}", time.monotonic()
        others = [self._scheduler(each) for each in self._replicas if each != engine]
        holds_new = not any(other.ready for other in others)
        drain = DrainEngine(timeout_s, holds_new)
        (drained,) = _ask([(scheduler, drain)], timeout_s + ANSWER_TIMEOUT_S)
        try:
            self._supervisor.ordered_restarts.order(group).result(self._start_timeout_s)
        except (RuntimeError, TimeoutError) as error:
            why = str(error) or f"it is not ready after {self._start_timeout_s:g} s"
            return Result(name, False, f"not restarted: {why}")
        took_s = round(time.monotonic() - begin_s, 1)
        how = "" if drained.ok else f"; its requests did not finish before: {drained.message}"
        return Result(
            name,
            True,
            f"restarted in {took_s:g} s{how}",
            {"took_s": took_s, "was_drained": drained.ok},
        )

    # Processes

    def _processes(self, engine: int | None, name: str | None) -> list[ManagedProcess]:
        """Those of one engine, or with one name, or all."""
        processes = list(self._supervisor.processes)
        if engine is not None:
            (replica,) = self._engines(engine)
            processes = [
                each
                for each in processes
                if each.name == replica.scheduler or replica.has_worker(each.name)
            ]
        names = [each.name for each in processes]
        if name is not None and name not in names:
            raise InvalidAction(
                f"there is no process {name!r} here; the processes are {', '.join(names)}"
            )
        return [each for each in processes if name in (None, each.name)]

    def _status(self, action: Status) -> Answer:
        schedulers = {engine.scheduler for engine in self._engines(action.engine)}
        results = []
        for process in self._processes(action.engine, None):
            if process.name in schedulers and process.ready is not None:
                (described,) = _ask([(process, DescribeState())], ANSWER_TIMEOUT_S)
                results.append(described)
            else:
                results.append(_state_of(process))
        return Answer.of(*results)

    def _profile(self, action: ProfileProcesses) -> Answer:
        processes = self._processes(action.engine, action.process)
        started = time.strftime("%Y%m%dT%H%M%S")
        try:
            self._profiles.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            return Answer(False, error=f"{self._profiles} cannot be created: {error.strerror}")
        asked = []
        for process in processes:
            name = f"{process.name.replace(' ', '-')}-{started}-{next(self._file_numbers)}.folded"
            asked.append((process, Profile(action.duration_s, str(self._profiles / name))))
        return Answer.of(*_ask(asked, action.duration_s + ANSWER_TIMEOUT_S))

    def _set_level(self, action: SetLevel) -> Answer:
        results: list[Result] = []
        is_own = action.engine is None and action.process in (None, SUPERVISOR)
        if is_own:
            logging.getLogger().setLevel(action.level.upper())
            results.append(Result(SUPERVISOR, True, f"logs {action.level} and above"))
        if action.process != SUPERVISOR or not is_own:
            processes = self._processes(action.engine, action.process)
            command = SetLogLevel(action.level)
            results += _ask([(process, command) for process in processes], ANSWER_TIMEOUT_S)
        return Answer.of(*results)


def _ask(asked: Sequence[tuple[ManagedProcess, Command]], timeout_s: float) -> list[Result]:
    """Send each process its command, then collect the answers."""
    sent = [(process, process.send_command(command)) for process, command in asked]
    deadline_s = time.monotonic() + timeout_s
    return [_result(process, future, deadline_s, timeout_s) for process, future in sent]


def _result(
    process: ManagedProcess, future: "Future[CommandAnswer]", deadline_s: float, timeout_s: float
) -> Result:
    try:
        answer = future.result(max(0.0, deadline_s - time.monotonic()))
    except TimeoutError:  # first, because it is an OSError
        why = f"no answer within {timeout_s:g} s: the process hangs or is stopped"
        return Result(process.name, False, why)
    except OSError as error:
        return Result(process.name, False, f"the command cannot be sent: {error}")
    values = {**answer.values, "pid": process.pid}
    return Result(process.name, answer.ok, answer.message, values)


def _state_of(process: ManagedProcess) -> Result:
    """What the supervisor itself knows."""
    if process.lifeline_closed:
        return Result(process.name, False, "has ended")
    if process.late is not None:
        return Result(process.name, False, f"hangs: {process.late}", {"pid": process.pid})
    is_ready = process.ready is not None
    state = "ready" if is_ready else f"not ready: {process.doing}"
    return Result(process.name, is_ready, state, {"pid": process.pid})
