"""Keeps a deployment running: restarts the groups of processes of which one has died."""

import logging
import math
import time
from collections.abc import Sequence
from typing import assert_never

from longshore.deploy.supervisor.orders import Call, Orders, RestartGroup, StartGroup, StopGroup
from longshore.deploy.supervisor.process import STOP_TIMEOUT_S, ManagedProcess
from longshore.deploy.supervisor.process_set import EXIT_POLL_S, ProcessSet, StopSignal, hang_of
from longshore.deploy.supervisor.replica import about
from longshore.deploy.supervisor.restart_history import RestartHistory, RestartReason
from longshore.deploy.supervisor.restarts import Restarts
from longshore.deploy.supervisor.standbys import Standbys
from longshore.protocol.transport.lifeline import ALIVE_INTERVAL_S, Restarting

logger = logging.getLogger(__name__)


class GroupRestarts:
    """When a process dies, those of its restart group (an engine, or one gateway) are killed,
    except for those that survive it, and started again; after too many deaths in a row, the
    deployment ends.

    orders: what an operator wants: groups are restarted, started and stopped.
    max_restarts:    see Restarts; with 0, the first death ends the deployment.
    start_timeout_s: for all processes of a group to be ready.
    hang_timeout_s:  a process that has not reported to be alive for so long counts as dead, if it
                     ever did, and else one that has been stopped for so long; 0: only processes
                     that have ended do.
    """

    def __init__(
        self,
        processes: ProcessSet,
        orders: Orders,
        history: RestartHistory,
        *,
        max_restarts: int,
        start_timeout_s: float,
        hang_timeout_s: float = 0.0,
    ) -> None:
        self._processes = processes
        self._orders = orders
        self._max_restarts = max_restarts
        self._starting: dict[str, float] = {}  # new groups, and when they must be ready
        self._removed: set[str] = set()  # groups that are being stopped for good
        self._history = history
        self._start_timeout_s = start_timeout_s
        self._hang_timeout_s = hang_timeout_s
        names = dict.fromkeys(process.spec.restart_group for process in processes.running)
        self._groups = {name: Restarts(max_restarts) for name in names if name is not None}
        self._standbys = Standbys(
            processes, start_timeout_s=start_timeout_s, hang_timeout_s=hang_timeout_s
        )

    def run(self, stop_signal: StopSignal) -> str | None:
        """Restart processes that die, until the signal is set (None) or a group of them dies again
        and again (the reason of its last death)."""
        self._orders.open()
        try:
            return self._run(stop_signal)
        finally:
            self._standbys.end_all()
            self._orders.close("the deployment is being stopped")

    def _run(self, stop_signal: StopSignal) -> str | None:
        while not stop_signal.is_set():
            for process in self._processes.running:
                process.read_lifeline()
            self._take_orders()
            for name in list(self._starting):
                self._keep_starting(name)
            for name, group in list(self._groups.items()):
                death = self._keep_running(name, group)
                if death is not None:
                    return death
                self._standbys.keep(name, is_running=group.running_since_s is not None)
            if self._processes.fork_servers is not None:
                self._processes.fork_servers.keep(is_calm=self._is_calm)
            alone = self._processes.members(None)
            if any(process.lifeline_closed for process in alone):
                return self._processes.explain_failure(alone)
            due_s = self._due_s()
            timeout_s = None if due_s == math.inf else max(0.0, due_s - time.monotonic())
            self._processes.wait_for_reports(timeout_s, self._orders, stop_signal)
            self._processes.forgive_silence(due_s)
        return None

    @property
    def _is_calm(self) -> bool:
        """Whether everything runs."""
        groups = self._groups.values()
        return not self._starting and all(each.running_since_s is not None for each in groups)

    def _due_s(self) -> float:
        """When something is to be done, if no process reports before."""
        waiting = {p.spec.restart_group for p in self._processes.running if p.is_unanswered}
        due_s = min(self._starting.values(), default=math.inf)
        if self._processes.fork_servers is not None:
            due_s = min(due_s, self._processes.fork_servers.due_s(is_calm=self._is_calm))
        for name, group in self._groups.items():
            is_running = group.running_since_s is not None
            due_s = min(due_s, self._standbys.due_s(name, is_running=is_running))
            if name not in waiting:
                due_s = min(due_s, group.due_s)
        if any(group.stop_deadline_s is not None for group in self._groups.values()):
            due_s = min(due_s, time.monotonic() + EXIT_POLL_S)
        if self._hang_timeout_s:
            due_s = min(due_s, time.monotonic() + ALIVE_INTERVAL_S)
        return due_s

    def _take_orders(self) -> None:
        for order in self._orders.take_new():
            match order:
                case Call(function):
                    function()
                    self._orders.finish(order)
                case StartGroup():
                    self._begin_start(order)
                case RestartGroup(name) | StopGroup(name) if name not in self._groups:
                    self._orders.fail(name, f"{name} does not exist")
                case RestartGroup(name):  # one that is not running is being restarted anyway
                    if self._groups[name].running_since_s is not None:
                        self._tell_to_end(name)
                case StopGroup(name):
                    self._removed.add(name)
                    self._tell_to_end(name)
                case _:
                    assert_never(order)

    def _tell_to_end(self, name: str) -> None:
        """Tell the processes of a group to end, as `stop` does; if it is not running, they are
        killed."""
        group, now_s = self._groups[name], time.monotonic()
        is_running = group.running_since_s is not None
        group.stopping(deadline_s=now_s + 2 * STOP_TIMEOUT_S if is_running else now_s)
        self._standbys.end(name)  # they loaded what the operator may have changed
        for process in self._processes.members(name):
            if process.stopped_by is None:
                process.terminate()

    def _begin_start(self, order: StartGroup) -> None:
        self._history.begin(spec.name for spec in order.specs)
        self._starting[order.group] = time.monotonic() + self._start_timeout_s
        try:
            for spec in order.specs:
                self._processes.insert(self._processes.launch(spec))
        except OSError as error:  # the disk is full, or there are too many processes
            self._end_start(order.group, f"its processes cannot be started: {error}")

    def _keep_starting(self, name: str) -> None:
        """Whether a new group is ready. If it will not be, nothing of it remains."""
        members, now_s = self._processes.members(name), time.monotonic()
        if any(process.failed or process.lifeline_closed for process in members):
            self._end_start(name, self._processes.explain_failure(members))
        elif (hang := self._hang_among(members)) is not None:
            self._end_start(name, hang)
        elif all(process.ready for process in members):
            del self._starting[name]
            self._groups[name] = Restarts(self._max_restarts)
            self._groups[name].became_ready(now_s)
            for process in members:
                self._standbys.add(process.spec)
            logger.info("%s is ready", name, extra=about(name))
            self._orders.finish(name)
        elif now_s >= self._starting[name]:
            self._end_start(name, _not_ready(members))

    def _end_start(self, name: str, reason: str) -> None:
        del self._starting[name]
        self._remove(name)
        self._orders.fail(name, reason)

    def _remove(self, name: str) -> None:
        """Kill what is left of a group, which does not start again."""
        members = self._processes.members(name)
        for process in members:
            process.kill()
            process.close()
            self._processes.running.remove(process)
        self._history.end(name, [process.name for process in members])

    def _keep_running(self, name: str, group: Restarts) -> str | None:
        """Do what is due for the group. Returns the reason if it is not started again."""
        now_s = time.monotonic()
        if group.stop_deadline_s is not None:
            if not self._has_ended(name, is_late=now_s >= group.stop_deadline_s):
                return None
            group.stopped(now_s)
            if name in self._removed:
                self._removed.remove(name)
                self._standbys.remove(name)
                self._remove(name)
                del self._groups[name]
                logger.info("%s has been stopped", name, extra=about(name))
                self._orders.finish(name)
                return None
        if group.next_start_s is not None:
            if now_s < group.next_start_s or self._is_unanswered(name):
                return None
            group.started(deadline_s=now_s + self._start_timeout_s)
            try:
                self._start_again(name, group.reason)
            except OSError as error:  # the disk is full, or there are too many processes
                return self._note_death(f"{name} cannot be started: {error}.", name, group)
        members = self._processes.members(name)
        death = self._death_of(members, group, now_s)
        if death is None:
            if group.running_since_s is None and all(process.ready for process in members):
                group.became_ready(now_s)
                logger.info("%s is ready again", name, extra=about(name))
                self._history.became_ready(name)
                self._orders.finish(name)
            return None
        return self._note_death(death, name, group)

    def _is_unanswered(self, name: str) -> bool:
        """Whether a survivor of the group does not know yet that the others are restarted. Until
        then it may send them what was meant for those before them. One that hangs is killed."""
        unanswered = [process for process in self._processes.members(name) if process.is_unanswered]
        for process in unanswered if self._hang_timeout_s else ():
            hang = hang_of(process, self._hang_timeout_s)
            if hang is not None:
                logger.error("%s It is restarted, too.", hang, extra=about(name))
                process.kill()
                process.close()
        return any(process.is_unanswered for process in unanswered)

    def _has_ended(self, name: str, *, is_late: bool) -> bool:
        """Whether the processes of a group that were told to end have ended; those that are late
        are killed."""
        members = self._processes.members(name)
        running = [process for process in members if process.poll() is None]
        if running and not is_late:
            return False
        for process in running:
            logger.warning("killing %s: it did not stop in time", process.name, extra=about(name))
            process.kill()
        for process in members:
            process.close()
        return True

    def _note_death(self, death: str, name: str, group: Restarts) -> str | None:
        """End what is left of the group. Returns the reason if it is not started again."""
        members = self._processes.members(name)
        reason: RestartReason = "hang" if any(each.is_hung for each in members) else "death"
        if group.died(time.monotonic(), reason, has_remedy=_lacks_memory(members)):
            self._history.died(name, death)
            self._end_members(
                self._processes.members(name), death, is_first=group.num_in_a_row == 1
            )
        else:
            for process in self._processes.members(name):
                process.kill()
                process.close()
            is_loop = group.max_in_a_row > 0
            tried = f" {name} has died {group.max_in_a_row + 1} times in a row; giving up."
            return death + tried if is_loop else death
        logger.error("%s Restarting %s.", death, name, extra=about(name))
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

    def _start_again(self, group: str, reason: RestartReason) -> None:
        ended = [each for each in self._processes.members(group) if each.lifeline_closed]
        taken = self._standbys.take(group, [each for each in ended if each.spec.num_standbys])
        running = self._processes.running
        for process, standby in taken.items():
            running[running.index(process)] = standby
            self._history.started(standby.name, reason)
        for process in ended:
            if process not in taken:
                running[running.index(process)] = self._processes.launch(process.next_spec())
                self._history.started(process.name, reason)

    def _death_of(
        self, members: Sequence[ManagedProcess], group: Restarts, now_s: float
    ) -> str | None:
        """Why the group must be restarted; None if it runs, or is starting. A process that hangs is
        killed."""
        if any(process.failed or process.lifeline_closed for process in members):
            return self._processes.explain_failure(members)
        if (hang := self._hang_among(members)) is not None:
            return hang
        if now_s >= group.deadline_s:
            return _not_ready(members)
        return None

    def _hang_among(self, members: Sequence[ManagedProcess]) -> str | None:
        """Kill the first of these processes that hangs; returns how it does, None if none hangs."""
        for process in members if self._hang_timeout_s else ():
            process.read_lifeline()  # ending another group may have taken seconds
            hang = hang_of(process, self._hang_timeout_s)
            if hang is not None:
                process.is_hung = True
                process.kill()
                process.close()
                return hang
        return None


def _not_ready(processes: Sequence[ManagedProcess]) -> str:
    late = [process for process in processes if process.ready is None]
    doing = ", ".join(f"{process.name} ({process.doing})" for process in late)
    return f"Not ready in time: {doing}."


def _lacks_memory(processes: Sequence[ManagedProcess]) -> bool:
    """Whether one of them has failed for want of memory for a step."""
    return any(process.failed and process.failed.is_out_of_memory for process in processes)
