"""Starts the processes of a deployment, waits until they are ready, monitors and stops them.

Nothing is restarted: when a process dies, all of them are stopped and the runtime directory is
removed. When the supervisor itself dies, each process notices on its lifeline and does the same.
"""

import logging
import math
import selectors
import time
from collections.abc import Sequence
from typing import Final, Protocol, TextIO

from longshore.deploy.supervisor.log_lines import LineFormat, text_line
from longshore.deploy.supervisor.log_relay import LogRelay
from longshore.deploy.supervisor.process import ManagedProcess, ProcessSpec
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.protocol.errors import LongshoreError
from longshore.protocol.transport.lifeline import Ready

logger = logging.getLogger(__name__)

# Time that a process has to end after a stop signal, without draining.
STOP_TIMEOUT_S: Final = 4.0
# Interval of progress messages during a long startup.
REMIND_EVERY_S: Final = 10.0
# A failure in one process makes others fail. Failures within this time are considered together, to
# find the first cause.
FAILURE_WINDOW_S: Final = 0.3
# Time that a process has to exit after its lifeline has closed.
EXIT_TIMEOUT_S: Final = 1.0


class StartFailed(LongshoreError):
    """A process could not start; the message gives the reason."""


class StopRequested(Exception):
    """A stop signal arrived while the processes were starting."""


class StopSignal(Protocol):
    """Interrupts a wait: `fileno` becomes readable when it is set."""

    def fileno(self) -> int: ...

    def is_set(self) -> bool: ...


