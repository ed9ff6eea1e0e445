"""The processes of an engine without a gateway: starts, watches and stops them."""

import sys
from concurrent.futures import Future

from longshore.deploy.supervisor.engine_config import engine_processes
from longshore.deploy.supervisor.engine_plan import EnginePlan
from longshore.deploy.supervisor.process import STOP_TIMEOUT_S
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.supervisor.supervisor import Supervisor
from longshore.protocol.commands import Command, CommandAnswer


class EngineProcesses:
    """A scheduler and its workers, which are not restarted. Not thread-safe.

    endpoint: of the scheduler, for clients.
    """

    def __init__(self, plan: EnginePlan) -> None:
        """Raises ConfigError or StartFailed if the engine cannot start, after cleaning up."""
        self._supervisor = Supervisor(RuntimeDir(), sys.stderr)
        try:
            specs, self.endpoint = engine_processes(plan, self._supervisor.runtime_dir)
            self._supervisor.start(specs, timeout_s=plan.options.startup_timeout_s)
        except BaseException:
            self.close()
            raise

    def find_death(self) -> str | None:
        """See Supervisor. Also receives the answers to commands."""
        return self._supervisor.find_death()

    def wait_for_death(self, timeout_s: float) -> str | None:
        """See Supervisor."""
        return self._supervisor.wait_for_death(timeout_s)

    def stop_now(self) -> None:
        """Stop all, because one has failed."""
        self._supervisor.stop_now()

    def send_command(self, command: Command) -> "Future[CommandAnswer]":
        """Send a command to the scheduler; see ManagedProcess."""
        return self._supervisor.processes[-1].send_command(command)

    def close(self) -> None:
        """Stop the processes and remove their files. May be called twice."""
        self._supervisor.stop(drain_timeout_s=STOP_TIMEOUT_S)
