"""Which of several equal engines on one host: what its processes are called and what they take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Replica:
    """number: from 0. count: engines of the deployment; a single one's processes have plain names.

    `worker 1.0` is rank 0 of engine 1.
    """

    number: int = 0
    count: int = 1

    @property
    def scheduler(self) -> str:
        """Name of its scheduler process."""
        return "scheduler" if self.count == 1 else f"scheduler {self.number}"

    def worker(self, rank: int) -> str:
        """Name of a worker process."""
        return f"worker {rank}" if self.count == 1 else f"worker {self.number}.{rank}"

    def has_worker(self, name: str) -> bool:
        """Whether a process of that name is one of its workers."""
        kind, _, number = name.partition(" ")
        return kind == "worker" and (self.count == 1 or number.startswith(f"{self.number}."))

    def file_name(self, kind: str) -> str:
        """Of a file or socket that each engine has of its own."""
        return kind if self.count == 1 else f"{kind}-{self.number}"

    def gpu(self, rank: int, num_ranks: int) -> str:
        """Engines take neighbouring GPUs, the first engine the first ones."""
        return f"cuda:{self.number * num_ranks + rank}"


def replicas(count: int) -> list[Replica]:
    """All of a deployment."""
    return [Replica(number, count) for number in range(count)]
