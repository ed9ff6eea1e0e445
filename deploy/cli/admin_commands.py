"""The commands of `longshore admin`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from longshore.protocol.commands import LogLevel, PauseMode, Role
from longshore.protocol.errors import ConfigError, shortened

if TYPE_CHECKING:
    from longshore.deploy.admin.actions import Action

admin = App(
    name="admin",
    help="Administer a deployment of this user on this machine, through its private socket.",
)
admin.config = ()  # flags alone: no variable may stop or restart engines


@dataclass(frozen=True, kw_only=True)
class DeploymentChoice:
    """Which deployment.

    Attributes:
        url: URL of the deployment, as `longshore admin list` shows it. Default: the only one.
        socket: Admin socket, as the log of `longshore serve` names it, in place of a URL.
    """

    url: str | None = None
    socket: Path | None = None

    @property
    def path(self) -> Path:
        """Return the admin socket. Raises ConfigError."""
        from longshore.deploy.admin.client import find_socket

        return self.socket or find_socket(self.url)


@dataclass(frozen=True, kw_only=True)
class DeploymentOptions(DeploymentChoice):
    """Which deployment, and how the result is printed.

    Attributes:
        json: Print one JSON object instead of lines.
    """

    json: bool = False


_DeploymentOptions = Annotated[DeploymentOptions, Parameter(name="*")]
_ONLY = DeploymentOptions()


@dataclass(frozen=True, kw_only=True)
class EngineChoice(DeploymentChoice):
    """Which engines of which deployment.

    Attributes:
        engine: Number of the engine, or all.
    """

    engine: str = "all"

    @property
    def number(self) -> int | None:
        """Return the number; None means all. Raises ConfigError."""
        if self.engine == "all":
            return None
        if not (self.engine.isascii() and self.engine.isdigit() and len(self.engine) <= 4):
            raise ConfigError(
                f"engine={shortened(self.engine)!r} must be the number of an engine, or all"
            )
        return int(self.engine)


@dataclass(frozen=True, kw_only=True)
class EngineActionOptions(EngineChoice):
    """Which engines, and how the results are printed.

    Attributes:
        json: Print one JSON object instead of lines.
    """

    json: bool = False


_Choice = Annotated[EngineChoice, Parameter(name="*")]
_EngineOptions = Annotated[EngineActionOptions, Parameter(name="*")]
_ALL = EngineActionOptions()


@admin.command(name="list")
def list_deployments(*, json: bool = False) -> None:
    """List the deployments of this user on this machine, by their URLs.

    Args:
        json: Print a JSON object by URL instead of lines.
    """
    from longshore.deploy.cli.admin import print_deployments

    print_deployments(as_json=json)


@admin.command
def status(*, options: _EngineOptions = _ALL) -> None:
    """Show the state of each process, and what each engine does.

    Exit status 0: all are ready; 1: some are not.
    """
    from longshore.deploy.admin.actions import Status

    _run(Status(engine=options.number), options.path, options.json)


@admin.command
def pause(
    *, mode: PauseMode = "wait", timeout_s: float = 30.0, options: _EngineOptions = _ALL
) -> None:
    """Stop admitting requests, until `resume`. New ones go to engines that are not paused, or wait.

    Args:
        mode: What happens to requests that run: they finish (wait), they stop, and keep their KV
            blocks (keep), or all requests are aborted (abort).
        timeout_s: Seconds to wait for running requests, in mode wait. The engine stays paused
            afterwards.
    """
    from longshore.deploy.admin.actions import PauseEngine

    _run(
        PauseEngine(mode=mode, timeout_s=timeout_s, engine=options.number),
        options.path,
        options.json,
    )


@admin.command
def resume(*, options: _EngineOptions = _ALL) -> None:
    """End a pause, or the drain of an engine."""
    from longshore.deploy.admin.actions import ResumeEngine

    _run(ResumeEngine(engine=options.number), options.path, options.json)


@admin.command
def sleep(*, timeout_s: float = 30.0, options: _EngineOptions = _ALL) -> None:
    """Free the memory of the workers' devices, until `wake`: the KV cache is dropped, and the
    weights on a GPU wait in host memory. New requests go to engines that are awake, or wait.

    Args:
        timeout_s: Seconds for running requests to finish. The others go on where they were, at
            another engine or after `wake`.
    """
    from longshore.deploy.admin.actions import SleepEngine

    _run(SleepEngine(timeout_s=timeout_s, engine=options.number), options.path, options.json)


@admin.command
def wake(*, options: _EngineOptions = _ALL) -> None:
    """End a sleep, and wait until the engines serve again."""
    from longshore.deploy.admin.actions import WakeEngine

    _run(WakeEngine(engine=options.number), options.path, options.json)


@admin.command
def drain(*, options: _DeploymentOptions = _ONLY) -> None:
    """Stop the deployment as SIGTERM does, and wait until it has ended: no requests are accepted,
    and running ones have --drain-timeout-s to finish.
    """
    from longshore.deploy.admin.actions import Drain

    _run(Drain(), options.path, options.json)


@admin.command
def restart(*, timeout_s: float | None = None, options: _EngineOptions = _ALL) -> None:
    """Restart engines, one after the other, without losing a request. An engine's running requests
    finish, while new ones go to the other engines, or wait; requests that do not finish in time go
    on where they were, on another engine or on the restarted one.

    Args:
        timeout_s: Seconds for the running requests of an engine. Default: the deployment's
            --drain-timeout-s.
    """
    from longshore.deploy.admin.actions import Restart

    _run(Restart(timeout_s=timeout_s, engine=options.number), options.path, options.json)


@admin.command
def add_engine(*, role: Role | None = None, options: _DeploymentOptions = _ONLY) -> None:
    """Start one more engine with the settings of the others, and send it requests once it is ready.
    If it does not start, nothing else changes.

    Args:
        role: unified, prefill or decode. Default: that of all engines.
    """
    from longshore.deploy.admin.actions import AddEngine

    _run(AddEngine(role), options.path, options.json)


@admin.command
def drain_engine(
    engine: int, *, timeout_s: float | None = None, options: _DeploymentOptions = _ONLY
) -> None:
    """Send no new requests to an engine, until `resume --engine`, and wait for those that it has.

    Args:
        engine: Number of the engine.
        timeout_s: Seconds to wait for its requests; it gets no new ones afterwards, either.
            Default: the deployment's --drain-timeout-s.
    """
    from longshore.deploy.admin.actions import DrainOneEngine

    _run(DrainOneEngine(engine=engine, timeout_s=timeout_s), options.path, options.json)


@admin.command
def remove_engine(
    engine: int, *, timeout_s: float | None = None, options: _DeploymentOptions = _ONLY
) -> None:
    """Drain an engine and stop its processes. Requests that do not finish in time go on where they
    were, on another engine.

    Args:
        engine: Number of the engine.
        timeout_s: Seconds for its requests. Default: the deployment's --drain-timeout-s.
    """
    from longshore.deploy.admin.actions import RemoveEngine

    _run(RemoveEngine(engine=engine, timeout_s=timeout_s), options.path, options.json)


@admin.command
def reset_prefix_cache(*, preempt: bool = False, options: _EngineOptions = _ALL) -> None:
    """Empty the prefix cache. Fails while requests hold blocks.

    Args:
        preempt: Take the blocks of running requests, which then compute their KV again.
    """
    from longshore.deploy.admin.actions import ResetPrefixCache

    _run(ResetPrefixCache(preempt=preempt, engine=options.number), options.path, options.json)


@admin.command
def reset_encoder_cache(*, options: _EngineOptions = _ALL) -> None:
    """Drop all encoder outputs. Fails while a request needs one."""
    from longshore.deploy.admin.actions import ResetEncoderCache

    _run(ResetEncoderCache(engine=options.number), options.path, options.json)


@admin.command
def reset_connector_cache(*, options: _EngineOptions = _ALL) -> None:
    """Drop the KV that the connector has stored. Fails without a connector, or if it cannot."""
    from longshore.deploy.admin.actions import ResetConnectorCache

    _run(ResetConnectorCache(engine=options.number), options.path, options.json)


@admin.command
def kv_snapshot(*, output: Path | None = None, options: _Choice = _ALL) -> None:
    """Write which KV blocks are stored where, as lines of JSON: for each engine, one line about the
    snapshot and one per event. Needs --enable-kv-cache-events.

    Args:
        output: New file to write. Default: standard output.
    """
    from longshore.deploy.admin.actions import KVSnapshot
    from longshore.deploy.cli.admin import run_snapshot

    sys.exit(run_snapshot(KVSnapshot(engine=options.number), options.path, output))


@admin.command
def reload_keys(*, options: _DeploymentOptions = _ONLY) -> None:
    """Read the key file again: from then on, its keys are valid, and no others. Running requests
    finish. If the file is not valid, nothing changes.
    """
    from longshore.deploy.admin.actions import ReloadKeys

    _run(ReloadKeys(), options.path, options.json)


@admin.command
def profile(
    *,
    process: str | None = None,
    duration_s: float = 5.0,
    options: _EngineOptions = _ALL,
) -> None:
    """Sample the Python stacks of processes, 200 times a second. The files are in the state
    directory; flamegraph.pl and speedscope.app draw them.

    Args:
        process: Name of one process, as `status` prints it. Default: all.
        duration_s: Seconds to sample.
    """
    from longshore.deploy.admin.actions import ProfileProcesses

    _run(
        ProfileProcesses(process=process, duration_s=duration_s, engine=options.number),
        options.path,
        options.json,
    )


@admin.command
def log_level(
    level: LogLevel, *, process: str | None = None, options: _EngineOptions = _ALL
) -> None:
    """Set the lowest level of log records. It is kept when the process is restarted.

    Args:
        level: debug, info, warning or error.
        process: Name of one process, as `status` prints it. Default: all.
    """
    from longshore.deploy.admin.actions import SetLevel

    _run(SetLevel(level=level, process=process, engine=options.number), options.path, options.json)


def _run(action: "Action", socket: Path, as_json: bool) -> None:
    from longshore.deploy.cli.admin import run

    sys.exit(run(action, socket, as_json=as_json))
