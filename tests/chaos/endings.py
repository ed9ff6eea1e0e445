"""Faults while a deployment starts or drains, or that do not let it start. It ends with them, and
nothing is left of it."""

import contextlib
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from tests.chaos.outcomes import Outcome
from tests.chaos.setups import HOST_TIER, connector_flags, deploy
from tests.chaos.streams import COMPLETE, Load, Prompt, Stream, check_streams
from tests.chaos.target import RECOVERY_S, Target, check_nothing_is_left
from tests.integration.deployment import Deployment, wait_until

DRAIN_S: Final = 30.0
SHORT_DRAIN_S: Final = 0.5

CUT: Final = ("error event", "closed", "status 503")
"""How a stream ends that is not complete."""

Injection = Callable[[Deployment], None]

Damage = Callable[[Path, Path], None]
"""Damages the copy of a model, or plants something in place of the disk tier's folder."""


@dataclass(frozen=True)
class Ending:
    """One fault that ends a deployment.

    inject:  called once the deployment has begun to start, or to drain under load.
    status:  the exit status.
    damage:  done before it starts.
    reason:  what must be printed.
    begin:   the signal that begins the drain.
    drain_s: time that running requests have; None: the fault comes while it starts.
    is_cut:  streams may be cut.
    is_hang: the worker hangs from before the drain on.
    is_short: it is in the short form of the suite.
    """

    kind: str
    what: str
    inject: Injection
    status: int
    begin: signal.Signals = signal.SIGTERM
    drain_s: float | None = DRAIN_S
    is_cut: bool = True
    is_hang: bool = False
    is_short: bool = True
    damage: Damage | None = None
    reason: str = ""


def send(name: str, number: signal.Signals = signal.SIGKILL) -> Injection:
    return lambda deployment: deployment.members[name].send_signal(number)


def send_all(number: signal.Signals) -> Injection:
    """As a terminal, or a service manager, does."""

    def inject(deployment: Deployment) -> None:
        for process in (deployment.process, *deployment.process.children()):
            process.send_signal(number)

    return inject


def send_new(name: str, number: signal.Signals = signal.SIGKILL) -> Injection:
    """Send a signal to a process as soon as it exists."""

    def inject(deployment: Deployment) -> None:
        wait_until(lambda: _member(deployment, name) is not None)
        process = _member(deployment, name)
        assert process is not None
        process.send_signal(number)

    return inject


def _member(deployment: Deployment, name: str) -> psutil.Process | None:
    for child in deployment.process.children():
        try:
            if Path(child.cmdline()[-1]).stem == name:
                return child
        except (psutil.Error, IndexError):  # it does not run its program yet, or any more
            continue
    return None


def at_start(inject: Injection) -> Injection:
    """Once all processes have begun to start."""

    def inject_then(deployment: Deployment) -> None:
        wait_until(lambda: _member(deployment, "gateway") is not None)
        inject(deployment)

    return inject_then


def kill_supervisor(deployment: Deployment) -> None:
    deployment.process.kill()


def nothing(deployment: Deployment) -> None:
    pass


def pipe_as_config(model: Path, disk: Path) -> None:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")


def garbage_as_weights(model: Path, disk: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 64)


def pipe_as_disk_tier(model: Path, disk: Path) -> None:
    os.mkfifo(disk)


def open_disk_tier(model: Path, disk: Path) -> None:
    disk.mkdir()
    disk.chmod(0o777)


def bad_folder(what: str, damage: Damage, reason: str, *, is_short: bool = True) -> Ending:
    return Ending(
        "bad folder",
        what,
        nothing,
        2,
        drain_s=None,
        is_short=is_short,
        damage=damage,
        reason=reason,
    )


