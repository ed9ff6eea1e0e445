"""Startup of a worker process: join the other ranks, load weights, handshake, warm up, run."""

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
"""Epoch of a worker that the scheduler has not accepted yet."""


def serve(config: WorkerProcessConfig, lifeline: Lifeline) -> None:
    """Run one rank until its scheduler sends Shutdown.

    Raises LongshoreError for every error an operator can cause, after reporting it to the
    scheduler.
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
    logger.info("computing with %d threads", torch.get_num_threads())
    with ExitStack() as stack:
        with _reporting_failures(channel, config.rank, NO_EPOCH):
            device = open_device(config.device)
            if config.ranks.num_ranks > 1:
                others = config.ranks.num_ranks - 1
                lifeline.report(Progress(f"waiting for the other {others} ranks"))
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
    part = _part_description(parallel)
    lifeline.report(Progress(f"loading {part}{Path(config.model).name} on {config.device}"))
    with _reporting_failures(channel, config.rank, NO_EPOCH):
        worker = Worker(config.worker, parallel)
    with worker:
        accepted = _handshake(config, worker, lifeline, channel)
        if accepted is None:
            return
        lifeline.report(Progress("warming up"))
        with _reporting_failures(channel, config.rank, accepted.epoch):
            runner = worker.start(epoch=accepted.epoch, num_blocks=accepted.num_blocks)
            parallel.set_timeout(config.ranks.timeout_s)
        channel.send(WorkerReady(config.rank))
        lifeline.report(Ready(_details(config, worker, accepted)))
        # All objects so far live as long as the process; the garbage collector can skip them.
        gc.collect()
        gc.freeze()
        WorkerEngine(
            channel,
            runner,
            epoch=accepted.epoch,
            rank=config.rank,
            sends_outputs=parallel.samples,
            device_bytes=partial(held_bytes, device),
        ).run()


def _part_description(parallel: Parallel) -> str:
    """`shard 1 of 2, stage 2 of 2 of `; sizes of 1 are left out."""
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
def _reporting_failures(
    channel: Channel[FromWorker, ToWorker], rank: int, epoch: int
) -> Iterator[None]:
    """Report a failure in the block to the scheduler, which is waiting for this rank."""
    try:
        yield
    except LongshoreError as error:
        channel.send(WorkerFailed(epoch, rank, str(error), isinstance(error, RankLost)))
        raise


def _handshake(
    config: WorkerProcessConfig,
    worker: Worker,
    lifeline: Lifeline,
    channel: Channel[FromWorker, ToWorker],
) -> WorkerAccepted | None:
    """Send the hello and wait for the scheduler's answer. None: the engine shut down during
    startup. Raises HandshakeRejected or EngineDead."""
    # These describe what this rank has actually loaded.
    identity = msgspec.structs.replace(
        config.identity,
        model_fingerprint=model_fingerprint(Path(config.model)),
        decode_context_parallel_size=config.ranks.decode_context_parallel_size,
        cp_kv_cache_interleave_size=config.ranks.cp_kv_cache_interleave_size,
    )
    channel.send(WorkerHello(config.rank, identity, worker.kv_cache, worker.features))
    lifeline.report(Progress("loaded; waiting for the scheduler's handshake"))
    answer = channel.receive(config.startup_timeout_s)
    match answer:
        case WorkerAccepted():
            return answer
        case None:
            raise EngineDead(
                f"the scheduler did not answer within {config.startup_timeout_s:g} s. Check that "
                "it and all ranks are running. If they need longer, raise --startup-timeout-s."
            )
        case Shutdown():
            return None
        case Rejected(reason=reason):
            raise HandshakeRejected(reason)
        case _:
            raise HandshakeRejected(
                f"the scheduler answered the hello with {type(answer).__name__}"
            )


def _details(
    config: WorkerProcessConfig, worker: Worker, accepted: WorkerAccepted
) -> dict[str, str]:
    return {
        "device": config.device,
        "dtype": config.identity.dtype,
        "threads": str(torch.get_num_threads()),
        "num_blocks": str(accepted.num_blocks),
        "block_bytes": str(block_bytes(worker.kv_cache.groups)),
    }
