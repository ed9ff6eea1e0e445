"""How the ranks of an engine find each other: through a file, before the model is loaded.

They poll the file, so that a stop signal can end the wait for a rank that never starts.
torch.distributed, which cannot be interrupted, is initialised when all ranks are there.
"""

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from longshore.protocol.errors import EngineDead
from longshore.worker.config import RankLayout
from longshore.worker.errors import RankLost
from longshore.worker.kv_cache.context_share import ContextShare
from longshore.worker.ranks.parallel import ALONE, Parallel

POLL_INTERVAL_S: Final = 0.05
BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}


@contextlib.contextmanager
def joined_ranks(layout: RankLayout, rank: int, device: torch.device) -> Iterator[Parallel]:
    """Join the other ranks; the context is this rank's position with its process groups.

    Each exchange waits up to `startup_timeout_s` for the other ranks, because they may still be
    loading or compiling, until `Parallel.set_timeout` sets a shorter timeout.

    On normal exit from the block a rank waits for the others to exit too, because closing the
    connections early could cut off data that is still in transit. A process can do this once.
    Raises EngineDead if not all ranks join within `startup_timeout_s`.
    """
    if layout.num_ranks == 1:
        yield ALONE
        return
    assert layout.rendezvous is not None
    store = dist.FileStore(layout.rendezvous, layout.num_ranks)  # type: ignore[attr-defined]  # torch
    _meet(store, layout.num_ranks, layout.startup_timeout_s)
    timeout = timedelta(seconds=layout.startup_timeout_s)
    try:
        dist.init_process_group(
            BACKENDS[device.type],
            store=store,
            rank=rank,
            world_size=layout.num_ranks,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        parallel = _parallel(layout, rank, timeout, store)
    except RuntimeError as error:
        raise RankLost(f"rank {rank} could not connect to the other ranks: {error}") from error
    try:
        yield parallel
        with contextlib.suppress(RankLost):  # harmless: no results are pending
            parallel.meet(device)
    finally:
        dist.destroy_process_group()


def _meet(store: Any, num_ranks: int, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    num_there = store.add("there", 1)
    while num_there < num_ranks:
        if time.monotonic() >= deadline_s:
            raise EngineDead(
                f"only {num_there} of {num_ranks} ranks have started within {timeout_s:.0f} s. "
                "Check the logs of the other ranks, or raise --startup-timeout-s."
            )
        time.sleep(POLL_INTERVAL_S)
        num_there = store.add("there", 0)


def _parallel(layout: RankLayout, rank: int, timeout: timedelta, store: Any) -> Parallel:
    num_shards, num_sharing = layout.tensor_parallel_size, layout.decode_context_parallel_size
    stage, shard = divmod(rank, num_shards)
    shard_group = _group_of_neighbours(layout, rank, num_shards, timeout)
    context_group = _group_of_neighbours(layout, rank, num_sharing, timeout)
    return Parallel(
        shard=shard,
        num_shards=num_shards,
        stage=stage,
        num_stages=layout.pipeline_parallel_size,
        shard_group=shard_group,
        all_ranks=dist.group.WORLD,
        context_share=ContextShare.of_ranks(
            dcp_rank=shard % num_sharing,
            dcp_size=num_sharing,
            interleave=layout.cp_kv_cache_interleave_size,
        ),
        context_group=context_group,
        store=store,
    )


def _group_of_neighbours(
    layout: RankLayout, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup | None:
    """Divide all ranks into groups of `size`; returns this rank's group, None if `size` is 1."""
    own = None
    if size > 1:
        for first in range(0, layout.num_ranks, size):  # every rank must make every group
            group = dist.new_group(list(range(first, first + size)), timeout=timeout)
            if rank in range(first, first + size):
                own = group
    return own
