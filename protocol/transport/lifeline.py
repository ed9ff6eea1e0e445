"""The lifeline between a process and its supervisor: one inherited socket.

The child reports that it is ready, or why it failed, and then regularly that it is alive, from the
loop that does its work: a process that hangs reports nothing. The supervisor sends commands of an
operator, `Restarting` to a process that outlives others, and `TakeOver` to a standby; it asks for
an orderly shutdown with STOP_SIGNAL. When the supervisor's end closes, for any reason, the child
removes the runtime directory and exits at once, so that no orphan and no socket file remains. When
the child's end closes, the supervisor knows that it died.
"""

import contextlib
import logging
import os
import shutil
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias, assert_never

import msgspec

from longshore.protocol.commands import (
    CommandAnswer,
    EngineCommand,
    GatewayCommand,
    NumberedCommand,
    Profile,
    ReleaseEngine,
    SetLogLevel,
    UseEngine,
    UseKeys,
)
from longshore.protocol.logs.stack_samples import sample_stacks
from longshore.protocol.process_limits import limit_reached

logger = logging.getLogger(__name__)

EXIT_SUPERVISOR_GONE: Final = 75

REPORT_TIMEOUT_S: Final = 2

ALIVE_INTERVAL_S: Final = 1.0
"""How often a process reports that it is alive, once it is ready."""

MAX_COMMAND_BYTES: Final = 65_536

STOP_SIGNAL: Final = signal.SIGUSR1
"""Asks a supervised process for an orderly shutdown."""

SERVICE_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
"""Those that are sent to whole services, and that only the supervisor obeys, if anyone does."""


def stop_signals(lifeline_fd: int | None) -> tuple[signal.Signals, ...]:
    """The signals that stop this process. A supervised one ignores SERVICE_SIGNALS from now on: an
    init system sends them to all processes of a service at once, and only the supervisor knows in
    which order they can stop. Call it in the main thread."""
    if lifeline_fd is None:
        return signal.SIGTERM, signal.SIGINT
    for number in SERVICE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return (STOP_SIGNAL,)


class Ready(msgspec.Struct, tag="ready", frozen=True, forbid_unknown_fields=True):
    """The process is ready; `details` are lines for the operator, such as `num_blocks: 4096`.

    late_imports: modules that it has imported after loading, which its standbys import in advance.
    """

    details: dict[str, str] = {}
    late_imports: tuple[str, ...] = ()


class Failed(msgspec.Struct, tag="failed", frozen=True, forbid_unknown_fields=True):
    """The process failed; `reason` says what happened, why and what to do, without a traceback.

    is_consequence: another process failed first; its reason explains more.
    is_out_of_memory: it had no memory for a step. The engine goes on with smaller ones.
    """

    reason: str
    is_consequence: bool = False
    is_out_of_memory: bool = False


class Progress(msgspec.Struct, tag="progress", frozen=True, forbid_unknown_fields=True):
    """What a process that takes long to start is doing now."""

    doing: str


class Alive(msgspec.Struct, tag="alive", frozen=True, forbid_unknown_fields=True):
    """The process's loop runs. `late`: what takes longer than it may; None: nothing."""

    late: str | None = None


class Acknowledged(msgspec.Struct, tag="acknowledged", frozen=True, forbid_unknown_fields=True):
    """`Restarting` has been received."""


LifelineReport: TypeAlias = Ready | Failed | Progress | Alive | CommandAnswer | Acknowledged
CommandHandler: TypeAlias = Callable[[int, EngineCommand], None]
"""Carries out a command, given with its number, or passes it on to another thread."""
GatewayCommandHandler: TypeAlias = Callable[[int, GatewayCommand], None]


class Restarting(msgspec.Struct, tag="restarting", frozen=True, forbid_unknown_fields=True):
    """The processes that this one needs have ended, all of them, and are started again as soon as
    this is acknowledged.

    reason:      which one died first, and how.
    were_killed: from outside, so what they had written before is as valid as ever. One that fails
                 or crashes may have written anything.
    is_out_of_memory: see `Failed`.
    """

    reason: str
    were_killed: bool = False
    is_out_of_memory: bool = False


class TakeOver(msgspec.Struct, tag="take_over", frozen=True, forbid_unknown_fields=True):
    """This standby, which has reported that it is ready, takes the place of a process that has
    ended: its reports are those of that process from now on."""


_encoder = msgspec.json.Encoder()
_command_decoder = msgspec.json.Decoder(NumberedCommand)
_decoder: msgspec.json.Decoder[LifelineReport] = msgspec.json.Decoder(LifelineReport)
_event_decoder: msgspec.json.Decoder[Restarting | TakeOver] = msgspec.json.Decoder(
    Restarting | TakeOver
)


def decode_report(line: bytes) -> LifelineReport:
    """Decode one line of a child. Raises msgspec.MsgspecError if it is not a report."""
    return _decoder.decode(line)


def encode_event(message: Restarting | TakeOver) -> bytes:
    """Encode one line to a child."""
    return _encoder.encode(message) + b"\n"


