"""The position of a rank among the ranks of its engine, and how they exchange tensors.

An engine of T x P ranks cuts every layer into T shards (tensor parallel, Shoeybi et al., 2019) and
its layers into P stages (pipeline parallel): rank = stage * T + shard. Groups of neighbouring
shards may split the tokens of the KV cache among them (context parallel). All calls run on the
compute queue, so every rank makes them in the same order. Shard 0 of the last stage samples.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

from longshore.worker.errors import RankLost
from longshore.worker.kv_cache.context_share import WHOLE_CONTEXT, ContextShare
from longshore.worker.ranks.stages import layers_of_stage


@dataclass(frozen=True)
class Parallel:
    """The position of one rank. Without groups it is the only rank, and every exchange is the
    identity.

    Exchanges raise RankLost if another rank has died or does not answer in time.

    shard, num_shards: the tensor parallel shard of each layer.
    stage, num_stages: the pipeline stage.
    shard_group: the ranks of this stage; None if there is only one.
    all_ranks:   every rank of the engine; None if there is only one.
    context_share: the tokens whose KV this rank stores.
    context_group: the shards that store the KV of the same sequences; None if this one stores all.
    store:       the `torch.distributed.Store` that all ranks share; None if there is only one.
    """

    shard: int = 0
    num_shards: int = 1
    stage: int = 0
    num_stages: int = 1
    shard_group: dist.ProcessGroup | None = None
    all_ranks: dist.ProcessGroup | None = None
    context_share: ContextShare = WHOLE_CONTEXT
    context_group: dist.ProcessGroup | None = None
    store: Any = field(default=None, compare=False)
    _timeout: list[timedelta] = field(default_factory=list, compare=False)

    @property
    def rank(self) -> int:
        return self.stage * self.num_shards + self.shard

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.num_shards

    @property
    def sampling_rank(self) -> int:
        """The rank that samples and sends outputs."""
        return (self.num_stages - 1) * self.num_shards

    @property
    def samples(self) -> bool:
        """Whether this is the sampling rank."""
        return self.rank == self.sampling_rank

    def all_reduce(self, partial_sum: Tensor) -> Tensor:
        """The sum over the shards, in place."""
        if self.shard_group is not None:
            with self._exchange():
                dist.all_reduce(partial_sum, group=self.shard_group)
        return partial_sum

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Copy shard 0's `tensor` to the other shards of its stage, in place."""
        if self.shard_group is not None:
            with self._exchange():
                dist.broadcast(tensor, group=self.shard_group, group_src=0)
        return tensor

    def all_gather(self, part: Tensor) -> Tensor:
        """Concatenate (..., n) of every shard to (..., num_shards * n), in shard order."""
        if self.shard_group is None:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.num_shards)]
        with self._exchange():
            dist.all_gather(parts, part, group=self.shard_group)
        return torch.cat(parts, dim=-1)

    def gather_context(self, part: Tensor) -> Tensor:
        """`part` of every rank of the context group, in order: (context ranks, ...)."""
        gathered = part.new_empty(self.context_share.size, *part.shape)
        with self._exchange():
            dist.all_gather(list(gathered), part.contiguous(), group=self.context_group)
        return gathered

    def exchange_context(self, parts: Tensor) -> Tensor:
        """Exchange tensors all-to-all within the context group. parts: (context ranks, ...); part i
        goes to rank i, and part i of the result comes from it."""
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        with self._exchange():
            dist.all_to_all_single(received, parts, group=self.context_group)
        return received

    def send(self, tensor: Tensor) -> dist.Work:
        """Start sending to the same shard of the next stage. `tensor` must be contiguous and stay
        unchanged until `finish_sending` has returned."""
        with self._exchange():
            sending = dist.isend(tensor, self.rank + self.num_shards, group=self.all_ranks)
        assert sending is not None, "this rank is in the group"
        return sending

    def finish_sending(self, sending: dist.Work) -> None:
        """Wait until a `send` has completed."""
        with self._exchange():
            self._wait(sending)

    def receive(self, out: Tensor) -> Tensor:
        """Receive into `out`, contiguous, from the same shard of the previous stage."""
        with self._exchange():
            coming = dist.irecv(out, self.rank - self.num_shards, group=self.all_ranks)
            assert coming is not None, "this rank is in the group"
            self._wait(coming)
        return out

    def check(self, device: torch.device) -> None:
        """Raise RankLost if an exchange on a GPU has failed after it was launched. On a CPU, the
        exchange itself has raised it.

        NCCL's watchdog notices lost ranks and timeouts, and aborts the communicators, so that what
        was launched ends. Its results are invalid then. Call this after the end of an operation.
        """
        for group in self._groups():
            backend = group._get_backend(device)
            error = backend.get_error() if hasattr(backend, "get_error") else ErrorType.SUCCESS
            if error != ErrorType.SUCCESS:
                raise self._lost(f"NCCL: {error.name}")

    def _groups(self) -> set[dist.ProcessGroup]:
        groups = (self.shard_group, self.context_group, self.all_ranks)
        return {group for group in groups if group is not None}

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long this rank waits for another one in every later exchange."""
        for group in self._groups():
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
        self._timeout[:] = [timedelta(seconds=timeout_s)]

    def _wait(self, work: dist.Work) -> None:
        # For point-to-point transfers gloo uses the group's initial timeout unless `wait` gets one.
        # NCCL uses the group's current timeout; an argument would block the host.
        if self._timeout and dist.get_backend(self.all_ranks) == "gloo":
            work.wait(self._timeout[0])
        else:
            work.wait()

    def meet(self, device: torch.device) -> None:
        """Barrier: wait until every rank of the engine has called this."""
        if self.all_ranks is not None:
            with self._exchange():
                dist.all_reduce(torch.zeros(1, device=device), group=self.all_ranks)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).partition("] ")[2].partition(". ")[0] or str(error)
            raise self._lost(reason) from error

    def _lost(self, reason: str) -> RankLost:
        return RankLost(
            f"rank {self.rank} has lost the other ranks of its engine ({reason}): one has "
            "died, or did not answer within rank_timeout_s (startup_timeout_s in the warm-up)"
        )

    def share(self, size: int, multiple: int = 1) -> slice:
        """This shard's part of `size` items that come in groups of `multiple`. All parts are equal.

        Raises ValueError if `size` cannot be divided so.
        """
        if size % (multiple * self.num_shards):
            raise ValueError(f"{size} cannot be cut into {self.num_shards} parts of {multiple}s")
        part = size // self.num_shards
        return slice(self.shard * part, (self.shard + 1) * part)

    def layers(self, num_layers: int) -> range:
        """This stage's layers. Raises ValueError if a stage would be empty."""
        return layers_of_stage(num_layers, self.stage, self.num_stages)


ALONE = Parallel()
