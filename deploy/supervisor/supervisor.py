"""Starts the processes of a deployment, waits until they serve, watches them, stops them in order.

Nothing is restarted here: when a process dies, all of them are stopped and the runtime directory is
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

# How long a process may take to end once it has been asked to, when nothing is left to drain.
STOP_TIMEOUT_S: Final = 4.0
# A start that takes longer says this often what it waits for.
REMIND_EVERY_S: Final = 10.0
# A failure in one process makes others fail; those that come this soon after are looked at
# together, to name the one that started it.
FAILURE_WINDOW_S: Final = 0.3
# A process whose lifeline has closed is all but gone.
EXIT_TIMEOUT_S: Final = 1.0


class StartFailed(LongshoreError):
    """A process could not start; the message is its own reason."""


class StopRequested(Exception):
    """Somebody asked to stop while the processes were still starting."""


class StopSignal(Protocol):
    """What interrupts a wait: readable through `fileno` once `is_set`."""

    def fileno(self) -> int: ...

    def is_set(self) -> bool: ...


class Supervisor:
    """Owns the processes and the runtime directory until `stop` or `stop_now`, which leaving it as
    a context manager does at the latest.

    stream: where the processes' output goes, each line with its process's name.
    format_line: how.
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
        """Start all, in order, and wait until each is ready; returns their reports by name. What
        they are doing meanwhile is logged when it changes, and every `remind_every_s`.

        Raises StartFailed if one gives up or dies, or after `timeout_s`, and StopRequested if the
        signal is set; every process has been stopped then and the runtime directory is gone.
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
                    f"not ready in time: {doing}. Give it more with --startup-timeout-s."
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
        """Watch until a process dies, and say which and how; None if the time is over or the
        signal is set first."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (death := self.find_death()) is None:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or (stop_signal is not None and stop_signal.is_set()):
                return None
            self._wait_for_reports(None if timeout_s is None else remaining_s, stop_signal)
        return death

    def find_death(self) -> str | None:
        """Which process has died, and how; None if all of them live. Never blocks on a live one."""
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
        """The first cause. Processes stand in the order in which one's end brings down the next."""
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
                    return f"{process.name} crashed ({how}). Its lines above may say why."
                return (
                    f"{process.name} was killed ({how}). If nobody did that, the system has run "
                    "out of memory: fewer blocks (--num-blocks) need less."
                )
        failed = [(process, process.failed) for process in self.processes if process.failed]
        for process, report in sorted(failed, key=lambda one: one[1].is_consequence):
            return f"{process.name}: {report.reason}"
        how = dead[0].describe_exit()
        if dead[0].poll() == 0:
            return f"{dead[0].name} has ended ({how}), which nobody here asked it to."
        return f"{dead[0].name} has died ({how}). Its lines above say why."

    def stop(self, drain_timeout_s: float, stop_signal: StopSignal | None = None) -> bool:
        """Stop in reverse order, so that each process finishes what the ones behind it still need;
        those that `ends_with` joins together.

        The last ones (the gateways) have `drain_timeout_s` to finish their streams. True if all
        ended by themselves and well. If `stop_signal` is set meanwhile, the rest is cut short; so
        it is, and the dead one named in the log, if a process dies that others still need.
        """
        all_well = True
        timeout_s = drain_timeout_s
        needed = list(self.processes)
        while needed:
            ending = _pop_last_to_end(needed)
            for process in ending:
                if process.told_by is None or not all_well:  # else it knows already
                    process.terminate()
            deadline_s = time.monotonic() + timeout_s
            for process in ending:
                if not self._wait_for_end(process, deadline_s, stop_signal, ending, needed):
                    if stop_signal is not None and stop_signal.is_set():
                        logger.warning("told to stop again: %s is killed", process.name)
                    elif process.poll() is None:
                        logger.warning(
                            "%s is killed: it was not done, and had %.1f s at most",
                            process.name,
                            timeout_s,
                        )
                    process.kill()
            all_well = all_well and all(process.poll() == 0 for process in ending)
            timeout_s = STOP_TIMEOUT_S
        self._release()
        return all_well

    def _wait_for_end(
        self,
        process: ManagedProcess,
        deadline_s: float,
        stop_signal: StopSignal | None,
        ending: Sequence[ManagedProcess],
        needed: Sequence[ManagedProcess],
    ) -> bool:
        tellers = {other.name for other in ending}
        while not process.wait(min(0.05, deadline_s - time.monotonic())):
            if time.monotonic() >= deadline_s or (stop_signal and stop_signal.is_set()):
                return False
            for other in needed:
                is_told = other.told_by in tellers  # and may have come to its end first
                if is_told and other.told_by != process.name:
                    continue  # another one's
                if other.poll() is not None and not (is_told and other.poll() == 0):
                    logger.error(
                        "%s has died (%s) while %s was finishing; its answers are lost",
                        other.name,
                        other.describe_exit(),
                        process.name,
                    )
                    return False
        return True

    def stop_now(self, reason: str | None = None) -> None:
        """Ask all at once, kill what has not ended within STOP_TIMEOUT_S. Nothing is drained.

        reason: the death that made it necessary; what still has clients tells them.
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
    """Take from `needed` the last process, and those before it that end together with it."""
    ending = [needed.pop()]
    ends_with = ending[0].ends_with
    while ends_with is not None and needed and needed[-1].ends_with == ends_with:
        ending.append(needed.pop())
    return ending