class Lifeline:
    """The child's end. With `fd=None` (a process without a supervisor) reports are discarded and
    nothing is watched.

    gateway_handler: of a gateway: gets the commands to it from the beginning, on the lifeline's
                     thread, as `handle_commands` describes.
    """

    def __init__(
        self,
        fd: int | None,
        runtime_dir: Path | None = None,
        gateway_handler: GatewayCommandHandler | None = None,
    ) -> None:
        self._is_ready = False
        self._socket = None if fd is None else socket.socket(fileno=fd)
        self._runtime_dir = runtime_dir
        self._next_alive_s = 0.0
        self._received: deque[Restarting] = deque()
        self._has_received = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._take_over = threading.Event()
        self._sending = threading.Lock()  # reports of several threads must not mix
        self._handler: CommandHandler | None = None
        self._gateway_handler = gateway_handler
        if self._socket is not None:
            self._socket.setblocking(True)
            # A supervisor that does not read must not keep this process from ending.
            timeout = struct.pack("ll", REPORT_TIMEOUT_S, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
            threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def report(self, report: LifelineReport) -> None:
        """Send `report` to the supervisor; ignored if the supervisor has just exited."""
        self._is_ready |= isinstance(report, Ready)
        if self._socket is None:
            return
        if isinstance(report, Ready):
            self._next_alive_s = 0.0
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(_encoder.encode(report) + b"\n")

    def report_limit(self, error: Exception) -> bool:
        """Report that this process cannot start, if a limit of the operating system can have caused
        this error. Returns whether that is so."""
        if self._is_ready or (reason := limit_reached(error)) is None:
            return False
        self.report(Failed(reason))
        return True

    def report_alive(self, late: str | None = None) -> None:
        """Report Alive, at most every ALIVE_INTERVAL_S, but at once after Ready: a hang is noticed
        only after the first report. Never blocks: a supervisor that does not read its reports gets
        no more of them."""
        now_s = time.monotonic()
        if self._socket is None or now_s < self._next_alive_s:
            return
        self._next_alive_s = now_s + ALIVE_INTERVAL_S
        if self._sending.acquire(blocking=False):
            with contextlib.suppress(OSError):
                self._socket.send(_encoder.encode(Alive(late)) + b"\n", socket.MSG_DONTWAIT)
            self._sending.release()

    def wait_for_take_over(self) -> None:
        """Wait until this standby takes a place; report Alive meanwhile."""
        while not self._take_over.wait(ALIVE_INTERVAL_S):
            self.report_alive()

    def handle_commands(self, handler: CommandHandler) -> None:
        """From now on `handler` gets the operator's commands to this engine, on the lifeline's
        thread. It must report a CommandAnswer for each."""
        self._handler = handler

    def fileno(self) -> int:
        """Readable when the supervisor has sent something."""
        return self._has_received

    def take_received(self) -> list[Restarting]:
        """What the supervisor has sent since the last call. Never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._has_received)
        return [self._received.popleft() for _ in range(len(self._received))]

    def _watch(self) -> None:
        assert self._socket is not None
        unread = b""
        try:
            while received := self._socket.recv(4096):
                *lines, unread = (unread + received).split(b"\n")
                unread = unread[:MAX_COMMAND_BYTES]
                for line in lines:
                    self._take(line)
        except OSError:
            pass
        if self._runtime_dir is not None:
            shutil.rmtree(self._runtime_dir, ignore_errors=True)
        os._exit(EXIT_SUPERVISOR_GONE)

    def _take(self, line: bytes) -> None:
        try:
            event = _event_decoder.decode(line)
        except msgspec.MsgspecError:
            self._obey(line)
            return
        match event:
            case Restarting():
                self._received.append(event)
                os.eventfd_write(self._has_received, 1)
            case TakeOver():
                self._take_over.set()
            case _:
                assert_never(event)

    def _obey(self, line: bytes) -> None:
        try:
            numbered = _command_decoder.decode(line)
        except msgspec.MsgspecError as error:
            logger.warning("the supervisor sent an invalid command: %s", error)
            return
        number = numbered.number
        match numbered.command:
            case SetLogLevel(level):
                logging.getLogger().setLevel(level.upper())
                self.report(CommandAnswer(number, True, f"logs {level} and above"))
            case Profile() as profile:
                threading.Thread(
                    target=self._profile, args=(number, profile), name="profile", daemon=True
                ).start()
            case (UseEngine() | ReleaseEngine() | UseKeys()) as of_gateway if (
                self._gateway_handler is not None
            ):
                self._gateway_handler(number, of_gateway)
            case _ as command if self._handler is not None and not isinstance(
                command, GatewayCommand
            ):
                self._handler(number, command)
            case _:
                why = "the process is still starting, or takes no such commands"
                self.report(CommandAnswer(number, False, why))

    def _profile(self, number: int, profile: Profile) -> None:
        try:
            num_samples = sample_stacks(profile.duration_s, Path(profile.path))
        except OSError as error:
            self.report(CommandAnswer(number, False, f"the profile cannot be written: {error}"))
            return
        self.report(
            CommandAnswer(
                number,
                True,
                f"{num_samples} samples in {profile.path}",
                {"num_samples": num_samples, "path": profile.path},
            )
        )
