"""Carries out the actions of an operator on the processes of a supervisor."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol, assert_never

import msgspec

from longshore.deploy.admin.actions import (
    Action,
    AddEngine,
    Answer,
    Drain,
    DrainOneEngine,
    KVSnapshot,
    PauseEngine,
    ProfileProcesses,
    ReloadKeys,
    RemoveEngine,
    ResetConnectorCache,
    ResetEncoderCache,
    ResetPrefixCache,
    Restart,
    Result,
    ResumeEngine,
    SetLevel,
    SleepEngine,
    Status,
    WakeEngine,
)
from longshore.deploy.gateway.key_file import DeploymentKeys
from longshore.deploy.supervisor.engine_set import EngineRefused, EngineSet
from longshore.deploy.supervisor.fork_servers import NAME as FORK_SERVER
from longshore.deploy.supervisor.orders import GroupBusy
from longshore.deploy.supervisor.process import ManagedProcess, ProcessSpec
from longshore.deploy.supervisor.replica import Replica, about
from longshore.deploy.supervisor.supervisor import Supervisor
from longshore.protocol.commands import (
    Command,
    CommandAnswer,
    DescribeState,
    DrainEngine,
    EngineMember,
    GatewayCommand,
    Pause,
    Profile,
    ReleaseEngine,
    ResetCache,
    Resume,
    Role,
    SetLogLevel,
    Sleep,
    UseEngine,
    UseKeys,
    Wake,
    WriteKVSnapshot,
)
from longshore.protocol.errors import ConfigError
from longshore.worker.process.byte_size import byte_size

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S: Final = 10.0
"""How long a process may take to begin with a command."""
SNAPSHOT_TIMEOUT_S: Final = 300.0
END_TIMEOUT_S: Final = 60.0
"""How long the processes of an engine may take to end, generously."""
BUSY_POLL_S: Final = 0.2
DEPLOYMENT: Final = "deployment"
SUPERVISOR: Final = "supervisor"
GATEWAYS: Final = "gateways"
"""The stop group of all gateways."""


@dataclass(frozen=True)
class NewEngine:
    """An engine that can be started. specs: its processes, in start order."""

    specs: Sequence[ProcessSpec]
    member: EngineMember


class EngineMaker(Protocol):
    """Makes what a new engine of a deployment needs, and cleans up after one."""

    def make_engine(self, replica: Replica) -> NewEngine:
        """Raises ConfigError if the machine has too little memory for it."""

    def clean_up(self, replica: Replica, specs: Sequence[ProcessSpec]) -> None:
        """Its processes have ended: delete its files and release its shared memory."""


class InvalidAction(Exception):
    """The action names an engine or process that does not exist."""


class Operations:
    """Carries out the actions of an operator. Thread-safe. Not for the supervisor's own thread,
    which must read the answers meanwhile.

    engines:   the engines of the deployment.
    maker:     makes further ones; None: none can be added or removed.
    fixed:     why they cannot.
    models:    names of the models, by their places.
    keys:      of the clients; None: the deployment has no gateway here.
    stop:      begins to stop the deployment, as SIGTERM does.
    state_dir: profiles are written to its folder `profiles`.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        engines: EngineSet,
        *,
        maker: EngineMaker | None = None,
        fixed: str = "the topology says which engines there are",
        models: Sequence[str] = (),
        keys: DeploymentKeys | None = None,
        stop: Callable[[], None],
        state_dir: Path,
        drain_timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self._supervisor = supervisor
        self._engine_set = engines
        self._maker = maker
        self._fixed = fixed
        self._models = models
        self._keys = DeploymentKeys() if keys is None else keys
        self._reloading = threading.Lock()
        self._stop = stop
        self._profiles = state_dir / "profiles"
        self._drain_timeout_s = drain_timeout_s
        self._start_timeout_s = start_timeout_s
        self._file_numbers = itertools.count()
        self._not_stopped: dict[Replica, Sequence[ProcessSpec]] = {}  # of failed removals

    def perform(self, action: Action) -> tuple[Answer, list[Path]]:
        """Carry out an action; returns the answer, and files to send after it and delete."""
        if not isinstance(action, Status):
            logger.info("carrying out %s", action)
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
                for each in self._engines(action.engine):
                    self._engine_set.resume(each.number)
                return self._ask_engines(action.engine, Resume())
            case SleepEngine(timeout_s=timeout_s):
                wait_s = timeout_s + self._start_timeout_s  # for the copies to host memory
                return self._ask_engines(action.engine, Sleep(timeout_s), wait_s)
            case WakeEngine():
                return self._ask_engines(action.engine, Wake(), self._start_timeout_s)
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
            case ReloadKeys():
                with self._reloading:  # two would give the same slots to different keys
                    return Answer.of(*self._reload_keys())
            case Restart():
                return self._restart(action)
            case AddEngine(role):
                return Answer.of(self._add(role))
            case DrainOneEngine():
                return Answer.of(self._drain(action))
            case RemoveEngine():
                return Answer.of(self._remove(action))
            case Drain():
                self._stop()
                patience = f"running requests have {self._drain_timeout_s:g} s to finish"
                return Answer.of(Result(DEPLOYMENT, True, f"stopping; {patience}"))
            case KVSnapshot():
                raise AssertionError("this action has files")
            case _:
                assert_never(action)

    # Engines

    def _engines(self, engine: int | None) -> Sequence[Replica]:
        """One engine, or all that have started and are not being removed."""
        if engine is None:
            return self._engine_set.serving
        present = self._engine_set.present
        if found := [each for each in present if each.number == engine]:
            return found
        numbers = ", ".join(str(each.number) for each in present) or "on other nodes"
        raise InvalidAction(f"engine={engine} does not exist here; the engines are {numbers}")

    def _scheduler(self, engine: Replica) -> ManagedProcess:
        found = self._schedulers(engine)
        if not found:
            if self._engine_set.states.get(engine) == "starting":
                raise InvalidAction(f"engine {engine.number} is starting")
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
        that have not finished are resumed afterwards, or on another engine."""
        if timeout_s is None:
            timeout_s = self._drain_timeout_s
        scheduler = self._scheduler(engine)
        group = scheduler.spec.restart_group
        assert group is not None
        name, begin_s = f"engine {engine.number}", time.monotonic()
        states = self._engine_set.states.items()
        others = [each for each, state in states if state == "ready" and each != engine]
        holds_new = not any(map(self._is_running, others))
        drain = DrainEngine(timeout_s, holds_new)
        (drained,) = _ask([(scheduler, drain)], timeout_s + ANSWER_TIMEOUT_S)
        try:
            self._supervisor.orders.restart(group).result(self._start_timeout_s)
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

    # Engines that come and go

    def _is_running(self, engine: Replica) -> bool:
        """Whether it computes requests."""
        return self._is_ready(engine) and not self._is_asleep(engine)

    def _is_ready(self, engine: Replica) -> bool:
        return any(each.ready is not None for each in self._schedulers(engine))

    def _is_asleep(self, engine: Replica) -> bool:
        return any(each.is_asleep for each in self._schedulers(engine))

    def _schedulers(self, engine: Replica) -> list[ManagedProcess]:
        """Its scheduler; none while it is not started."""
        return [each for each in list(self._supervisor.processes) if each.name == engine.scheduler]

    def _add(self, role: Role | None) -> Result:
        """If the engine does not start, everything is as it was before."""
        begin_s = time.monotonic()
        try:
            if self._maker is None:
                raise EngineRefused(self._fixed)
            replica = self._engine_set.reserve(role)
        except EngineRefused as error:
            return Result(DEPLOYMENT, False, f"no engine was added: {error}")
        name, specs = f"engine {replica.number}", []
        try:
            new = self._maker.make_engine(replica)
            specs = list(new.specs)
            started = self._supervisor.orders.start(replica.engine_id, specs)
            started.result(self._start_timeout_s + END_TIMEOUT_S)
        except (ConfigError, RuntimeError, OSError) as error:  # a TimeoutError is an OSError
            self._maker.clean_up(replica, specs)
            self._engine_set.remove_stopped(replica.number, was_ready=False)
            why = str(error) or "the supervisor is busy"
            return Result(name, False, f"not added: {why}")
        use = partial(self._engine_set.use, replica.number)
        failures = self._tell_gateways(UseEngine(new.member), use)
        if failures:
            self._stop_engine(replica, specs, was_ready=False)
            return Result(name, False, f"not added: {failures[0].process}: {failures[0].message}")
        took_s = round(time.monotonic() - begin_s, 1)
        return Result(
            name,
            True,
            f"added as {replica.role} engine in {took_s:g} s, and gets requests",
            {"engine": replica.number, "role": replica.role, "took_s": took_s},
        )

    def _drain(self, action: DrainOneEngine) -> Result:
        begin_s = time.monotonic()
        engine = self._begin_change(action.engine, self._engine_set.drain)
        if isinstance(engine, Result):
            return engine
        drained = self._drain_requests(engine, action.timeout_s)
        took_s = round(time.monotonic() - begin_s, 1)
        if drained.ok:
            return Result(f"engine {engine.number}", True, f"drained in {took_s:g} s")
        why = f"gets no new requests, but was not drained: {drained.message}"
        return Result(f"engine {engine.number}", False, why)

    def _remove(self, action: RemoveEngine) -> Result:
        if self._maker is None:
            return Result(DEPLOYMENT, False, f"no engine was removed: {self._fixed}")
        begin_s = time.monotonic()
        engine = self._begin_change(action.engine, self._engine_set.remove)
        if isinstance(engine, Result):
            return engine
        specs = self._not_stopped.pop(engine, None)
        if specs is None:
            specs = [process.spec for process in self._processes(engine.number, None)]
            drained = self._drain_requests(engine, action.timeout_s)
        else:
            drained = Result(engine.engine_id, True, "gateways do not use it any more")
        failure = self._stop_engine(engine, specs, was_ready=True)
        if failure is not None:
            why = f"gets no requests, but its processes have not ended: {failure}"
            return Result(f"engine {engine.number}", False, f"{why}. Remove it again")
        took_s = round(time.monotonic() - begin_s, 1)
        how = "" if drained.ok else f"; others continue its last requests: {drained.message}"
        return Result(
            f"engine {engine.number}",
            True,
            f"removed in {took_s:g} s{how}",
            {"engine": engine.number, "took_s": took_s, "was_drained": drained.ok},
        )

    def _begin_change(
        self, number: int, begin: Callable[[int, Callable[[Replica], bool]], None]
    ) -> Replica | Result:
        (engine,) = self._engines(number)
        try:
            begin(number, self._is_running)
        except EngineRefused as error:
            return Result(f"engine {number}", False, str(error))
        return engine

    def _drain_requests(self, engine: Replica, timeout_s: float | None) -> Result:
        if timeout_s is None:
            timeout_s = self._drain_timeout_s
        command = DrainEngine(timeout_s, is_final=False)
        (drained,) = _ask([(self._scheduler(engine), command)], timeout_s + ANSWER_TIMEOUT_S)
        return drained

    def _stop_engine(
        self, engine: Replica, specs: Sequence[ProcessSpec], *, was_ready: bool
    ) -> str | None:
        """Make all gateways release an engine, then stop it. Returns why it was not stopped, if it
        was not."""
        release = partial(self._engine_set.release, engine.number)
        failures = self._tell_gateways(ReleaseEngine(engine.number), release)
        for failure in failures:
            logger.warning(
                "%s uses %s: %s",
                failure.process,
                engine.engine_id,
                failure.message,
                extra=about(engine.engine_id),
            )
        try:
            self._order_stop(engine).result(END_TIMEOUT_S)
        except (RuntimeError, TimeoutError) as error:
            if self._processes(engine.number, None):
                reason = str(error) or f"they still run after {END_TIMEOUT_S:g} s"
                logger.warning(
                    "%s has not been stopped: %s",
                    engine.engine_id,
                    reason,
                    extra=about(engine.engine_id),
                )
                self._engine_set.keep(engine.number)
                self._not_stopped[engine] = specs
                return reason
        assert self._maker is not None
        self._maker.clean_up(engine, specs)
        self._engine_set.remove_stopped(engine.number, was_ready=was_ready)
        return None

    def _order_stop(self, engine: Replica) -> "Future[None]":
        """Once a restart that is under way has ended."""
        deadline_s = time.monotonic() + self._start_timeout_s
        while True:
            try:
                return self._supervisor.orders.stop(engine.engine_id)
            except GroupBusy:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(BUSY_POLL_S)

    def _tell_gateways(self, command: GatewayCommand, change: Callable[[], None]) -> list[Result]:
        """Change the set that new gateways get, and send the command to those that run; returns the
        failures. A gateway that is starting carries it out as soon as it can; one that dies is
        started with the new set."""
        sent: list[tuple[ManagedProcess, Future[CommandAnswer]]] = []

        def send() -> None:
            change()
            for process in self._supervisor.processes:
                if process.stop_group == GATEWAYS and not process.lifeline_closed:
                    sent.append((process, process.send_command(command)))

        try:
            self._supervisor.orders.call(send).result(ANSWER_TIMEOUT_S)
        except (RuntimeError, TimeoutError) as error:
            return [Result(DEPLOYMENT, False, str(error) or "the supervisor is busy")]
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        results = [
            (each, _result(each, future, deadline_s, ANSWER_TIMEOUT_S)) for each, future in sent
        ]
        return [
            result
            for process, result in results
            if not result.ok and process.ready is not None and not process.lifeline_closed
        ]

    def _reload_keys(self) -> list[Result]:
        """All gateways take the keys, or start with them."""
        before = {key.name: key for key in self._keys.keys}
        try:
            keys = self._keys.read_again()
        except ConfigError as error:
            return [Result(DEPLOYMENT, False, f"the API keys are as before: {error}")]
        path = self._supervisor.runtime_dir.write_keys(msgspec.json.encode(keys))
        failures = self._tell_gateways(UseKeys(str(path)), partial(self._keys.use, keys))
        after = {key.name: key for key in keys}
        kept = before.keys() & after.keys()
        values = {
            "keys": len(keys),
            "added": len(after.keys() - before.keys()),
            "removed": len(before.keys() - after.keys()),
            "changed": sum(before[name] != after[name] for name in kept),
        }
        shown = ", ".join(f"{number} {what}" for what, number in values.items())
        return [Result(DEPLOYMENT, not failures, shown, values), *failures]

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
        schedulers = {engine.scheduler for engine in self._engine_set.present}
        results = self._engine_states(action.engine)
        for process in self._processes(action.engine, None):
            if process.name in schedulers and process.ready is not None:
                (described,) = _ask([(process, DescribeState())], ANSWER_TIMEOUT_S)
                results.append(described)
            else:
                results.append(_state_of(process))
        for pid, num_bytes in self._supervisor.memory_of_fork_servers().items():
            if action.engine is None:
                values = {"pid": pid, "resident_bytes": num_bytes}
                shown = f"runs, {byte_size(num_bytes)}, shared with the workers"
                results.append(Result(FORK_SERVER, True, shown, values))
        return Answer.of(*results)

    def _engine_states(self, number: int | None) -> list[Result]:
        results = []
        for engine, state in self._engine_set.states.items():
            is_ready = state == "removed" or self._is_ready(engine)
            if number in (None, engine.number):
                shown: str = state if is_ready or state == "starting" else "not ready"
                if shown == "ready" and self._is_asleep(engine):
                    shown = "asleep"
                values = {"role": engine.role, "state": shown}
                message = f"{engine.role}, {shown}"
                if len(self._models) > 1:
                    values["model"] = self._models[engine.model]
                    message += f", {self._models[engine.model]}"
                results.append(Result(f"engine {engine.number}", is_ready, message, values))
        return results

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
    if process.ready is None:
        return Result(process.name, False, f"not ready: {process.doing}", {"pid": process.pid})
    state = process.ready.details.get("state", "ready")
    return Result(process.name, True, state, {"pid": process.pid})
