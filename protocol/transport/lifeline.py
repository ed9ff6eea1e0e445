"""The tie between a process and its supervisor: one inherited socket, one report each way.

The child reports when it is ready or why it cannot be; the supervisor says nothing, and asks for an
orderly end with a signal of its own. When the
supervisor's end closes, for whatever reason, the child removes the runtime directory and exits at
once: no orphan, no socket file. When the child's end closes, the supervisor knows that it died.
"""

import os
import shutil
import signal
import socket
import threading
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

EXIT_SUPERVISOR_GONE: Final = 75

STOP_SIGNAL: Final = signal.SIGUSR1
"""Asks a supervised process for an orderly end."""


def stop_signals(lifeline_fd: int | None) -> tuple[signal.Signals, ...]:
    """The signals that end this process. A supervised one ignores SIGTERM and SIGINT from here on:
    an init system sends them to all processes of a service at once, and only the supervisor knows
    in which order they can stop. For the main thread."""
    if lifeline_fd is None:
        return signal.SIGTERM, signal.SIGINT
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    return (STOP_SIGNAL,)


class Ready(msgspec.Struct, tag="ready", frozen=True, forbid_unknown_fields=True):
    """The process serves; `details` are lines for the operator, such as `num_blocks: 4096`."""

    details: dict[str, str] = {}


class Failed(msgspec.Struct, tag="failed", frozen=True, forbid_unknown_fields=True):
    """The process gives up; `reason` says what, why and what to do, without a traceback.

    is_consequence: another process failed first, and its reason explains more.
    """

    reason: str
    is_consequence: bool = False


class Progress(msgspec.Struct, tag="progress", frozen=True, forbid_unknown_fields=True):
    """Starting takes long for a reason: what is being done now."""

    doing: str


LifelineReport: TypeAlias = Ready | Failed | Progress

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[LifelineReport] = msgspec.json.Decoder(LifelineReport)


def decode_report(line: bytes) -> LifelineReport:
    """One line that a child wrote. Raises msgspec.MsgspecError if it is none of ours."""
    return _decoder.decode(line)


class Lifeline:
    """The child's end. With `fd=None` (a process started by hand) reports go nowhere and nothing
    is watched."""

    def __init__(self, fd: int | None, runtime_dir: Path | None = None) -> None:
        self._socket = None if fd is None else socket.socket(fileno=fd)
        self._runtime_dir = runtime_dir
        if self._socket is not None:
            self._socket.setblocking(True)
            threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def report(self, report: LifelineReport) -> None:
        """Tell the supervisor; a supervisor that has just gone is no error here."""
        if self._socket is None:
            return
        try:
            self._socket.sendall(_encoder.encode(report) + b"\n")
        except OSError:
            return

    def _watch(self) -> None:
        assert self._socket is not None
        try:
            while self._socket.recv(4096):
                continue
        except OSError:
            pass
        if self._runtime_dir is not None:
            shutil.rmtree(self._runtime_dir, ignore_errors=True)
        os._exit(EXIT_SUPERVISOR_GONE)
