"""One child process, with a configuration file, a lifeline and relayed output."""

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, Final

import msgspec

from longshore.deploy.supervisor.fork_server import (
    ForkedProcess,
    inherited_environment,
    is_stopped,
)
from longshore.deploy.supervisor.fork_servers import ForkServers
from longshore.deploy.supervisor.log_relay import LogRelay, relay_output
from longshore.protocol.commands import (
    Command,
    CommandAnswer,
    DrainEngine,
    NumberedCommand,
    Pause,
    Resume,
    SetLogLevel,
    Sleep,
    Wake,
)
from longshore.protocol.transport.lifeline import (
    STOP_SIGNAL,
    Acknowledged,
    Alive,
    Failed,
    LifelineReport,
    Progress,
    Ready,
    Restarting,
    TakeOver,
    decode_report,
    encode_event,
)

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 4.0
"""Time that a process has to end after a stop signal, without draining."""

READS_PER_CALL: Final = 16

KILL_TIMEOUT_S: Final = 20.0
"""How long a killed process may take to end, for example to release the memory of a device."""

MAX_LATE_S: Final = 2.0
"""If the supervisor itself wakes up so much too late, silence of others means nothing."""


class ProcessSpec(msgspec.Struct, frozen=True):
    """How to start one process.

    name:   name in log lines and messages, such as `worker 0`.
    module: run as `python -P -m module CONFIG.json`; -P keeps the current folder off sys.path.
    config: the process's configuration; `lifeline_fd` and `runtime_dir` are filled in later. Its
            file is private, and deleted when the process has read it.
    environment: environment variables in addition to the inherited ones, which are those of the
            supervisor without settings.
    late_environment: likewise, those that nothing reads while the module is imported: a forked
            process gets them after it.
    pass_fds: file descriptors that the process inherits in addition to its lifeline.
    stop_group: consecutive processes in start order with the same group are stopped together. None:
             the process is stopped by itself.
    stopped_by: name of the process that stops this one when it shuts down itself.
    restart_group: processes with the same group are restarted together when one of them dies. None:
             its death ends the deployment.
    survives: names of the processes of the group whose death alone does not end this one: it waits
             for the next ones.
    is_told: it hears of their end over its lifeline, and begins anew with them, without a restart.
    config_after: the configuration for the start after that with the given one; None: the same.
    num_standbys: processes that are kept ready to take its place.
    config_of_standby: the configuration of a standby, from that of this process and a number that
            no other standby of it has had.
    """

    name: str
    module: str
    config: msgspec.Struct
    environment: Mapping[str, str] = {}
    late_environment: Mapping[str, str] = {}
    pass_fds: tuple[int, ...] = ()
    stop_group: str | None = None
    stopped_by: str | None = None
    restart_group: str | None = None
    survives: tuple[str, ...] = ()
    is_told: bool = False
    config_after: Callable[[Any], msgspec.Struct] | None = None
    num_standbys: int = 0
    config_of_standby: Callable[[Any, int], msgspec.Struct] | None = None


# A forked copy of this process must not keep the lifelines open, or the children would outlive it.
_lifelines: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_lifelines() -> None:
    for lifeline in list(_lifelines):
        lifeline.close()


os.register_at_fork(after_in_child=_close_lifelines)


