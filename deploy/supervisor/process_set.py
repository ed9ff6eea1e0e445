"""The running processes of a deployment, and what is only seen of several together."""

import selectors
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from longshore.deploy.supervisor.fork_server import POLL_S
from longshore.deploy.supervisor.fork_servers import ForkServers
from longshore.deploy.supervisor.log_relay import LogRelay
from longshore.deploy.supervisor.process import MAX_LATE_S, ManagedProcess, ProcessSpec
from longshore.protocol.process_limits import memory_limits

# A failure in one process makes others fail. Failures within this time are considered together, to
# find the first cause.
FAILURE_WINDOW_S: Final = 0.3
# Time that a process has to exit after its lifeline has closed.
EXIT_TIMEOUT_S: Final = 1.0
EXIT_POLL_S: Final = 0.02


class Waker(Protocol):
    """Ends a wait when it is readable."""

    def fileno(self) -> int: ...


class StopSignal(Waker, Protocol):
    """Interrupts a wait when it is set."""

    def is_set(self) -> bool: ...


class ProcessSet:
    """running: in start order. fork_servers: None: all processes are new interpreters."""

    def __init__(
        self, runtime_dir: Path, relay: LogRelay, fork_servers: ForkServers | None = None
    ) -> None:
        self._runtime_dir = runtime_dir
        self._relay = relay
        self.fork_servers = fork_servers
        self.running: list[ManagedProcess] = []

    def launch(self, spec: ProcessSpec) -> ManagedProcess:
        """A new process, which is not in `running` yet. Raises OSError."""
        return ManagedProcess(spec, self._runtime_dir, self._relay, self.fork_servers)

    def insert(self, process: ManagedProcess) -> None:
        """Add a process to those that are running, with those of its stop group."""
        places = [at for at, one in enumerate(self.running) if one.stop_group == process.stop_group]
        self.running.insert(places[-1] + 1 if places else len(self.running), process)

    def members(self, group: str | None) -> list[ManagedProcess]:
        """Those of one restart group."""
        return [process for process in self.running if process.spec.restart_group == group]

    def wait_for_reports(self, timeout_s: float | None, *wakers: Waker) -> None:
        """Read what the processes report, once one does, or until a waker is readable."""
        with selectors.DefaultSelector() as selector:
            for process in self.running:
                if not process.lifeline_closed:
                    selector.register(process, selectors.EVENT_READ)
            pending = [each for process in self.running if (each := process.pending) is not None]
            if pending:
                timeout_s = POLL_S if timeout_s is None else min(POLL_S, timeout_s)
            servers = () if self.fork_servers is None else self.fork_servers.running
            for one in (*pending, *servers):
                selector.register(one, selectors.EVENT_READ)
            for waker in wakers:
                selector.register(waker, selectors.EVENT_READ)
            for key, _ in selector.select(timeout_s):
                if isinstance(key.fileobj, ManagedProcess):
                    key.fileobj.read_lifeline()
        for one in pending:
            one.settle()

    def forgive_silence(self, due_s: float) -> None:
        """If a wait that was to end at `due_s`, by `time.monotonic`, has ended much later, this
        process did not run, so perhaps others did not."""
        if time.monotonic() > due_s + MAX_LATE_S:
            for process in self.running:
                process.forgive_silence()

    def explain_failure(self, processes: Sequence[ManagedProcess]) -> str:
        """The first cause, if one of `processes` has died or failed. They are in the order in which
        one's end causes the next one's."""
        deadline_s = time.monotonic() + FAILURE_WINDOW_S
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            closed = [process for process in processes if process.lifeline_closed]
            if any(process.wait(EXIT_POLL_S) and process.was_killed() for process in closed):
                break  # no other process has caused that
            self.wait_for_reports(remaining_s)
            if all(process.lifeline_closed for process in processes):
                break
        dead = [process for process in processes if process.lifeline_closed]
        for process in dead:
            if process.wait(EXIT_TIMEOUT_S) and process.was_killed():
                how = process.describe_exit()
                if how != "SIGKILL":
                    return f"{process.name} crashed ({how}). See its log lines above.{_limits()}"
                return (
                    f"{process.name} was killed ({how}). Unless a user killed it, the system ran "
                    "out of memory: reduce --num-blocks, or the host memory of a connector."
                )
        failed = [(process, process.failed) for process in processes if process.failed]
        for process, report in sorted(failed, key=lambda one: one[1].is_consequence):
            return f"{process.name}: {report.reason}"
        how = dead[0].describe_exit()
        if dead[0].poll() == 0:
            return f"{dead[0].name} ended unexpectedly ({how})."
        return f"{dead[0].name} has died ({how}). See its log lines above.{_limits()}"


def _limits() -> str:
    """Libraries end a process that may not map memory, with messages of their own."""
    limits = memory_limits()
    return "" if limits is None else f" A limit may be the reason: {limits}"


def hang_of(process: ManagedProcess, hang_timeout_s: float) -> str | None:
    """Which process this is and how it hangs; None if it does not.

    A process that starts, or waits for others, does not report to be alive, and may take any time:
    it hangs only if it is stopped.
    """
    if process.late is not None:
        return f"{process.name} hangs: {process.late}."
    if process.alive_s is None:
        stopped_s = process.stopped_s()
        if stopped_s < hang_timeout_s:
            return None
        return (
            f"{process.name} ({process.doing}) is stopped, as by SIGSTOP or a debugger: it has not "
            f"run for {stopped_s:.0f} s."
        )
    silent_s = time.monotonic() - process.alive_s
    if silent_s < hang_timeout_s:
        return None
    return f"{process.name} hangs or is stopped: it has not reported for {silent_s:.0f} s."