ENDINGS: Final[Sequence[Ending]] = (
    Ending("drain", "without a fault", nothing, 0, is_cut=False),
    Ending("drain", "at the deadline", nothing, 0, drain_s=SHORT_DRAIN_S),
    Ending("drain", "a second signal", send("supervisor", signal.SIGTERM), 0, is_short=False),
    Ending(
        "SIGHUP",
        "twice, to all processes",
        send_all(signal.SIGHUP),
        0,
        begin=signal.SIGHUP,
        is_cut=False,
    ),
    Ending(
        "SIGHUP",
        "while the processes start",
        at_start(send_all(signal.SIGHUP)),
        0,
        drain_s=None,
        is_short=False,
    ),
    Ending("killed in drain", "the worker", send("worker-0"), 1),
    Ending("killed in drain", "the scheduler", send("scheduler"), 1),
    Ending("killed in drain", "the gateway", send("gateway"), 1),
    Ending("killed in drain", "the supervisor", send("supervisor"), -signal.SIGKILL),
    Ending("hung in drain", "the worker", nothing, 1, drain_s=SHORT_DRAIN_S, is_hang=True),
    Ending("killed at start", "the worker", send_new("worker-0"), 1, drain_s=None),
    Ending(
        "killed at start", "the scheduler", send_new("scheduler"), 1, drain_s=None, is_short=False
    ),
    Ending("killed at start", "the gateway", send_new("gateway"), 1, drain_s=None),
    Ending(
        "killed at start",
        "the supervisor",
        at_start(kill_supervisor),
        -signal.SIGKILL,
        drain_s=None,
    ),
    Ending("stopped at start", "the worker", send_new("worker-0", signal.SIGSTOP), 1, drain_s=None),
    Ending(
        "stopped at start",
        "the scheduler",
        send_new("scheduler", signal.SIGSTOP),
        1,
        drain_s=None,
        is_short=False,
    ),
    Ending("stopped at start", "the gateway", send_new("gateway", signal.SIGSTOP), 1, drain_s=None),
    bad_folder(
        "a pipe in place of config.json", pipe_as_config, "is not readable JSON", is_short=False
    ),
    bad_folder("garbage in place of the weights", garbage_as_weights, "not a complete safetensors"),
    bad_folder("a pipe in place of the disk tier", pipe_as_disk_tier, "cannot use", is_short=False),
    bad_folder("others can write to the disk tier", open_disk_tier, "has mode 0777"),
)
"""Each on a deployment of its own, with one engine, one gateway and host memory as a tier; those
with a bad folder also have a disk tier."""


class Endings:
    """Applies endings to deployments of one model. The first one that starts also runs calmly."""

    def __init__(self, model: Path, folder: Path, prompts: Sequence[Prompt], seed: int) -> None:
        self._model = model
        self._folder = folder
        self._prompts = prompts
        self._chance = random.Random(seed)
        self._calm: list[Stream] = []
        self._num_started = 0

    def run(self, ending: Ending) -> Outcome:
        """Raises AssertionError."""
        self._num_started += 1
        folder = self._folder / str(self._num_started)
        model, tiers = self._model, HOST_TIER
        if ending.damage is not None:
            model = shutil.copytree(model, folder / "model")
            tiers = {**tiers, "disk_path": str(folder / "disk"), "disk_bytes": "16MiB"}
            ending.damage(model, folder / "disk")
        flags = connector_flags("offloading", tiers)
        if ending.drain_s is not None:
            flags += ["--drain-timeout-s", str(ending.drain_s)]
        with deploy(model, folder, *flags) as deployment:
            try:
                streams = self._end(deployment, ending, folder)
                _check_end(deployment, ending)
            except BaseException as error:
                error.add_note(f"{ending.kind}: {ending.what}")
                error.add_note(deployment.output[-6000:])
                raise
        num_complete = sum(stream.end == COMPLETE for stream in streams)
        num_cut = len(streams) - num_complete
        outcome = Outcome(ending.kind, ending.what, num_complete, num_cut, None)
        print(outcome)
        return outcome

    def _end(self, deployment: Deployment, ending: Ending, folder: Path) -> list[Stream]:
        if ending.drain_s is None:
            ending.inject(deployment)
            return []
        target = Target(deployment.wait_until_ready(), self._prompts, folder=folder)
        if not self._calm:
            target.run_calmly()
            self._calm = target.calm
        seed = self._chance.getrandbits(32)
        with Load(deployment.url, self._prompts, seed=seed) as load:
            load.wait_for_tokens()
            load.stop_asking()
            worker = deployment.members["worker-0"]
            worker.suspend()  # so that no stream ends before the fault
            deployment.process.send_signal(ending.begin)
            wait_until(lambda: "running requests have" in deployment.output)
            ending.inject(deployment)
            if not ending.is_hang:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.resume()
            streams = load.finish()
        wrong = check_streams(streams, self._calm, CUT if ending.is_cut else ())
        assert not wrong, wrong[:10]
        return streams


def _check_end(deployment: Deployment, ending: Ending) -> None:
    assert deployment.process.wait(timeout=RECOVERY_S) == ending.status
    check_nothing_is_left(deployment)
    assert "Traceback" not in deployment.output
    assert ending.reason in deployment.output
