"""The workers' handshake: all ranks are compared, and then all get the same reply.

WorkerHello from all ranks -> WorkerAccepted to all -> WorkerReady from all; in an engine that
sleeps, BeginSleep takes the place of WorkerAccepted, and WorkerAsleep that of WorkerReady. Ranks
may connect in any order. The first one that fails ends the startup, with its error as the reason.
When all workers are replaced later, or wake up, the handshake is the same, beside the engine's
other work.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import msgspec
import zmq

from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import ConfigError, EngineDead, HandshakeRejected
from longshore.protocol.handshake import (
    Feature,
    FromWorker,
    Rejected,
    ToWorker,
    WorkerAccepted,
    WorkerAsleep,
    WorkerHello,
    WorkerReady,
    check_identity,
)
from longshore.protocol.kv_cache_spec import (
    DRAFT_PREFIX,
    HeadShare,
    KVCacheConfig,
    check_holds_one_request,
)
from longshore.protocol.outputs import ModelRunnerOutput, TransferReport, WorkerFailed
from longshore.protocol.plan import BeginSleep
from longshore.protocol.routed_experts import RoutedExpertsShape
from longshore.protocol.statistics import WorkerStats
from longshore.protocol.transport.channel import Channel
from longshore.scheduler.config import SchedulerProcessConfig

logger = logging.getLogger(__name__)

WorkerChannel: TypeAlias = Channel[ToWorker, FromWorker]


class AcceptedWorkers(NamedTuple):
    """What the ranks of the engine have agreed on.

    kv_cache: equal on all ranks except for its layers, here those of rank 0.
    features: those that all ranks support.
    rank_block_bytes: by rank, bytes that a block of the largest group needs.
    routed_experts: what the sampling rank writes into the memory of experts; None: nothing.
    """

    kv_cache: KVCacheConfig
    features: frozenset[Feature]
    rank_block_bytes: tuple[int, ...]
    routed_experts: RoutedExpertsShape | None


class WorkerHandshake:
    """The handshake with one set of workers, which `receive` advances.

    former: what the workers before them had agreed on; the new ones must be like them, and get as
            many blocks. None: they are the first, and everything unexpected is an error.
    adopted_block_ids: see WorkerAccepted.
    sleeps: the ranks are to sleep instead of serving.
    accepted: what the ranks have agreed on, once all have sent their hellos.
    early:  (rank, message) that ranks have sent when they were ready and others were not.
    """

    def __init__(
        self,
        workers: Sequence[WorkerChannel],
        config: SchedulerProcessConfig,
        *,
        epoch: int,
        former: AcceptedWorkers | None = None,
        adopted_block_ids: Int32Array | None = None,
        sleeps: bool = False,
        on_progress: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self._workers = workers
        self._config = config
        self._epoch = epoch
        self._former = former
        self._adopted_block_ids = adopted_block_ids
        self.sleeps = sleeps
        self._on_progress = on_progress
        self._hellos: dict[int, WorkerHello] = {}
        self._answered: set[int] = set()
        self._ready: set[int] = set()
        self.accepted: AcceptedWorkers | None = None
        self.early: list[tuple[int, FromWorker]] = []
        on_progress(_waiting_for(workers, "load the model"))

    @property
    def is_over(self) -> bool:
        """All ranks are warmed up, or asleep."""
        return len(self._ready) == len(self._workers)

    def is_ready(self, rank: int) -> bool:
        """Whether this rank is warmed up, or asleep."""
        return rank in self._ready

    def receive(self, rank: int, message: FromWorker) -> None:
        """Advance by one message. Raises HandshakeRejected or ConfigError if ranks differ from each
        other, from the configuration or from the former workers, EngineDead if a rank fails."""
        match message:
            case WorkerHello() if self._former is not None or rank not in self._hellos:
                self._hellos[rank] = message  # a second one is of the rank's next process
                self._answered.discard(rank)
                self._ready.discard(rank)
                if len(self._hellos) == len(self._workers):
                    self._answer()
            case WorkerReady() if rank in self._answered and not self.sleeps:
                self._ready.add(rank)
            case WorkerAsleep() if rank in self._answered and self.sleeps:
                self._ready.add(rank)
            case WorkerFailed() if self._former is None:
                raise EngineDead(f"worker {message.rank} failed: {message.reason}")
            case WorkerFailed():  # the supervisor notices it, too
                logger.warning("worker %d failed: %s", message.rank, message.reason)
            case ModelRunnerOutput() | TransferReport() | WorkerStats() if (
                self._former is not None or message.epoch < self._epoch
            ):
                if rank in self._ready and message.epoch == self._epoch:
                    self.early.append((rank, message))
                # Else of a former worker, or to a former scheduler: ZeroMQ may connect again before
                # the rank has noticed that it is gone.
            case WorkerReady() if self._former is not None:
                logger.info("dropped a late message of a former worker %d", rank)
            case WorkerAsleep() if rank not in self._answered:
                logger.info("dropped a late message of worker %d", rank)
            case _:
                expected = WorkerReady if rank in self._answered else WorkerHello
                raise EngineDead(
                    f"worker {rank} sent {type(message).__name__} instead of {expected.__name__}"
                )

    def _answer(self) -> None:
        """Accept or reject all ranks."""
        try:
            self.accepted = self._compare()
        except (HandshakeRejected, ConfigError) as error:
            self._send(Rejected(str(error)))
            raise
        if self.sleeps:
            self._send(BeginSleep())
            self._on_progress(_waiting_for(self._workers, "sleep"))
            return
        self._send(
            WorkerAccepted(
                self._epoch,
                self.accepted.kv_cache.num_blocks,
                self._config.verify_plan,
                self.accepted.rank_block_bytes if self._config.kv_connector is not None else (),
                self._adopted_block_ids,
            )
        )
        self._on_progress(_waiting_for(self._workers, "warm up"))

    def _send(self, reply: WorkerAccepted | BeginSleep | Rejected) -> None:
        """Send to all ranks that have no answer yet. One that is gone again is replaced."""
        for rank, worker in enumerate(self._workers):
            if rank not in self._answered:
                with contextlib.suppress(EngineDead):
                    worker.send(reply)
                self._answered.add(rank)

    def _compare(self) -> AcceptedWorkers:
        hellos, config = [self._hellos[rank] for rank in range(len(self._workers))], self._config
        for rank, hello in enumerate(hellos):
            if hello.rank != rank:
                raise HandshakeRejected(
                    f"rank {hello.rank} connected to the endpoint of rank {rank}"
                )
            check_identity(config.identity, hello.identity, peer=f"worker {rank}")
        kv_cache = _agree_on_blocks([hello.kv_cache for hello in hellos], config)
        _check_heads(hellos, num_shards=len(hellos) - config.sampling_rank)
        accepted = AcceptedWorkers(
            kv_cache,
            frozenset.intersection(*(frozenset(hello.features) for hello in hellos)),
            tuple(hello.kv_cache.largest_block_bytes for hello in hellos),
            hellos[config.sampling_rank].routed_experts,
        )
        return accepted if self._former is None else _like_former(accepted, self._former)


def accept_workers(
    workers: Sequence[WorkerChannel],
    config: SchedulerProcessConfig,
    on_progress: Callable[[str], None] = lambda doing: None,
) -> AcceptedWorkers:
    """Compare all ranks, agree on the number of blocks, and wait until all are ready, or asleep.

    workers: by rank. Waits without a timeout: the supervisor notices a rank that dies. Raises
    EngineDead if a rank fails, HandshakeRejected or ConfigError if one differs. What a rank sends
    after it is ready is for the engine, and is not received here.
    """
    handshake = WorkerHandshake(
        workers, config, epoch=config.epoch, sleeps=config.is_asleep, on_progress=on_progress
    )
    poller = zmq.Poller()
    for worker in workers:
        poller.register(worker.socket, zmq.POLLIN)
    while not handshake.is_over:
        poller.poll()
        for rank, worker in enumerate(workers):
            if handshake.is_ready(rank) or (message := worker.receive()) is None:
                continue
            handshake.receive(rank, message)
            if handshake.is_ready(rank):
                poller.unregister(worker.socket)
    assert handshake.accepted is not None
    return handshake.accepted


def _waiting_for(workers: Sequence[WorkerChannel], what: str) -> str:
    who = "the worker" if len(workers) == 1 else f"{len(workers)} workers"
    return f"waiting for {who} to {what}"


def _like_former(accepted: AcceptedWorkers, former: AcceptedWorkers) -> AcceptedWorkers:
    """The new workers get as many blocks as the former ones, whose memory they take over. Raises
    HandshakeRejected if they differ in anything else: the scheduler was made for the former."""
    num_blocks = former.kv_cache.num_blocks
    accepted = accepted._replace(
        kv_cache=msgspec.structs.replace(accepted.kv_cache, num_blocks=num_blocks)
    )
    for field, theirs, others in zip(accepted._fields, accepted, former, strict=True):
        if theirs != others:
            raise HandshakeRejected(
                f"the restarted workers have {field} {theirs}, but the former ones had {others}. "
                "Was the model's folder changed? Restart the deployment."
            )
    return accepted


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
    """Check that each rank has the KV heads of its shard, and as many as its blocks, unless these
    are of a drafter."""
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
            is_of_drafter = all(name.startswith(DRAFT_PREFIX) for name in group.layer_names)
            if num_heads != expected.count and not is_of_drafter:
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
