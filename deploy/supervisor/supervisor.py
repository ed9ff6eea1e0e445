"""Starts the processes of a deployment, waits until they are ready, restarts and stops them.

When the supervisor itself dies, each process notices on its lifeline, removes the runtime directory
and exits.
"""

import logging
import math
import time
from collections.abc import Sequence
from typing import Final, TextIO

from longshore.deploy.supervisor.fork_server import ForkServer
from longshore.deploy.supervisor.fork_servers import ForkServers
from longshore.deploy.supervisor.group_restarts import GroupRestarts
from longshore.deploy.supervisor.log_lines import LineFormat, text_line
from longshore.deploy.supervisor.log_relay import LogRelay
from longshore.deploy.supervisor.orders import Orders
from longshore.deploy.supervisor.process import STOP_TIMEOUT_S, ManagedProcess, ProcessSpec
from longshore.deploy.supervisor.process_set import ProcessSet, StopSignal, hang_of
from longshore.deploy.supervisor.restart_history import RestartHistory
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.protocol.errors import LongshoreError
from longshore.protocol.transport.lifeline import ALIVE_INTERVAL_S, Ready

logger = logging.getLogger(__name__)

# Interval of progress messages during a long startup.
REMIND_EVERY_S: Final = 10.0


class StartFailed(LongshoreError):
    """A process could not start; the message gives the reason."""


class StopRequested(Exception):
    """A stop signal arrived while the processes were starting."""


