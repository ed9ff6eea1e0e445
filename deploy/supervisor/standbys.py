"""Standbys: processes that are kept ready to take the place of workers that die.

A standby has loaded its weights, has no rows and no KV cache, and waits. An engine has sets of
them, with one standby per rank, because its ranks are always replaced together. A set is started
when its engine runs, and again after it has taken over or one of its standbys has died. Its absence
only means that new processes are started instead.
"""

import itertools
import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from longshore.deploy.supervisor.process import ManagedProcess, ProcessSpec
from longshore.deploy.supervisor.process_set import ProcessSet, hang_of
from longshore.deploy.supervisor.replica import about
from longshore.deploy.supervisor.restarts import Restarts

logger = logging.getLogger(__name__)

MAX_DELAY_S: Final = 600.0
"""Loading weights again and again would slow down the engine."""


@dataclass
class _StandbySet:
    """number:   counts the sets of an engine from 0.
    standbys: by rank; empty while the set is not running.
    """

    number: int
    restarts: Restarts
    standbys: list[ManagedProcess] = field(default_factory=list)


class Standbys:
    """The standby sets of all engines. The standbys that run are in the process set, too.

    start_timeout_s, hang_timeout_s: see GroupRestarts.
    """

    def __init__(
        self, processes: ProcessSet, *, start_timeout_s: float, hang_timeout_s: float
    ) -> None:
        self._processes = processes
        self._start_timeout_s = start_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._num_started = itertools.count()
        self._sets: dict[str, list[_StandbySet]] = {}
        for process in processes.running:
            self.add(process.spec)

    def add(self, spec: ProcessSpec) -> None:
        """There is a process with this spec; `keep` starts its standbys."""
        if spec.num_standbys and spec.restart_group is not None:
            self._sets[spec.restart_group] = [
                _StandbySet(number, _not_started()) for number in range(spec.num_standbys)
            ]

    def remove(self, engine: str) -> None:
        """The engine ends: kill its standbys, for good."""
        self.end(engine)
        self._sets.pop(engine, None)

    def keep(self, engine: str, *, is_running: bool) -> None:
        """Do what is due for the sets of an engine, given as its restart group."""
        for each in self._sets.get(engine, ()):
            now_s = time.monotonic()
            if not each.standbys:
                if is_running and now_s >= each.restarts.due_s:
                    self._start(engine, each, now_s)
            elif (death := self._death_of(each)) is not None:
                self._replace(engine, each, death)
            elif each.restarts.running_since_s is None and all(p.ready for p in each.standbys):
                each.restarts.became_ready(now_s)
                logger.info("%s can take over", _names(each.standbys), extra=about(engine))

    def due_s(self, engine: str, *, is_running: bool) -> float:
        """When `keep` has something to do, if no process reports before."""
        sets = self._sets.get(engine, ())
        return min(
            (each.restarts.due_s for each in sets if each.standbys or is_running), default=math.inf
        )

    def take(
        self, engine: str, places: Sequence[ManagedProcess]
    ) -> dict[ManagedProcess, ManagedProcess]:
        """The standby that takes each place, if there is a set that is ready for all of them. If
        not, standbys that are still loading end: at their priority, they would be ready later than
        the new processes, which they would slow down.

        places: processes of the engine that have ended, by rank.
        """
        if not places:
            return {}
        for each in self._sets.get(engine, ()):
            is_ready = each.restarts.running_since_s is not None and not self._death_of(each)
            if not is_ready or len(each.standbys) != len(places):
                continue
            standbys, each.standbys, each.restarts = each.standbys, [], _not_started()
            for place, standby in zip(places, standbys, strict=True):
                logger.info(
                    "%s takes the place of %s", standby.name, place.name, extra=about(engine)
                )
                self._processes.running.remove(standby)
                standby.take_over(place.next_spec())
            return dict(zip(places, standbys, strict=True))
        if engine in self._sets:
            logger.warning(
                "no standby of %s is ready (%s); new processes are started, which takes longer",
                engine,
                self._describe(engine),
                extra=about(engine),
            )
        self.end(engine)
        return {}

    def _describe(self, engine: str) -> str:
        """Why no standby can take over."""
        standbys = [standby for each in self._sets[engine] for standby in each.standbys]
        return (
            ", ".join(
                f"{standby.name}: {'cannot take over' if standby.ready else standby.doing}"
                for standby in standbys
            )
            or "they are not running"
        )

    def end(self, engine: str) -> None:
        """Kill the standbys of an engine. `keep` starts new ones when it runs."""
        for each in self._sets.get(engine, ()):
            self._kill(each)
            each.restarts = _not_started()

    def end_all(self) -> None:
        """Kill all standbys."""
        for engine in self._sets:
            self.end(engine)

    def _start(self, engine: str, each: _StandbySet, now_s: float) -> None:
        workers = [one for one in self._processes.members(engine) if one.spec.num_standbys]
        number = next(self._num_started)
        each.restarts.started(deadline_s=now_s + self._start_timeout_s)
        try:
            for worker in workers:
                standby = self._processes.launch(_spec(worker, each.number, number))
                each.standbys.append(standby)
                self._processes.running.append(standby)
        except OSError as error:  # the disk is full, or there are too many processes
            self._replace(engine, each, f"standbys of {engine} cannot be started: {error}.")

    def _replace(self, engine: str, each: _StandbySet, death: str) -> None:
        self._kill(each)
        now_s = time.monotonic()
        each.restarts.died(now_s)
        logger.warning(
            "%s The engine runs on; a new standby is started in %.1f s.",
            death,
            each.restarts.due_s - now_s,
            extra=about(engine),
        )

    def _kill(self, each: _StandbySet) -> None:
        for standby in each.standbys:
            standby.kill()
            standby.close()
            self._processes.running.remove(standby)
        each.standbys = []

    def _death_of(self, each: _StandbySet) -> str | None:
        for standby in each.standbys:
            standby.read_lifeline()
            hang = hang_of(standby, self._hang_timeout_s) if self._hang_timeout_s else None
            if hang is not None:
                return hang
        if any(standby.failed or standby.lifeline_closed for standby in each.standbys):
            return self._processes.explain_failure(each.standbys)
        if time.monotonic() >= each.restarts.deadline_s:
            return f"{_names(each.standbys)} not ready in time."
        return None


def _not_started() -> Restarts:
    """To be started at once, and then as often as needed."""
    return Restarts(sys.maxsize, running_since_s=None, next_start_s=0.0, max_delay_s=MAX_DELAY_S)


def _names(standbys: Sequence[ManagedProcess]) -> str:
    return ", ".join(standby.name for standby in standbys)


def _spec(process: ManagedProcess, set_number: int, number: int) -> ProcessSpec:
    worker = process.spec
    assert worker.config_of_standby is not None
    config = worker.config_of_standby(worker.config, number)
    if process.ready is not None and process.ready.late_imports:
        config = msgspec.structs.replace(config, late_imports=process.ready.late_imports)
    suffix = f" {set_number + 1}" if worker.num_standbys > 1 else ""
    return ProcessSpec(
        f"{worker.name} standby{suffix}",
        worker.module,
        config,
        environment=worker.environment,
        late_environment=worker.late_environment,
        pass_fds=worker.pass_fds,
        restart_group=f"{worker.restart_group} standby{suffix}",
    )
