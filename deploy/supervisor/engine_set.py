"""Which engines a deployment has, as an operator adds, drains and removes them; without I/O."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from longshore.deploy.supervisor.replica import Replica
from longshore.protocol.commands import Role
from longshore.protocol.errors import LongshoreError

EngineState: TypeAlias = Literal[
    "starting", "ready", "draining", "removing", "not stopped", "removed"
]
"""not stopped: gateways do not use it any more, but its processes could not be ended; it can be
removed again."""
MAX_SHOWN_REMOVED: Final = 8
_SUCCESSORS: Final[dict[Role, tuple[Role, ...]]] = {
    "unified": ("unified",),
    "prefill": ("prefill", "unified"),
    "decode": ("decode", "unified"),
}
"""Which engines do what an engine of a role does."""


class EngineRefused(LongshoreError):
    """The engine is not added, drained or removed, for a reason."""


@dataclass
class _Engine:
    """is_used: gateways send requests to it, also those that are started now."""

    replica: Replica
    state: EngineState
    is_used: bool


class EngineSet:
    """The engines of a deployment and their states. Thread-safe.

    replicas:  the engines at the start.
    max_engines: limit of engines at one time.
    num_gpu_groups: how many engines the GPUs are enough for; None: no limit is known.
    elsewhere: roles of the engines on other nodes, which are taken to be ready.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        max_engines: int = 1024,
        num_gpu_groups: int | None = None,
        elsewhere: Sequence[Role] = (),
    ) -> None:
        self._lock = threading.Lock()
        self._max_engines = max_engines
        self._num_gpu_groups = num_gpu_groups
        self._elsewhere = tuple(elsewhere)
        self._engines = {each.number: _Engine(each, "ready", True) for each in replicas}
        self._removed: list[Replica] = []
        self._next_number = len(self._engines)

    @property
    def present(self) -> list[Replica]:
        """All engines that have processes, by number."""
        with self._lock:
            return [each.replica for each in self._engines.values()]

    @property
    def used(self) -> list[Replica]:
        """The engines that gateways use."""
        with self._lock:
            return [each.replica for each in self._engines.values() if each.is_used]

    @property
    def serving(self) -> list[Replica]:
        """The engines that have started, and are not being removed."""
        with self._lock:
            engines = self._engines.values()
            return [each.replica for each in engines if each.state in ("ready", "draining")]

    @property
    def states(self) -> dict[Replica, EngineState]:
        """States of all engines, and of some that were removed."""
        with self._lock:
            removed: dict[Replica, EngineState] = {each: "removed" for each in self._removed}
            return removed | {each.replica: each.state for each in self._engines.values()}

    def reserve(self, role: Role | None) -> Replica:
        """A new engine, which is starting. Its number was never used, its GPUs are not in use.

        role: None: that of all engines. Raises EngineRefused.
        """
        with self._lock:
            roles = {each.replica.role for each in self._engines.values()}
            if role is None and len(roles) > 1:
                raise EngineRefused(f"role must be one of {', '.join(sorted(roles))}")
            chosen = next(iter(roles)) if role is None else role
            if chosen not in roles and not roles <= {"prefill", "decode"}:
                raise EngineRefused(
                    f"role={chosen}: the engines are {', '.join(sorted(roles))}, without the "
                    "connector that split requests need. Start with --prefill and --decode"
                )
            if len(self._engines) >= self._max_engines:
                raise EngineRefused(f"{self._max_engines} engines are the maximum")
            replica = Replica(
                self._next_number, len(self._engines) + 1, chosen, self._free_gpu_group()
            )
            self._next_number += 1
            self._engines[replica.number] = _Engine(replica, "starting", False)
            return replica

    def _free_gpu_group(self) -> int:
        taken = {each.replica.gpus_of for each in self._engines.values()}
        group = next(group for group in range(len(taken) + 1) if group not in taken)
        if self._num_gpu_groups is not None and group >= self._num_gpu_groups:
            raise EngineRefused(
                f"no GPU is left: {len(taken)} engines use all GPUs. Remove an engine first"
            )
        return group

    def use(self, number: int) -> None:
        """A new engine is ready; gateways use it from now on."""
        with self._lock:
            engine = self._engines[number]
            engine.state, engine.is_used = "ready", True

    def release(self, number: int) -> None:
        """Gateways do not use the engine from now on."""
        with self._lock:
            self._engines[number].is_used = False

    def remove_stopped(self, number: int, *, was_ready: bool) -> None:
        """Remove an engine whose processes have ended. Its number stays taken."""
        with self._lock:
            engine = self._engines.pop(number)
            if was_ready:
                self._removed = [*self._removed, engine.replica][-MAX_SHOWN_REMOVED:]

    def keep(self, number: int) -> None:
        """Keep an engine whose processes could not be ended."""
        with self._lock:
            self._engines[number].state = "not stopped"

    def drain(self, number: int, is_running: Callable[[Replica], bool]) -> None:
        """The engine gets no new requests from now on. is_running: whether another engine runs.
        Raises EngineRefused if it is the last one of its role."""
        self._begin("draining", number, is_running)

    def remove(self, number: int, is_running: Callable[[Replica], bool]) -> None:
        """Do the same; afterwards it ends."""
        self._begin("removing", number, is_running)

    def resume(self, number: int) -> None:
        """Send requests to an engine again, if it was drained."""
        with self._lock:
            engine = self._engines.get(number)
            if engine is not None and engine.state == "draining":
                engine.state = "ready"

    def _begin(
        self, state: EngineState, number: int, is_running: Callable[[Replica], bool]
    ) -> None:
        with self._lock:
            engine = self._engines.get(number)
            if engine is None:
                raise EngineRefused("it does not exist")
            if engine.state in ("starting", "removing"):
                raise EngineRefused(f"it is {engine.state}")
            if engine.state == "not stopped" and state != "removing":
                raise EngineRefused("it could not be removed; remove it again")
            others = {
                each.replica.role
                for each in self._engines.values()
                if each is not engine
                and each.replica.model == engine.replica.model
                and each.state == "ready"
                and is_running(each.replica)
            }
            role = engine.replica.role
            if not (others | {*self._elsewhere}) & {*_SUCCESSORS[role]}:
                raise EngineRefused(
                    f"it is the last {role} engine that is ready. Add or resume another one first"
                )
            engine.state = state
