"""From a configuration to a serving worker: the other ranks, weights, handshake, cache, loop."""

import gc
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch
import zmq

from longshore.protocol.errors import EngineDead, HandshakeRejected, LongshoreError
from longshore.protocol.handshake import (
    FromWorker,
    Rejected,
    ToWorker,
    WorkerAccepted,
    WorkerHello,
    WorkerReady,
    model_fingerprint,
)
from longshore.protocol.outputs import WorkerFailed
from longshore.protocol.plan import Shutdown
from longshore.protocol.transport.channel import Channel, open_socket
from longshore.protocol.transport.lifeline import (
    Lifeline,
    Progress,
    Ready,
)
from longshore.worker.config import WorkerProcessConfig
from longshore.worker.errors import RankLost
from longshore.worker.kv_cache.plan import block_bytes
from longshore.worker.process.device import held_bytes, open_device
from longshore.worker.process.engine_loop import WorkerEngine
from longshore.worker.process.host_resources import num_physical_cores
from longshore.worker.ranks.parallel import Parallel
from longshore.worker.ranks.rendezvous import joined_ranks
from longshore.worker.worker import Worker

logger = logging.getLogger(__name__)

NO_EPOCH: Final = 0
"""Epoch of a worker that nobody has welcomed yet."""


def serve(config: WorkerProcessConfig, lifeline: Lifeline) -> None:
    """Run one rank until its scheduler says Shutdown.

    Raises LongshoreError for everything an operator can cause; the scheduler has been told.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel: Channel[FromWorker, ToWorker] = Channel(
        open_socket(context, zmq.DEALER, config.endpoint, bind=False), ToWorker
    )
    try:
        _serve(config, lifeline, channel)
    finally:
        channel.close()
        context.term()


def _serve(
    config: WorkerProcessConfig, lifeline: Lifeline, channel: Channel[FromWorker, ToWorker]
) -> None:
    torch.set_num_threads(
        config.threads or max(1, num_physical_cores() // config.num_ranks_on_device)
    )
    logger.info("%d threads compute", torch.get_num_threads())
    with ExitStack() as stack:
        with _telling_the_scheduler(channel, config.rank, NO_EPOCH):
            device = open_device(config.device)
            if config.ranks.num_ranks > 1:
                lifeline.report(Progress(f"meeting the other {config.ranks.num_ranks - 1} ranks"))
            parallel = stack.enter_context(
                joined_ranks(
                    config.ranks, config.rank, device, startup_timeout_s=config.startup_timeout_s
                )
            )
        _load_and_run(config, device, parallel, lifeline, channel)


def _load_and_run(
    config: WorkerProcessConfig,
    device: torch.device,
    parallel: Parallel,
    lifeline: Lifeline,
    channel: Channel[FromWorker, ToWorker],
) -> None:
    part = _part_of_the_model(parallel)
    lifeline.report(Progress(f"loading {part}{Path(config.model).name} on {config.device}"))
    with _telling_the_scheduler(channel, config.rank, NO_EPOCH):
        worker = Worker(config.worker, parallel)
    with worker:
        welcome = _shake_hands(config, worker, lifeline, channel)
        if welcome is None:
            return
        lifeline.report(Progress("warming up"))
        with _telling_the_scheduler(channel, config.rank, welcome.epoch):
            runner = worker.start(epoch=welcome.epoch, num_blocks=welcome.num_blocks)
            parallel.wait_at_most(config.ranks.timeout_s)
        channel.send(WorkerReady(config.rank))
        lifeline.report(Ready(_details(config, worker, welcome)))
        # What exists now lives as long as the process; the collector need not visit it.
        gc.collect()
        gc.freeze()
        WorkerEngine(
            channel,
            runner,
            epoch=welcome.epoch,
            rank=config.rank,
            answers=parallel.samples,
            device_bytes=partial(held_bytes, device),
        ).run()


def _part_of_the_model(parallel: Parallel) -> str:
    """`shard 1 of 2, stage 2 of 2 of `, as far as there are several."""
    parts = [
        f"{name} {index + 1} of {count}"
        for name, index, count in (
            ("shard", parallel.shard, parallel.num_shards),
            ("stage", parallel.stage, parallel.num_stages),
        )
        if count > 1
    ]
    return ", ".join(parts) + " of " if parts else ""


@contextmanager
def _telling_the_scheduler(
    channel: Channel[FromWorker, ToWorker], rank: int, epoch: int
) -> Iterator[None]:
    """A failure inside is the scheduler's news too: it waits for this rank."""
    try:
        yield
    except LongshoreError as error:
        channel.send(WorkerFailed(epoch, rank, str(error), isinstance(error, RankLost)))
        raise


def _shake_hands(
    config: WorkerProcessConfig,
    worker: Worker,
    lifeline: Lifeline,
    channel: Channel[FromWorker, ToWorker],
) -> WorkerAccepted | None:
    """None: the engine is shut down before it began. Raises HandshakeRejected or EngineDead."""
    # What this rank has loaded and does, wherever the configuration came from.
    identity = msgspec.structs.replace(
        config.identity,
        model_fingerprint=model_fingerprint(Path(config.model)),
        decode_context_parallel_size=config.ranks.decode_context_parallel_size,
        cp_kv_cache_interleave_size=config.ranks.cp_kv_cache_interleave_size,
    )
    channel.send(WorkerHello(config.rank, identity, worker.kv_cache, worker.features))
    lifeline.report(Progress("loaded; waiting for the scheduler's welcome"))
    answer = channel.receive(config.startup_timeout_s)
    match answer:
        case WorkerAccepted():
            return answer
        case None:
            raise EngineDead(
                f"the scheduler did not answer within {config.startup_timeout_s:g} s; is it "
                "running, and do all ranks come up? If they need longer, raise --startup-timeout-s."
            )
        case Shutdown():
            return None
        case Rejected(reason=reason):
            raise HandshakeRejected(reason)
        case _:
            raise HandshakeRejected(f"the scheduler began with {type(answer).__name__}")


def _details(
    config: WorkerProcessConfig, worker: Worker, welcome: WorkerAccepted
) -> dict[str, str]:
    return {
        "device": config.device,
        "dtype": config.identity.dtype,
        "threads": str(torch.get_num_threads()),
        "num_blocks": str(welcome.num_blocks),
        "block_bytes": str(block_bytes(worker.kv_cache.groups)),
    }