class Supervisor:
    """Owns the processes and the runtime directory until `stop` or `stop_now`. A context manager:
    on exit it calls `stop_now`.

    stream: receives the processes' output, each line with the process name.
    format_line: format of these lines.
    """

    def __init__(
        self, runtime_dir: RuntimeDir, stream: TextIO, format_line: LineFormat = text_line
    ) -> None:
        self.runtime_dir = runtime_dir
        self._relay = LogRelay(stream, format_line)
        self.processes: list[ManagedProcess] = []

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_now()

    def start(
        self,
        specs: Sequence[ProcessSpec],
        *,
        timeout_s: float,
        stop_signal: StopSignal | None = None,
        remind_every_s: float = REMIND_EVERY_S,
    ) -> dict[str, Ready]:
        """Start all processes in order and wait until each is ready; returns their reports by name.
        Their progress is logged when it changes, and every `remind_every_s`.

        Raises StartFailed if one fails or dies, or after `timeout_s`, and StopRequested if the
        signal is set; then all processes have been stopped and the runtime directory removed.
        """
        try:
            for spec in specs:
                self.processes.append(ManagedProcess(spec, self.runtime_dir.path, self._relay))
            self._wait_until_ready(timeout_s, stop_signal, remind_every_s)
        except BaseException:
            self.stop_now()
            raise
        return {process.name: process.ready or Ready() for process in self.processes}

    def _wait_until_ready(
        self, timeout_s: float, stop_signal: StopSignal | None, remind_every_s: float
    ) -> None:
        begin_s = time.monotonic()
        remind_at_s = remind_every_s
        while late := [process for process in self.processes if process.ready is None]:
            doing = ", ".join(f"{process.name} ({process.doing})" for process in late)
            self.runtime_dir.note_progress(doing)
            elapsed_s = time.monotonic() - begin_s
            if elapsed_s >= timeout_s:
                raise StartFailed(
                    f"not ready in time: {doing}. Raise the limit with --startup-timeout-s."
                )
            if elapsed_s >= remind_at_s:
                logger.info("still starting after %.0f s: %s", elapsed_s, doing)
                remind_at_s = elapsed_s + remind_every_s
            self._wait_for_reports(min(timeout_s, remind_at_s) - elapsed_s, stop_signal)
            if stop_signal is not None and stop_signal.is_set():
                raise StopRequested
            if any(process.failed or process.lifeline_closed for process in self.processes):
                raise StartFailed(self._explain_failure())

    def wait_for_death(
        self, timeout_s: float | None = None, stop_signal: StopSignal | None = None
    ) -> str | None:
        """Wait until a process dies; returns which one and how. None after `timeout_s`, or if the
        signal is set first."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (death := self.find_death()) is None:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or (stop_signal is not None and stop_signal.is_set()):
                return None
            self._wait_for_reports(None if timeout_s is None else remaining_s, stop_signal)
        return death

    def find_death(self) -> str | None:
        """Which process has died, and how. Returns None, without blocking, if all are alive."""
        for process in self.processes:
            process.read_lifeline()
        if any(process.lifeline_closed for process in self.processes):
            return self._explain_failure()
        return None

    def _wait_for_reports(self, timeout_s: float | None, stop_signal: StopSignal | None) -> None:
        with selectors.DefaultSelector() as selector:
            for process in self.processes:
                if not process.lifeline_closed:
                    selector.register(process, selectors.EVENT_READ)
            if stop_signal is not None:
                selector.register(stop_signal, selectors.EVENT_READ)
            for key, _ in selector.select(timeout_s):
                if isinstance(key.fileobj, ManagedProcess):
                    key.fileobj.read_lifeline()

    def _explain_failure(self) -> str:
        """The first cause. Processes are in the order in which one's end causes the next one's."""
        deadline_s = time.monotonic() + FAILURE_WINDOW_S
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            self._wait_for_reports(remaining_s, None)
            if all(process.lifeline_closed for process in self.processes):
                break
        dead = [process for process in self.processes if process.lifeline_closed]
        for process in dead:
            if process.wait(EXIT_TIMEOUT_S) and process.was_killed():
                how = process.describe_exit()
                if how != "SIGKILL":
                    return f"{process.name} crashed ({how}). See its log lines above."
                return (
                    f"{process.name} was killed ({how}). Unless a user killed it, the system ran "
                    "out of memory: reduce --num-blocks."
                )
        failed = [(process, process.failed) for process in self.processes if process.failed]
        for process, report in sorted(failed, key=lambda one: one[1].is_consequence):
            return f"{process.name}: {report.reason}"
        how = dead[0].describe_exit()
        if dead[0].poll() == 0:
            return f"{dead[0].name} ended unexpectedly ({how})."
        return f"{dead[0].name} has died ({how}). See its log lines above."

    def stop(self, drain_timeout_s: float, stop_signal: StopSignal | None = None) -> bool:
        """Stop in reverse start order, so that each process can finish what later ones need.
        Processes of one `stop_group` are stopped together.

        The first to be stopped (the gateways) have `drain_timeout_s` to finish their streams. True
        if all processes ended by themselves with status 0. The wait ends early if `stop_signal` is
        set, or if a process dies that others still need, which is logged.
        """
        is_clean = True
        timeout_s = drain_timeout_s
        needed = list(self.processes)
        while needed:
            ending = _pop_last_to_end(needed)
            for process in ending:
                if process.stopped_by is None or not is_clean:  # else another process stops it
                    process.terminate()
            deadline_s = time.monotonic() + timeout_s
            for process in ending:
                if not self._wait_for_end(process, deadline_s, stop_signal, ending, needed):
                    if stop_signal is not None and stop_signal.is_set():
                        logger.warning("second stop signal: killing %s", process.name)
                    elif process.poll() is None:
                        logger.warning(
                            "killing %s: it did not stop within %.1f s",
                            process.name,
                            timeout_s,
                        )
                    process.kill()
            is_clean = is_clean and all(process.poll() == 0 for process in ending)
            timeout_s = STOP_TIMEOUT_S
        self._release()
        return is_clean

    def _wait_for_end(
        self,
        process: ManagedProcess,
        deadline_s: float,
        stop_signal: StopSignal | None,
        ending: Sequence[ManagedProcess],
        needed: Sequence[ManagedProcess],
    ) -> bool:
        stopping = {other.name for other in ending}
        while not process.wait(min(0.05, deadline_s - time.monotonic())):
            if time.monotonic() >= deadline_s or (stop_signal and stop_signal.is_set()):
                return False
            for other in needed:
                is_stopped = other.stopped_by in stopping  # so it may end first
                if is_stopped and other.stopped_by != process.name:
                    continue  # checked while waiting for that process
                if other.poll() is not None and not (is_stopped and other.poll() == 0):
                    logger.error(
                        "%s died (%s) while %s was stopping; its requests are lost",
                        other.name,
                        other.describe_exit(),
                        process.name,
                    )
                    return False
        return True

    def stop_now(self, reason: str | None = None) -> None:
        """Stop all at once without draining; kill those that run after STOP_TIMEOUT_S.

        reason: the death that caused this; gateways report it to their clients.
        """
        if reason is not None:
            self.runtime_dir.note_death(reason)
        for process in self.processes:
            process.terminate()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for process in self.processes:
            if not process.wait(deadline_s - time.monotonic()):
                process.kill()
        self._release()

    def _release(self) -> None:
        for process in self.processes:
            process.close()
        self.processes.clear()
        self.runtime_dir.remove()


def _pop_last_to_end(needed: list[ManagedProcess]) -> list[ManagedProcess]:
    """Remove the last process from `needed`, and those before it in the same stop group."""
    ending = [needed.pop()]
    stop_group = ending[0].stop_group
    while stop_group is not None and needed and needed[-1].stop_group == stop_group:
        ending.append(needed.pop())
    return ending
