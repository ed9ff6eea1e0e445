"""One child process: started with a configuration file and a lifeline, its output relayed."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from longshore.deploy.supervisor.log_relay import LogRelay
from longshore.protocol.transport.lifeline import (
    STOP_SIGNAL,
    Failed,
    LifelineReport,
    Progress,
    Ready,
    decode_report,
)

logger = logging.getLogger(__name__)


class ProcessSpec(msgspec.Struct, frozen=True):
    """How to start one process.

    name:   in log lines and messages, such as `worker 0`.
    module: run as `python -P -m module CONFIG.json`; what lies in the current folder is not seen.
    config: the process's configuration; `lifeline_fd` and `runtime_dir` are filled in here.
    environment: variables beside the inherited ones.
    pass_fds: descriptors that the process inherits beside its lifeline.
    ends_with: those neighbours in the order of starting for which this is the same are told to end
             together. None: it ends alone.
    told_by: name of the process that, coming to an orderly end, tells this one to end too.
    """

    name: str
    module: str
    config: msgspec.Struct
    environment: Mapping[str, str] = {}
    pass_fds: tuple[int, ...] = ()
    ends_with: str | None = None
    told_by: str | None = None


# A forked copy of this process must not hold the lifelines open: the children would outlive it.
_lifelines: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_lifelines() -> None:
    for lifeline in list(_lifelines):
        lifeline.close()


os.register_at_fork(after_in_child=_close_lifelines)


class ManagedProcess:
    """A started child. It runs in a process group of its own, so that Ctrl-C in a terminal reaches
    the supervisor alone, which then stops everything in order.

    `ready` and `failed` hold its reports once `read_lifeline` has seen them.
    """

    def __init__(self, spec: ProcessSpec, runtime_dir: Path, relay: LogRelay) -> None:
        self.name = spec.name
        self.ends_with = spec.ends_with
        self.told_by = spec.told_by
        self.ready: Ready | None = None
        self.failed: Failed | None = None
        self.doing = "starting"
        self.lifeline_closed = False
        self._unread = b""
        self.lifeline, child_end = socket.socketpair()
        with child_end:
            config = msgspec.structs.replace(
                spec.config, lifeline_fd=child_end.fileno(), runtime_dir=str(runtime_dir)
            )
            config_file = runtime_dir / f"{spec.name.replace(' ', '-')}.json"
            config_file.write_bytes(msgspec.json.encode(config))
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", spec.module, str(config_file)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(child_end.fileno(), *spec.pass_fds),
                env={**os.environ, **spec.environment},
                start_new_session=True,
            )
        self.lifeline.setblocking(False)
        _lifelines.add(self.lifeline)
        assert self._popen.stdout is not None
        self._relay_thread = threading.Thread(
            target=_relay_output,
            args=(self._popen.stdout, relay, spec.name),
            name=f"log of {spec.name}",
            daemon=True,
        )
        self._relay_thread.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def fileno(self) -> int:
        """The lifeline: readable when the child reported something, or died."""
        return self.lifeline.fileno()

    def read_lifeline(self) -> None:
        """Take in what the child has reported. Never blocks."""
        while not self.lifeline_closed:
            try:
                received = self.lifeline.recv(65536)
            except BlockingIOError:
                return
            except ConnectionError:
                received = b""
            if not received:
                self.lifeline_closed = True
                return
            *lines, self._unread = (self._unread + received).split(b"\n")
            for line in lines:
                self._note(decode_report(line))

    def _note(self, report: LifelineReport) -> None:
        match report:
            case Ready():
                self.ready = report
            case Failed():
                self.failed = self.failed or report
            case Progress(doing):
                self.doing = doing
                logger.info("%s: %s", self.name, doing)

    def poll(self) -> int | None:
        """The exit status as `subprocess` gives it, None while it runs."""
        return self._popen.poll()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; False if it still runs after `timeout_s`."""
        try:
            self._popen.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """Ask for an orderly end."""
        if self.poll() is None:
            self._popen.send_signal(STOP_SIGNAL)

    def kill(self) -> None:
        """End it and whatever it started."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()

    def was_killed(self) -> bool:
        """It has ended, and by a signal."""
        return (self.poll() or 0) < 0

    def describe_exit(self) -> str:
        """`exit status 1`, `SIGKILL`: how it ended. One that hangs half-ended is killed."""
        status = self.poll()
        if status is None:
            self.kill()
            status = self._popen.wait()
        return f"exit status {status}" if status >= 0 else signal_name(-status)

    def close(self) -> None:
        """Release what is left of a process that has ended: its last lines are relayed first."""
        self._relay_thread.join(timeout=1.0)
        self.lifeline.close()


def signal_name(number: int) -> str:
    """`SIGKILL`; of a real-time signal, which has no name of its own, `signal 40`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _relay_output(stream: IO[bytes], relay: LogRelay, name: str) -> None:
    with stream:
        while chunk := os.read(stream.fileno(), 65536):
            relay.feed(name, chunk)
    relay.end(name)
