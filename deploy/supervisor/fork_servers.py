"""The fork servers of a deployment: one per set of variables that something reads while a worker
imports. Usually that is one."""

import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from longshore.deploy.supervisor.fork_server import (
    ForkedProcess,
    ForkServer,
    inherited_environment,
)
from longshore.deploy.supervisor.log_relay import LogRelay, relay_output
from longshore.deploy.supervisor.restarts import Restarts

logger = logging.getLogger(__name__)

NAME: Final = "fork server"
MAX_DELAY_S: Final = 600.0


@dataclass
class _Place:
    """Of a fork server with certain variables. server: None if it was never started."""

    server: ForkServer | None
    restarts: Restarts


class ForkServers:
    """relay: for what they print. first: one that was started before everything else."""

    def __init__(self, relay: LogRelay, first: ForkServer) -> None:
        self._relay = relay
        self._modules = first.modules
        self._places: dict[frozenset[tuple[str, str]], _Place] = {}
        place = self._place(first.environment)
        self._use(place, first)

    def fork(
        self,
        module: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        late_environment: Mapping[str, str],
        pass_fds: Sequence[int],
        *,
        start_anew: Callable[[], "subprocess.Popen[bytes]"],
        release: Callable[[], None],
    ) -> ForkedProcess | None:
        """See ForkedProcess. None if no fork server can start it.

        environment: its variables, except for late_environment, which nothing reads while it
                     imports.
        """
        if module not in self._modules:
            return None
        place = self._place({**inherited_environment(), **environment})
        server = place.server
        if server is None or server.is_unfit or not server.is_alive():
            return None
        try:
            return ForkedProcess(
                server,
                command,
                late_environment,
                pass_fds,
                start_anew=start_anew,
                release=release,
            )
        except (OSError, ValueError) as error:
            logger.warning("a worker is started without the fork server: %s", error)
            server.kill()
            return None

    def keep(self, *, is_calm: bool) -> None:
        """Start those that are missing, for the next workers, while the present ones run."""
        now_s = time.monotonic()
        for place in self._places.values():
            server, restarts = place.server, place.restarts
            if server is not None and not server.is_unfit:
                is_alive = server.is_alive()
                if is_alive and server.ready_s is not None and restarts.running_since_s is None:
                    restarts.became_ready(now_s)
                if not is_alive and restarts.next_start_s is None:
                    restarts.died(now_s)
                    logger.warning("the %s has ended; workers start without it meanwhile", NAME)
            if is_calm and restarts.next_start_s is not None and now_s >= restarts.next_start_s:
                self._start(place)

    def due_s(self, *, is_calm: bool) -> float:
        """When `keep` has something to do, if no fork server reports before."""
        waiting = [each.restarts.due_s for each in self._places.values()] if is_calm else []
        return min(waiting, default=math.inf)

    @property
    def running(self) -> list[ForkServer]:
        servers = (place.server for place in self._places.values())
        return [server for server in servers if server is not None and server.is_alive()]

    def memory(self) -> dict[int, int]:
        """The bytes that each has, by process id. May be called on any thread."""
        servers = [place.server for place in list(self._places.values())]
        found = {each.pid: each.resident_bytes() for each in servers if each is not None}
        return {pid: num_bytes for pid, num_bytes in found.items() if num_bytes}

    def close(self) -> None:
        """End all fork servers."""
        for server in self.running:
            server.kill()
        self._places.clear()

    def _place(self, environment: Mapping[str, str]) -> _Place:
        key = frozenset(environment.items())
        if key not in self._places:
            restarts = Restarts(
                sys.maxsize, running_since_s=None, next_start_s=0.0, max_delay_s=MAX_DELAY_S
            )
            self._places[key] = _Place(None, restarts)
        return self._places[key]

    def _start(self, place: _Place) -> None:
        key = next(key for key, each in self._places.items() if each is place)
        try:
            self._use(place, ForkServer(dict(key)))
        except OSError as error:
            place.restarts.died(time.monotonic())
            logger.warning("a %s cannot be started: %s", NAME, error)

    def _use(self, place: _Place, server: ForkServer) -> None:
        place.server = server
        place.restarts.started(deadline_s=math.inf)
        threading.Thread(
            target=relay_output,
            args=(server.output, self._relay, lambda: NAME),
            name=f"log of the {NAME}",
            daemon=True,
        ).start()
