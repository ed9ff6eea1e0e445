"""The workers' handshake: all ranks are compared, and then all get the same reply.

WorkerHello from all ranks -> WorkerAccepted to all -> WorkerReady from all. Ranks may connect in
any order. The first one that fails ends the startup, with its error as the reason.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec
import zmq

from longshore.protocol.errors import ConfigError, EngineDead, HandshakeRejected
from longshore.protocol.handshake import (
    Feature,
    FromWorker,
    Rejected,
    ToWorker,
    WorkerAccepted,
    WorkerHello,
    WorkerReady,
    check_identity,
)
from longshore.protocol.kv_cache_spec import (
    HeadShare,
    KVCacheConfig,
    check_holds_one_request,
)
from longshore.protocol.outputs import WorkerFailed
from longshore.protocol.transport.channel import Channel
from longshore.scheduler.config import SchedulerProcessConfig

WorkerChannel: TypeAlias = Channel[ToWorker, FromWorker]
Message = TypeVar("Message", WorkerHello, WorkerReady)


class AcceptedWorkers(NamedTuple):
    """What the ranks of the engine have agreed on.

    kv_cache: equal on all ranks except for its layers, here those of rank 0.
    features: those that all ranks support.
    rank_block_bytes: by rank, bytes that a block of the largest group needs.
    """

    kv_cache: KVCacheConfig
    features: frozenset[Feature]
    rank_block_bytes: tuple[int, ...]


def accept_workers(
    workers: Sequence[WorkerChannel],
    config: SchedulerProcessConfig,
    on_progress: Callable[[str], None] = lambda doing: None,
) -> AcceptedWorkers:
    """Compare all ranks, agree on the number of blocks, and wait until all are warmed up.

    workers: by rank. Waits without a timeout: the supervisor notices a rank that dies. Raises
    EngineDead if a rank fails, HandshakeRejected or ConfigError if one differs.
    """
    on_progress(_waiting_for(workers, "load the model"))
    hellos = _receive_from_all(workers, WorkerHello)
    try:
        for rank, hello in enumerate(hellos):
            if hello.rank != rank:
                raise HandshakeRejected(
                    f"rank {hello.rank} connected to the endpoint of rank {rank}"
                )
            check_identity(config.identity, hello.identity, peer=f"worker {rank}")
        kv_cache = _agree_on_blocks([hello.kv_cache for hello in hellos], config)
        _check_heads(hellos, num_shards=len(hellos) - config.sampling_rank)
    except (HandshakeRejected, ConfigError) as error:
        for worker in workers:
            worker.send(Rejected(str(error)))
        raise
    rank_block_bytes = tuple(hello.kv_cache.largest_block_bytes for hello in hellos)
    reply = WorkerAccepted(
        config.epoch,
        kv_cache.num_blocks,
        config.verify_plan,
        rank_block_bytes if config.kv_connector is not None else (),
    )
    for worker in workers:
        worker.send(reply)
    on_progress(_waiting_for(workers, "warm up"))
    _receive_from_all(workers, WorkerReady)
    return AcceptedWorkers(
        kv_cache,
        frozenset.intersection(*(frozenset(hello.features) for hello in hellos)),
        rank_block_bytes,
    )


def _waiting_for(workers: Sequence[WorkerChannel], what: str) -> str:
    who = "the worker" if len(workers) == 1 else f"{len(workers)} workers"
    return f"waiting for {who} to {what}"


def _receive_from_all(workers: Sequence[WorkerChannel], kind: type[Message]) -> list[Message]:
    """One message from each rank, by rank. Raises EngineDead if a rank sends another message. What
    a rank sends after it is ready is for the engine, and is not received here."""
    poller = zmq.Poller()
    for worker in workers:
        poller.register(worker.socket, zmq.POLLIN)
    received: dict[int, Message] = {}
    while len(received) < len(workers):
        poller.poll()
        for rank, worker in enumerate(workers):
            if kind is WorkerReady and rank in received:
                continue
            message = worker.receive()
            match message:
                case None:
                    continue
                case WorkerFailed():
                    raise EngineDead(f"worker {message.rank} failed: {message.reason}")
                case _ if isinstance(message, kind) and rank not in received:
                    received[rank] = message
                    if kind is WorkerReady:
                        poller.unregister(worker.socket)
                case _:
                    raise EngineDead(
                        f"worker {rank} sent {type(message).__name__} instead of {kind.__name__}"
                    )
    return [received[rank] for rank in range(len(workers))]


def _agree_on_blocks(
    offered: Sequence[KVCacheConfig], config: SchedulerProcessConfig
) -> KVCacheConfig:
    """The KV cache with the smallest number of blocks. Everything else must be equal, except for
    the layers of pipeline stages.

    Raises HandshakeRejected or ConfigError if ranks would interpret blocks differently.
    """
    first = offered[0]
    for rank, theirs in enumerate(offered):
        for field in ("dtype", "layout", "rotation"):
            _check_equal(field, (rank, getattr(theirs, field)), (0, getattr(first, field)))
        specs = [[group.spec for group in one.groups] for one in (theirs, first)]
        _check_equal("KV cache groups", (rank, specs[0]), (0, specs[1]))
    _check_layers(offered, num_shards=len(offered) - config.sampling_rank)
    for group in first.groups:
        if group.spec.block_size % config.cache.block_size:
            raise HandshakeRejected(
                f"the workers have blocks of {group.spec.block_size} tokens, which is not a "
                f"multiple of the scheduler's block_size={config.cache.block_size}. Start both "
                "with the same configuration."
            )
    num_blocks = min(one.num_blocks for one in offered)
    if config.cache.num_blocks is not None:
        num_blocks = min(num_blocks, config.cache.num_blocks)
    longest = config.scheduler.longest_request(config.cache.context_parallel_size)
    check_holds_one_request(first.groups, num_blocks, longest)
    return msgspec.structs.replace(first, num_blocks=num_blocks)


def _check_layers(offered: Sequence[KVCacheConfig], *, num_shards: int) -> None:
    """Check that the shards of a stage have the same layers in the same groups, and that each
    layer is in one stage and one group."""
    holders: dict[str, int] = {}
    for rank, theirs in enumerate(offered):
        layers = [group.layer_names for group in theirs.groups]
        first = rank - rank % num_shards
        if rank != first:
            others = [group.layer_names for group in offered[first].groups]
            _check_equal("layers", (rank, layers), (first, others))
            continue
        for name in chain.from_iterable(layers):
            if name in holders:
                raise HandshakeRejected(
                    f"workers {holders[name]} and {rank} both keep KV of {name}, or one keeps it "
                    "twice; a layer belongs to one pipeline stage and to one KV cache group. "
                    "Start all with the same configuration."
                )
            holders[name] = rank


def _check_heads(hellos: Sequence[WorkerHello], *, num_shards: int) -> None:
    """Check that each rank has the KV heads of its shard, and as many as its blocks."""
    total = hellos[0].heads.total
    for rank, hello in enumerate(hellos):
        expected = HeadShare.of_shard(rank % num_shards, num_shards, total)
        if hello.heads != expected:
            raise HandshakeRejected(
                f"worker {rank} has {hello.heads}, but the share of shard {rank % num_shards} of "
                f"{num_shards} is {expected}. Start all with the same configuration."
            )
        for group in hello.kv_cache.groups:
            num_heads = getattr(group.spec, "num_kv_heads", expected.count)
            if num_heads != expected.count:
                raise HandshakeRejected(
                    f"worker {rank} has {expected.count} KV heads, but its blocks of "
                    f"{type(group.spec).__name__} have {num_heads}. Start all with the same "
                    "configuration."
                )


def _check_equal(what: str, theirs: tuple[int, object], others: tuple[int, object]) -> None:
    """theirs, others: a rank and its value."""
    if theirs[1] != others[1]:
        raise HandshakeRejected(
            f"worker {theirs[0]} has {what} {theirs[1]}, but worker {others[0]} has {others[1]}; "
            "all ranks of an engine use the same block tables. Start all with the same "
            "configuration."
        )
