"""Tensor parallel ranks as threads of one process: any number of shards, without a transport."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from longshore.worker.kv_cache.context_share import ContextShare
from longshore.worker.ranks.parallel import Parallel

Answer = TypeVar("Answer")
TIMEOUT_S = 60.0


class Meeting:
    """Where the shards of a stage exchange tensors."""

    def __init__(self, num_shards: int) -> None:
        self._barrier = Barrier(num_shards, timeout=TIMEOUT_S)
        self._parts: list[Tensor | None] = [None] * num_shards

    def exchange(self, shard: int, part: Tensor) -> list[Tensor]:
        self._parts[shard] = part.clone()
        self._barrier.wait()
        parts = [part for part in self._parts if part is not None]
        self._barrier.wait()  # no thread stores its next tensor before all have read these
        return parts

    def leave(self) -> None:
        """Release the shards that wait for a failed one."""
        self._barrier.abort()


@dataclass(frozen=True)
class ThreadParallel(Parallel):
    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def all_reduce(self, partial_sum: Tensor) -> Tensor:
        parts = self.meeting.exchange(self.shard, partial_sum)
        return partial_sum.copy_(torch.stack(parts).sum(0))

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.shard, part), dim=-1)

    def gather_context(self, part: Tensor) -> Tensor:
        return torch.stack(self._of_context(part))

    def exchange_context(self, parts: Tensor) -> Tensor:
        return torch.stack([each[self.context_share.rank] for each in self._of_context(parts)])

    def _of_context(self, part: Tensor) -> list[Tensor]:
        first = self.shard - self.context_share.rank
        return self.meeting.exchange(self.shard, part)[first : first + self.context_share.size]


def on_every_rank(
    num_shards: int,
    num_stages: int,
    run: Callable[[list[ThreadParallel]], Answer],
    *,
    num_sharing: int = 1,
    interleave: int = 1,
) -> list[Answer]:
    """The results of `run` in each shard's thread, called with the shard's place in every stage.

    num_sharing, interleave: decode context parallel ranks, and their interleave.
    """
    meetings = [Meeting(num_shards) for _ in range(num_stages)]

    def of_shard(shard: int) -> Answer:
        places = [
            ThreadParallel(
                shard,
                num_shards,
                stage,
                num_stages,
                meeting=meeting,
                context_share=ContextShare(shard % num_sharing, num_sharing, interleave),
            )
            for stage, meeting in enumerate(meetings)
        ]
        try:
            return run(places)
        except BaseException:
            for meeting in meetings:
                meeting.leave()
            raise

    with ThreadPoolExecutor(num_shards) as threads:
        return list(threads.map(of_shard, range(num_shards)))