class ManagedProcess:
    """A started child. It has its own process group, so that Ctrl-C in a terminal only reaches the
    supervisor, which then stops all processes in order.

    `ready`, `failed` and `late` hold its reports once `read_lifeline` has read them; `alive_s` is
    when it last read Alive, by `time.monotonic`. They are None again while the process reports
    progress, because it waits for a restarted one, except for `alive_s` of a process that is told.
    `was_ready`: it has been ready once. `is_hung`: it was found to hang.

    fork_servers: one of them forks it, if it can.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        runtime_dir: Path,
        relay: LogRelay,
        fork_servers: ForkServers | None = None,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.stop_group = spec.stop_group
        self.stopped_by = spec.stopped_by
        self.ready: Ready | None = None
        self.was_ready = self.is_hung = self._must_answer = False
        self._is_told_to_stop = False
        self.failed: Failed | None = None
        self.late: str | None = None
        self.doing = "starting"
        self.alive_s: float | None = None
        self._stopped_s = 0.0
        self._seen_stopped_s: float | None = None
        self.lifeline_closed = False
        self._unread = b""
        self._num_commands = itertools.count()
        self._commands: dict[int, Future[CommandAnswer]] = {}
        self._kept_settings: dict[str, Any] = {}
        self.lifeline, child_end = socket.socketpair()
        with contextlib.ExitStack() as descriptors:
            descriptors.enter_context(child_end)
            config = msgspec.structs.replace(
                spec.config, lifeline_fd=child_end.fileno(), runtime_dir=str(runtime_dir)
            )
            config_file = runtime_dir / f"{spec.name.replace(' ', '-')}.json"
            config_file.unlink(missing_ok=True)
            config_file.touch(0o600, exist_ok=False)
            config_file.write_bytes(msgspec.json.encode(config))
            self._config_file: Path | None = config_file
            reader, writer = os.pipe()
            output = open(reader, "rb", buffering=0)  # noqa: SIM115  # its thread closes it
            descriptors.callback(os.close, writer)
            try:
                self._process = _start(
                    spec, str(config_file), child_end.fileno(), writer, fork_servers, descriptors
                )
            except BaseException:
                output.close()
                raise
        self.lifeline.setblocking(False)
        _lifelines.add(self.lifeline)
        self._relay_thread = threading.Thread(
            target=relay_output,
            args=(output, relay, lambda: self.name),
            name=f"log of {spec.name}",
            daemon=True,
        )
        self._relay_thread.start()

    @property
    def pending(self) -> ForkedProcess | None:
        """Readable when a fork server has forked this process, or will not; then it is to be
        settled. None if it runs, or has ended."""
        process = self._process
        return process if isinstance(process, ForkedProcess) and process.is_pending else None

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """The lifeline: readable when the child reported something, or died."""
        return self.lifeline.fileno()

    def read_lifeline(self) -> None:
        """Read the child's reports, at most READS_PER_CALL times 64 KiB: the rest follows with the
        next call, because the lifeline stays readable. Never blocks."""
        for _ in range(READS_PER_CALL):
            if self.lifeline_closed:
                return
            try:
                received = self.lifeline.recv(65536)
            except BlockingIOError:
                return
            except ConnectionError:
                received = b""
            if not received:
                self.lifeline_closed = True
                self._fail_commands()
                return
            *lines, self._unread = (self._unread + received).split(b"\n")
            for line in lines:
                self._note(decode_report(line))
            if lines and self._config_file is not None:
                self._config_file.unlink(missing_ok=True)  # it has read it; it contains secrets
                self._config_file = None  # a next process may have one of this name

    def _note(self, report: LifelineReport) -> None:
        match report:
            case Ready():
                self.ready, self.was_ready = report, True
            case Failed():
                self.failed = self.failed or report
            case Acknowledged():
                self._must_answer = False
            case Alive(late):
                self.late, self.alive_s = late, time.monotonic()
            case CommandAnswer(number):
                self._note_epoch(report.values.get("epoch"))
                future = self._commands.pop(number, None)
                if future is not None:
                    future.set_result(report)
            case Progress(doing):
                self.ready = self.late = None
                if not self.spec.is_told:  # else its loop runs meanwhile
                    self.alive_s = None
                self.doing = doing
                logger.debug("%s: %s", self.name, doing)

    def send_command(self, command: Command) -> "Future[CommandAnswer]":
        """Send an operator's command. May be called on any thread; `read_lifeline`, on another one,
        finishes the answer. Its exception is OSError if the process ends or does not read."""
        future: Future[CommandAnswer] = Future()
        number = next(self._num_commands)
        self._commands[number] = future
        line = msgspec.json.encode(NumberedCommand(number, command)) + b"\n"
        try:
            if self.lifeline.send(line) != len(line):
                raise OSError("its lifeline is full")
            self._keep_setting(command)
        except OSError as error:
            self._commands.pop(number, None)
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)
        if self.lifeline_closed:  # perhaps after its other commands have failed
            self._fail_commands()
        return future

    def _keep_setting(self, command: Command) -> None:
        """What an operator has set holds for the next process, too. One that has not been ready
        refuses to pause."""
        match command:
            case SetLogLevel(level):
                self._kept_settings["log_level"] = level
            case Pause(mode) if self.was_ready:
                self._kept_settings["paused"] = mode
            case DrainEngine(is_final=False) if self.was_ready:
                self._kept_settings["is_drained"] = True
            case Resume() if self.was_ready:
                self._kept_settings["paused"] = None
                self._kept_settings["is_drained"] = False
            case Sleep() if self.was_ready:
                self._kept_settings["is_asleep"] = True
            case Wake() if self.was_ready:
                self._kept_settings["is_asleep"] = False

    @property
    def is_asleep(self) -> bool:
        """Whether an operator has sent it to sleep, or it began asleep."""
        began = getattr(self.spec.config, "is_asleep", False)
        return bool(self._kept_settings.get("is_asleep", began))

    def _note_epoch(self, epoch: object) -> None:
        """A sleep begins an epoch, without a restart; a next process must not begin it again."""
        config: Any = self.spec.config
        if isinstance(epoch, int) and epoch > config.epoch:
            config = msgspec.structs.replace(config, epoch=epoch)
            self.spec = msgspec.structs.replace(self.spec, config=config)

    def _fail_commands(self) -> None:
        while self._commands:
            with contextlib.suppress(KeyError, InvalidStateError):
                _, future = self._commands.popitem()
                future.set_exception(OSError("the process has ended"))

    def forgive_silence(self) -> None:
        """Count the time without reports from now on."""
        if self.alive_s is not None:
            self.alive_s = time.monotonic()

    def stopped_s(self) -> float:
        """Return for how long the process has been stopped, as by SIGSTOP or a debugger; 0 while it
        runs. Between two calls, at most MAX_LATE_S count."""
        if not is_stopped(self.pid):
            self._stopped_s, self._seen_stopped_s = 0.0, None
            return 0.0
        now_s = time.monotonic()
        if self._seen_stopped_s is not None:
            self._stopped_s += min(now_s - self._seen_stopped_s, MAX_LATE_S)
        self._seen_stopped_s = now_s
        return self._stopped_s

    @property
    def is_unanswered(self) -> bool:
        """Whether the process has not acknowledged yet that processes that it survives are
        restarted."""
        return self._must_answer and not self.lifeline_closed

    def outlive(self, message: Restarting) -> None:
        """Processes that it survives have ended, and are restarted."""
        if self.spec.is_told:
            self.spec, self.ready, self._must_answer = self.next_spec(), None, True
            with contextlib.suppress(OSError):  # it has just died, too
                self.lifeline.send(encode_event(message))

    def take_over(self, spec: ProcessSpec) -> None:
        """This standby, which is ready, becomes the process of the given spec, in place of one that
        has ended."""
        self.spec, self.name = spec, spec.name
        self.stop_group, self.stopped_by = spec.stop_group, spec.stopped_by
        self.ready, self.was_ready = None, False
        with contextlib.suppress(OSError):  # it has just died, too
            self.lifeline.send(encode_event(TakeOver()))

    def poll(self) -> int | None:
        """The exit status as in `subprocess`; None while the process runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to end; False if it still runs after `timeout_s`."""
        try:
            self._process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """Ask the process to shut down, once: one that is ending may handle no signal any more."""
        if not self._is_told_to_stop and self.poll() is None:
            self._is_told_to_stop = True
            self._process.send_signal(STOP_SIGNAL)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.poll() is None and self.pending is not None:
            self._process.send_signal(signal.SIGKILL)
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            if not self.wait(KILL_TIMEOUT_S):
                logger.error("%s does not end although it was killed; a device may hang", self.name)

    def was_killed(self) -> bool:
        """True if the process was ended by a signal."""
        return (self.poll() or 0) < 0

    @property
    def ended_from_outside(self) -> bool:
        """It was killed, rather than having failed or crashed, or it ended because another process
        had."""
        if self.failed is not None:
            return self.failed.is_consequence
        return self.poll() == -signal.SIGKILL

    def describe_exit(self) -> str:
        """How it ended: `exit status 1` or `SIGKILL`. Kills a process that hangs while it ends."""
        status = self.poll()
        if status is None:
            self.kill()
            status = self.poll()
        if status is None:
            return "it does not end"
        return f"exit status {status}" if status >= 0 else signal_name(-status)

    def close(self) -> None:
        """Relay the last lines of a process that has ended, and release its resources."""
        self._relay_thread.join(timeout=1.0)
        self.lifeline_closed = True
        self._fail_commands()
        self.lifeline.close()

    def next_spec(self) -> ProcessSpec:
        """How to start it again, or how a new one would be started."""
        config, config_after = self.spec.config, self.spec.config_after
        if config_after is not None:
            config = config_after(config)
        config = msgspec.structs.replace(config, **self._kept_settings)
        return msgspec.structs.replace(self.spec, config=config)


def signal_name(number: int) -> str:
    """Such as `SIGKILL`, or `signal 40` for a real-time signal, which has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _start(
    spec: ProcessSpec,
    config_file: str,
    lifeline_fd: int,
    output_fd: int,
    fork_servers: ForkServers | None,
    descriptors: contextlib.ExitStack,
) -> "subprocess.Popen[bytes] | ForkedProcess":
    """descriptors: that the process inherits and this one does not need. Raises OSError."""
    command = [sys.executable, "-P", "-m", spec.module, config_file]
    pass_fds = (lifeline_fd, *spec.pass_fds)

    def start_interpreter() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            pass_fds=pass_fds,
            env={**inherited_environment(), **spec.environment, **spec.late_environment},
            start_new_session=True,
        )

    if fork_servers is not None:
        kept = contextlib.ExitStack()
        forked = fork_servers.fork(
            spec.module,
            command,
            spec.environment,
            spec.late_environment,
            (output_fd, *pass_fds),
            start_anew=start_interpreter,
            release=kept.close,
        )
        if forked is not None:
            kept.push(descriptors.pop_all())  # a new interpreter would need them
            return forked
    return start_interpreter()