class Supervisor:
    """Owns the processes and the runtime directory until `stop` or `stop_now`. A context manager:
    on exit it calls `stop_now`.

    stream: receives the processes' output, each line with the process name.
    format_line: format of these lines.
    fork_server: forks the workers; None: they are new interpreters. The supervisor ends it.
    orders: what an operator has ordered; `keep_running` carries it out.
    """

    def __init__(
        self,
        runtime_dir: RuntimeDir,
        stream: TextIO,
        format_line: LineFormat = text_line,
        fork_server: ForkServer | None = None,
    ) -> None:
        self.runtime_dir = runtime_dir
        relay = LogRelay(stream, format_line)
        self._fork_servers = None if fork_server is None else ForkServers(relay, fork_server)
        self._set = ProcessSet(runtime_dir.path, relay, self._fork_servers)
        self.orders = Orders()
        self._history = RestartHistory(runtime_dir.path)

    @property
    def processes(self) -> list[ManagedProcess]:
        """The processes in start order."""
        return self._set.running

    def memory_of_fork_servers(self) -> dict[int, int]:
        """See ForkServers."""
        return {} if self._fork_servers is None else self._fork_servers.memory()

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
        hang_timeout_s: float = 0.0,
        remind_every_s: float = REMIND_EVERY_S,
    ) -> dict[str, Ready]:
        """Start all processes in order and wait until each is ready; returns their reports by name.
        Their progress is logged when it changes, and every `remind_every_s`.

        Raises StartFailed if one fails, dies or hangs (see GroupRestarts), or after `timeout_s`,
        and StopRequested if the signal is set; then all processes have been stopped and the runtime
        directory removed.
        """
        self._history.begin(spec.name for spec in specs)
        try:
            for spec in specs:
                self.processes.append(self._set.launch(spec))
            self._wait_until_ready(timeout_s, stop_signal, hang_timeout_s, remind_every_s)
        except BaseException:
            self.stop_now()
            raise
        return {process.name: process.ready or Ready() for process in self.processes}

    def _wait_until_ready(
        self,
        timeout_s: float,
        stop_signal: StopSignal | None,
        hang_timeout_s: float,
        remind_every_s: float,
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
            wait_s = min(timeout_s, remind_at_s) - elapsed_s
            if hang_timeout_s:
                wait_s = min(wait_s, ALIVE_INTERVAL_S)
            due_s = time.monotonic() + wait_s
            self._set.wait_for_reports(wait_s, *_given(stop_signal))
            self._set.forgive_silence(due_s)
            if stop_signal is not None and stop_signal.is_set():
                raise StopRequested
            if any(process.failed or process.lifeline_closed for process in self.processes):
                reason = self._set.explain_failure(self.processes)
                if stop_signal is not None and stop_signal.is_set():
                    raise StopRequested  # which has reached the others first
                raise StartFailed(reason)
            for process in self.processes if hang_timeout_s else ():
                if (hang := hang_of(process, hang_timeout_s)) is not None:
                    process.kill()  # it would not obey
                    raise StartFailed(hang)

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
            self._set.wait_for_reports(
                None if timeout_s is None else remaining_s, *_given(stop_signal)
            )
        return death

    def find_death(self) -> str | None:
        """Which process has died, and how, or hangs in a step. Returns None, without blocking, if
        all are alive."""
        for process in self.processes:
            process.read_lifeline()
            if process.late is not None:
                return f"{process.name} hangs: {process.late}."
        if any(process.lifeline_closed for process in self.processes):
            return self._set.explain_failure(self.processes)
        return None

    def keep_running(
        self,
        *,
        max_restarts: int,
        start_timeout_s: float,
        stop_signal: StopSignal,
        hang_timeout_s: float = 0.0,
    ) -> str | None:
        """Restart processes that die: see GroupRestarts and its `run`."""
        restarts = GroupRestarts(
            self._set,
            self.orders,
            self._history,
            max_restarts=max_restarts,
            start_timeout_s=start_timeout_s,
            hang_timeout_s=hang_timeout_s,
        )
        return restarts.run(stop_signal)

    def stop(self, drain_timeout_s: float, stop_signal: StopSignal | None = None) -> bool:
        """Stop in reverse start order, so that each process can finish what later ones need.
        Processes of one `stop_group` are stopped together.

        The first to be stopped (the gateways) have `drain_timeout_s` to finish their streams. True
        if all processes that ran ended by themselves with status 0. The wait ends early if
        `stop_signal` is set. If a process dies that others still need, which is logged, its restart
        group is killed, so that the gateways end its streams.
        """
        is_clean = True
        dead = {p.spec.restart_group for p in self.processes if p.lifeline_closed} - {None}
        for process in self.processes:
            if process.spec.restart_group in dead:  # it would wait for a restart
                process.kill()
                process.lifeline_closed = True
        not_running = {p.name for p in self.processes if p.lifeline_closed or p.ready is None}
        timeout_s = drain_timeout_s
        needed = list(self.processes)
        while needed:
            ending = _pop_last_to_end(needed)
            for process in ending:
                is_told = process.stopped_by is not None and process.name not in not_running
                if not is_told or not is_clean:  # else another process stops it
                    process.terminate()
            deadline_s = time.monotonic() + timeout_s
            for process in ending:
                if self._wait_for_end(process, deadline_s, stop_signal, ending, needed):
                    continue
                if stop_signal is not None and stop_signal.is_set():
                    logger.warning("second stop signal: killing %s", process.name)
                elif process.poll() is None:
                    logger.warning(
                        "killing %s: it did not stop within %.1f s", process.name, timeout_s
                    )
                process.kill()
            is_clean = is_clean and all(
                process.poll() == 0 or process.name in not_running for process in ending
            )
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
                    self._lose(other, process.name)
        return True

    def _lose(self, dead: ManagedProcess, stopping: str) -> None:
        """A process has died, and is not restarted because `stopping` is being stopped."""
        if dead.lifeline_closed:
            return  # known already
        how = dead.describe_exit()
        logger.error("%s died (%s) while %s was stopping", dead.name, how, stopping)
        for process in self._set.members(dead.spec.restart_group):
            process.kill()
            process.lifeline_closed = True

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
        if self._fork_servers is not None:
            self._fork_servers.close()
        self.runtime_dir.remove()


def _given(stop_signal: StopSignal | None) -> tuple[StopSignal, ...]:
    return () if stop_signal is None else (stop_signal,)


def _lacks_memory(processes: Sequence[ManagedProcess]) -> bool:
    """Whether one of them has failed for want of memory for a step."""
    return any(process.failed and process.failed.is_out_of_memory for process in processes)


def _pop_last_to_end(needed: list[ManagedProcess]) -> list[ManagedProcess]:
    """Remove the last process from `needed`, and those before it in the same stop group."""
    ending = [needed.pop()]
    stop_group = ending[0].stop_group
    while stop_group is not None and needed and needed[-1].stop_group == stop_group:
        ending.append(needed.pop())
    return ending
