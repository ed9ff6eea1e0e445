"""One of several engines on a host: names of its processes and files, and its GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass

from longshore.protocol.commands import Role
from longshore.protocol.logs.records import Field, fields


@dataclass(frozen=True)
class Replica:
    """number: starts at 0. count: number of engines; with one, process names have no engine number.
    role: what it is for.
    gpu_group: see `gpus_of`; None: its number. An engine that was added can use the GPUs of one
               that was removed.
    num_on_host: number of engines on its host; 0: all are.
    devices: GPUs of its ranks; empty: engines use consecutive groups of GPUs.
    model: which one of the deployment's models it has.

    `worker 1.0` is rank 0 of engine 1.
    """

    number: int = 0
    count: int = 1
    role: Role = "unified"
    gpu_group: int | None = None
    num_on_host: int = 0
    devices: tuple[int, ...] = ()
    model: int = 0

    @property
    def engine_id(self) -> str:
        """The engine's id, also the name of its restart group."""
        return f"engine-{self.number}"

    @property
    def scheduler(self) -> str:
        """Name of its scheduler process."""
        return "scheduler" if self.count == 1 else f"scheduler {self.number}"

    def worker(self, rank: int) -> str:
        """Name of a worker process."""
        return f"worker {rank}" if self.count == 1 else f"worker {self.number}.{rank}"

    def has_worker(self, name: str) -> bool:
        """Whether this is the name of one of its workers."""
        kind, _, number = name.partition(" ")
        if self.count == 1:  # others may have been added
            return kind == "worker" and "." not in number
        return kind == "worker" and number.startswith(f"{self.number}.")

    def file_name(self, kind: str) -> str:
        """Name of a file or socket of this engine."""
        return kind if self.count == 1 else f"{kind}-{self.number}"

    @property
    def gpus_of(self) -> int:
        """Which consecutive GPUs it uses."""
        return self.number if self.gpu_group is None else self.gpu_group

    def gpu(self, rank: int, num_ranks: int) -> str:
        """The GPU of a rank: one of `devices`, or engines use consecutive groups of GPUs."""
        number = self.devices[rank] if self.devices else self.gpus_of * num_ranks + rank
        return f"cuda:{number}"


def replicas(roles: Sequence[Role]) -> list[Replica]:
    """All engines of a deployment. roles: of each."""
    return [Replica(number, len(roles), role) for number, role in enumerate(roles)]


def about(group: str) -> dict[str, dict[str, Field]]:
    """The `extra` argument of a logging call about a restart group: it names the engine, if the
    group is one."""
    return fields(engine=group) if group.startswith("engine-") else fields()
