"""Starts the processes of a deployment, waits until they are ready, restarts and stops them.

When a process dies, those of its restart group (an engine, or one gateway) are killed, except for
those that survive it, and started again; after too many deaths in a row, the deployment ends. When
the supervisor itself dies, each process notices on its lifeline, removes the runtime directory and
exits.
"""

import logging
import math
import selectors
import time
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TextIO

from longshore.deploy.supervisor.log_lines import LineFormat, text_line
from longshore.deploy.supervisor.log_relay import LogRelay
from longshore.deploy.supervisor.ordered_restarts import OrderedRestarts
from longshore.deploy.supervisor.process import ManagedProcess, ProcessSpec
from longshore.deploy.supervisor.restart_history import RestartHistory, RestartReason
from longshore.deploy.supervisor.restarts import Restarts
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.protocol.errors import LongshoreError
from longshore.protocol.transport.lifeline import ALIVE_INTERVAL_S, Ready, Restarting

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
EXIT_POLL_S: Final = 0.02
# If the supervisor itself wakes up so much too late, silence of others means nothing.
MAX_LATE_S: Final = 2.0


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
    ordered_restarts: restarts that an operator wants; `keep_running` carries them out.
    """

    def __init__(
        self, runtime_dir: RuntimeDir, stream: TextIO, format_line: LineFormat = text_line
    ) -> None:
        self.runtime_dir = runtime_dir
        self._relay = LogRelay(stream, format_line)
        self.processes: list[ManagedProcess] = []
        self.ordered_restarts = OrderedRestarts()
        self._history = RestartHistory(runtime_dir.path)

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
        self._history.begin(spec.name for spec in specs)
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
                raise StartFailed(self._explain_failure(self.processes))

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
        """Which process has died, and how, or hangs in a step. Returns None, without blocking, if
        all are alive."""
        for process in self.processes:
            process.read_lifeline()
            if process.late is not None:
                return f"{process.name} hangs: {process.late}."
        if any(process.lifeline_closed for process in self.processes):
            return self._explain_failure(self.processes)
        return None

    def keep_running(
        self,
        *,
        max_restarts: int,
        start_timeout_s: float,
        stop_signal: StopSignal,
        hang_timeout_s: float = 0.0,
    ) -> str | None:
        """Restart processes that die, until the signal is set (None) or a group of them dies again
        and again (the reason of its last death).

        max_restarts:    see Restarts; with 0, the first death ends the deployment.
        start_timeout_s: for all processes of a group to be ready.
        hang_timeout_s:  a process that has not reported to be alive for so long counts as dead, if
                         it ever did; 0: only processes that have ended do.
        """
        self.ordered_restarts.open()
        try:
            return self._keep_running(max_restarts, start_timeout_s, stop_signal, hang_timeout_s)
        finally:
            self.ordered_restarts.close("the deployment is being stopped")

    def _keep_running(
        self,
        max_restarts: int,
        start_timeout_s: float,
        stop_signal: StopSignal,
        hang_timeout_s: float,
    ) -> str | None:
        names = dict.fromkeys(process.spec.restart_group for process in self.processes)
        groups = {name: Restarts(max_restarts) for name in names if name is not None}
        while not stop_signal.is_set():
            for process in self.processes:
                process.read_lifeline()
            self._begin_restarts(groups)
            for name, group in groups.items():
                death = self._keep_group_running(name, group, start_timeout_s, hang_timeout_s)
                if death is not None:
                    return death
            alone = self._members(None)
            if any(process.lifeline_closed for process in alone):
                return self._explain_failure(alone)
            waiting = {p.spec.restart_group for p in self.processes if p.is_unanswered}
            due_s = min(
                (group.due_s for name, group in groups.items() if name not in waiting),
                default=math.inf,
            )
            if any(group.stop_deadline_s is not None for group in groups.values()):
                due_s = min(due_s, time.monotonic() + EXIT_POLL_S)
            if hang_timeout_s:
                due_s = min(due_s, time.monotonic() + ALIVE_INTERVAL_S)
            timeout_s = None if due_s == math.inf else max(0.0, due_s - time.monotonic())
            self._wait_for_reports(timeout_s, stop_signal)
            if time.monotonic() > due_s + MAX_LATE_S:  # this process did not run, so others did not
                for process in self.processes:
                    process.forgive_silence()
        return None

    def _begin_restarts(self, groups: Mapping[str, Restarts]) -> None:
        """Tell the processes of groups that an operator wants to restart to end, as `stop` does. A
        group that is not running is being restarted anyway."""
        for name in self.ordered_restarts.take_new():
            group = groups[name]
            if group.running_since_s is None:
                continue
            group.stopping(deadline_s=time.monotonic() + 2 * STOP_TIMEOUT_S)
            for process in self._members(name):
                if process.stopped_by is None:
                    process.terminate()

    def _keep_group_running(
        self, name: str, group: Restarts, start_timeout_s: float, hang_timeout_s: float
    ) -> str | None:
        """Do what is due for the group. Returns the reason if it is not started again."""
        now_s = time.monotonic()
        if group.stop_deadline_s is not None:
            if not self._has_ended(name, is_late=now_s >= group.stop_deadline_s):
                return None
            group.stopped(now_s)
        if group.next_start_s is not None:
            if now_s < group.next_start_s or self._is_unanswered(name, hang_timeout_s):
                return None
            group.started(deadline_s=now_s + start_timeout_s)
            try:
                self._start_again(name, group.reason)
            except OSError as error:  # the disk is full, or there are too many processes
                return self._note_death(f"{name} cannot be started: {error}.", name, group)
        members = self._members(name)
        death = self._death_of(members, group, now_s, hang_timeout_s)
        if death is None:
            if group.running_since_s is None and all(process.ready for process in members):
                group.became_ready(now_s)
                logger.info("%s is ready again", name)
                self._history.became_ready(name)
                self.ordered_restarts.finish(name)
            return None
        return self._note_death(death, name, group)

    def _is_unanswered(self, name: str, hang_timeout_s: float) -> bool:
        """Whether a survivor of the group does not know yet that the others are restarted. Until
        then it may send them what was meant for those before them. One that hangs is killed."""
        unanswered = [process for process in self._members(name) if process.is_unanswered]
        for process in unanswered if hang_timeout_s else ():
            hang = _hang_of(process, hang_timeout_s)
            if hang is not None:
                logger.error("%s It is restarted, too.", hang)
                process.kill()
                process.close()
        return any(process.is_unanswered for process in unanswered)

    def _has_ended(self, name: str, *, is_late: bool) -> bool:
        """Whether the processes of a group that were told to end have ended; those that are late
        are killed."""
        members = self._members(name)
        running = [process for process in members if process.poll() is None]
        if running and not is_late:
            return False
        for process in running:
            logger.warning("killing %s: it did not stop in time", process.name)
            process.kill()
        for process in members:
            process.close()
        return True

    def _note_death(self, death: str, name: str, group: Restarts) -> str | None:
        """End what is left of the group. Returns the reason if it is not started again."""
        members = self._members(name)
        reason: RestartReason = "hang" if any(each.is_hung for each in members) else "death"
        if group.died(time.monotonic(), reason, has_remedy=_lacks_memory(members)):
            self._history.died(name, death)
            self._end_members(self._members(name), death, is_first=group.num_in_a_row == 1)
        else:
            for process in self._members(name):
                process.kill()
                process.close()
            is_loop = group.max_in_a_row > 0
            tried = f" {name} has died {group.max_in_a_row + 1} times in a row; giving up."
            return death + tried if is_loop else death
        logger.error("%s Restarting %s.", death, name)
        return None

    def _end_members(
        self, members: Sequence[ManagedProcess], death: str, *, is_first: bool
    ) -> None:
        """Kill the processes of a group, before any of them is started again, except for those that
        survive the ones that have died.

        What fails by itself, rather than being killed, may fail because of what the others remember
        or tell it: a process that is told survives that only as the first death in a row
        (`is_first`). One that is not told survives only a kill that is the first death. For want
        of memory there is a remedy, of which the one that is told takes care.
        """
        dead = [process for process in members if process.lifeline_closed or process.failed]
        lacks_memory = _lacks_memory(dead)
        is_kill = lacks_memory or all(process.was_killed() for process in dead)

        def may_survive(process: ManagedProcess) -> bool:
            is_likely = is_first or is_kill if process.spec.is_told else is_first and is_kill
            return bool(dead) and is_likely and process.was_ready and process not in dead

        survivors = [process for process in members if may_survive(process)]
        num_before = -1
        while num_before != len(survivors):  # who ends may end others
            num_before = len(survivors)
            ended = {process.name for process in members if process not in survivors}
            survivors = [each for each in survivors if ended <= {*each.spec.survives}]
        for process in members:
            if process not in survivors:
                process.kill()
                process.close()
        for process in survivors:
            were_killed = all(each.ended_from_outside for each in dead)
            process.outlive(Restarting(death, were_killed, is_out_of_memory=lacks_memory))

    def _members(self, group: str | None) -> list[ManagedProcess]:
        return [process for process in self.processes if process.spec.restart_group == group]

    def _start_again(self, group: str, reason: RestartReason) -> None:
        for index, process in enumerate(self.processes):
            if process.spec.restart_group == group and process.lifeline_closed:
                spec = process.next_spec()
                self.processes[index] = ManagedProcess(spec, self.runtime_dir.path, self._relay)
                self._history.started(spec.name, reason)

    def _death_of(
        self,
        members: Sequence[ManagedProcess],
        group: Restarts,
        now_s: float,
        hang_timeout_s: float,
    ) -> str | None:
        """Why the group must be restarted; None if it runs, or is starting. A process that hangs is
        killed."""
        if any(process.failed or process.lifeline_closed for process in members):
            return self._explain_failure(members)
        for process in members if hang_timeout_s else ():
            process.read_lifeline()  # ending another group may have taken seconds
            hang = _hang_of(process, hang_timeout_s)
            if hang is not None:
                process.is_hung = True
                process.kill()
                process.close()
                return hang
        if now_s >= group.deadline_s:
            late = [process for process in members if process.ready is None]
            doing = ", ".join(f"{process.name} ({process.doing})" for process in late)
            return f"Not ready in time: {doing}."
        return None

    def _wait_for_reports(self, timeout_s: float | None, stop_signal: StopSignal | None) -> None:
        with selectors.DefaultSelector() as selector:
            for process in self.processes:
                if not process.lifeline_closed:
                    selector.register(process, selectors.EVENT_READ)
            if self.ordered_restarts.is_open:
                selector.register(self.ordered_restarts, selectors.EVENT_READ)
            if stop_signal is not None:
                selector.register(stop_signal, selectors.EVENT_READ)
            for key, _ in selector.select(timeout_s):
                if isinstance(key.fileobj, ManagedProcess):
                    key.fileobj.read_lifeline()

    def _explain_failure(self, processes: Sequence[ManagedProcess]) -> str:
        """The first cause, if one of `processes` has died or failed. They are in the order in which
        one's end causes the next one's."""
        deadline_s = time.monotonic() + FAILURE_WINDOW_S
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            closed = [process for process in processes if process.lifeline_closed]
            if any(process.wait(EXIT_POLL_S) and process.was_killed() for process in closed):
                break  # no other process has caused that
            self._wait_for_reports(remaining_s, None)
            if all(process.lifeline_closed for process in processes):
                break
        dead = [process for process in processes if process.lifeline_closed]
        for process in dead:
            if process.wait(EXIT_TIMEOUT_S) and process.was_killed():
                how = process.describe_exit()
                if how != "SIGKILL":
                    return f"{process.name} crashed ({how}). See its log lines above."
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
        return f"{dead[0].name} has died ({how}). See its log lines above."

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
        for process in self._members(dead.spec.restart_group):
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
        self.runtime_dir.remove()


def _hang_of(process: ManagedProcess, hang_timeout_s: float) -> str | None:
    if process.late is not None:
        return f"{process.name} hangs: {process.late}."
    silent_s = 0.0 if process.alive_s is None else time.monotonic() - process.alive_s
    if silent_s < hang_timeout_s:
        return None
    return f"{process.name} hangs or is stopped: it has not reported for {silent_s:.0f} s."


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
