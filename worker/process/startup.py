"""Startup of a worker process: join the other ranks, load weights, handshake, warm up, run."""

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch

from longshore.connectors.base import EncoderWorker, WorkerConnector, WorkerConnectorConfig
from longshore.connectors.encoder_registry import load_encoder_worker
from longshore.connectors.registry import (
    check_worker_half,
    engine_fields,
    load_worker_connector,
    parse_options,
)
from longshore.protocol.errors import EngineDead, HandshakeRejected, LongshoreError
from longshore.protocol.handshake import (
    Feature,
    Rejected,
    WorkerAccepted,
    WorkerAsleep,
    WorkerHello,
    WorkerReady,
)
from longshore.protocol.outputs import WorkerFailed
from longshore.protocol.plan import BeginSleep, EndSleep, Shutdown
from longshore.protocol.transport.lifeline import (
    ALIVE_INTERVAL_S,
    Lifeline,
    Progress,
    Ready,
)
from longshore.worker.config import WorkerProcessConfig
from longshore.worker.errors import RankLost
from longshore.worker.kv_cache.buffer import KVMemory
from longshore.worker.kv_cache.plan import block_bytes
from longshore.worker.process.device import held_bytes, open_device
from longshore.worker.process.engine_loop import Bell, WorkerEngine
from longshore.worker.process.host_resources import default_threads
from longshore.worker.process.late_imports import import_all, imported_since
from longshore.worker.process.low_priority import at_low_priority
from longshore.worker.process.scheduler_link import SchedulerLink, SchedulerLost
from longshore.worker.ranks.last_plans import LastPlans
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
    with ExitStack() as stack:
        standby = None
        if config.is_standby:
            standby = _load(config, lifeline, stack)
            lifeline.report(Ready({"device": config.worker.device}))
            lifeline.wait_for_take_over()
            logger.info("takes the place of rank %d", config.rank)
        link = stack.enter_context(SchedulerLink(config.endpoint))
        with _reporting_failures(link, config.rank, NO_EPOCH):
            loaded = standby or _load(config, lifeline, stack)
        _serve(config, loaded, lifeline, link)


class _Loaded(NamedTuple):
    """What outlives a scheduler. fingerprint: of the model's folder when it was loaded. modules:
    that were imported for that."""

    device: torch.device
    parallel: Parallel
    worker: Worker
    fingerprint: str
    modules: frozenset[str]


def _load(config: WorkerProcessConfig, lifeline: Lifeline, stack: ExitStack) -> _Loaded:
    """Join the other ranks and load the weights; `stack` leaves the ranks and closes the worker."""
    num_threads, limit = default_threads(config.worker.num_ranks_on_device)
    torch.set_num_threads(config.worker.threads or num_threads)
    if limit is not None and config.worker.threads is None:
        logger.info("computing with %s", limit)
    else:
        logger.debug("computing with %d threads", torch.get_num_threads())
    device = open_device(config.worker.device)
    if config.ranks.num_ranks > 1:
        others = config.ranks.num_ranks - 1
        lifeline.report(Progress(f"waiting for the other {others} ranks"))
    parallel = stack.enter_context(joined_ranks(config.ranks, config.rank, device))
    lifeline.report(Progress(f"loading {_part(config, parallel)}"))
    if config.kv_connector is not None:
        check_worker_half(config.kv_connector)
    make = partial(Worker, config.worker, parallel)
    worker = stack.enter_context(at_low_priority(make) if config.is_standby else make())
    modules = frozenset(sys.modules)
    if config.late_imports:
        at_low_priority(partial(import_all, config.late_imports))
    fingerprint = config.worker.fingerprint(Path(config.worker.model))
    return _Loaded(device, parallel, worker, fingerprint, modules)


def _serve(
    config: WorkerProcessConfig, loaded: _Loaded, lifeline: Lifeline, link: SchedulerLink
) -> None:
    bell = Bell()
    while True:
        try:
            while _serve_epoch(config, loaded, lifeline, link, bell):
                if not _sleep(config, loaded, lifeline, link):
                    return
            return
        except SchedulerLost:
            logger.warning("the scheduler has ended; waiting for the next one")
        link.disconnect()  # if it was lost during the handshake
        loaded.worker.end_epoch()
        # Only now: until then the supervisor notices if this rank hangs.
        lifeline.report(Progress("waiting for the next scheduler"))
        link.connect()


def _serve_epoch(
    config: WorkerProcessConfig,
    loaded: _Loaded,
    lifeline: Lifeline,
    link: SchedulerLink,
    bell: Bell,
) -> bool:
    """Serve a scheduler until it shuts down, or this rank is to sleep (True). Raises SchedulerLost
    if it dies."""
    device, parallel, worker, _, modules = loaded
    accepted = _handshake(config, loaded, lifeline, link)
    if not isinstance(accepted, WorkerAccepted):
        return isinstance(accepted, BeginSleep)
    lifeline.report(Progress("warming up"))
    with _reporting_failures(link, config.rank, accepted.epoch):
        runner = worker.start(
            epoch=accepted.epoch,
            num_blocks=accepted.num_blocks,
            memory=_kv_memory(config, accepted),
            connector=_make_connector(config, worker, accepted),
            encoder_connector=_make_encoder_connector(config, worker, accepted),
            wake=bell.ring,
        )
        parallel.set_timeout(config.ranks.rank_timeout_s)
    if not gc.isenabled():  # what exists now lives as long as the process, or until it sleeps
        gc.freeze()
        gc.enable()
    link.channel.send(WorkerReady(config.rank))
    lifeline.report(Ready(_details(config, worker, accepted), imported_since(modules)))
    last_plans = None
    if parallel.num_ranks > 1:
        last_plans = LastPlans(
            parallel.store,
            rank=config.rank,
            num_ranks=parallel.num_ranks,
            epoch=accepted.epoch,
            timeout_s=config.ranks.rank_timeout_s,
        )
    return WorkerEngine(
        link,
        runner,
        epoch=accepted.epoch,
        rank=config.rank,
        bell=bell,
        sends_outputs=parallel.samples,
        connectors=worker.connectors,
        last_plans=last_plans,
        device_bytes=partial(held_bytes, device),
        report_alive=lifeline.report_alive,
        step_timeout_s=config.ranks.step_timeout_s,
    ).run()


def _sleep(
    config: WorkerProcessConfig, loaded: _Loaded, lifeline: Lifeline, link: SchedulerLink
) -> bool:
    """Free the device's memory and wait until the scheduler wakes this rank (True) or shuts down.
    Raises SchedulerLost, and HookFailed if a transfer may still use the memory."""
    lifeline.report(Progress("falling asleep"))
    gc.unfreeze()
    gc.disable()
    with _reporting_failures(link, config.rank, NO_EPOCH):
        loaded.worker.sleep()
    if config.kv_memory_fd is not None:
        KVMemory(config.kv_memory_fd, None).free()
    link.channel.send(WorkerAsleep(config.rank))
    logger.info("asleep: the memory of %s is free", loaded.device)
    lifeline.report(Ready({"state": "asleep"}))
    while True:
        lifeline.report_alive()
        match link.receive(ALIVE_INTERVAL_S):
            case None:
                pass
            case EndSleep():
                lifeline.report(Progress("waking up"))
                return True
            case Shutdown():
                return False
            case message:
                raise HandshakeRejected(
                    f"the scheduler sent {type(message).__name__} to a rank that sleeps"
                )


def _kv_memory(config: WorkerProcessConfig, accepted: WorkerAccepted) -> KVMemory | None:
    """Raises HandshakeRejected if the scheduler counts on blocks that this rank does not have."""
    if config.kv_memory_fd is not None:
        return KVMemory(config.kv_memory_fd, accepted.adopted_block_ids)
    if accepted.adopted_block_ids is not None:
        raise HandshakeRejected("the scheduler lets this rank adopt blocks, but it has no memory")
    return None


def _make_connector(
    config: WorkerProcessConfig, worker: Worker, accepted: WorkerAccepted
) -> WorkerConnector[Any] | None:
    """Raises ConfigError if the worker half cannot be built."""
    if config.kv_connector is None:
        return None
    fields = engine_fields(
        config.identity,
        msgspec.structs.replace(worker.kv_cache, num_blocks=accepted.num_blocks),
        options=parse_options(config.kv_connector_config),
        rank_block_bytes=accepted.rank_block_bytes,
        engine_id=config.engine_id,
        epoch=accepted.epoch,
    )
    return load_worker_connector(
        config.kv_connector,
        WorkerConnectorConfig(
            **fields,
            model_name=Path(config.worker.model).name,
            rank=config.rank,
            shared_memory_fd=config.shared_memory_fd,
            hidden_size=worker.model_config.hidden_size,
            state_dir=config.state_dir,
        ),
    )


def _make_encoder_connector(
    config: WorkerProcessConfig, worker: Worker, accepted: WorkerAccepted
) -> EncoderWorker[Any] | None:
    """Raises ConfigError if the worker half cannot be built."""
    transfer = config.ec_transfer
    if transfer is None:
        return None
    fields = {
        "options": parse_options(transfer.options, "--ec-connector-config"),
        "role": transfer.role,
        "num_ranks": config.ranks.num_ranks,
        "engine_id": f"{config.engine_id}.{accepted.epoch}",
        "identity": config.identity,
    }
    return load_encoder_worker(transfer.connector, worker.encoder_config(fields))


def _part(config: WorkerProcessConfig, parallel: Parallel) -> str:
    """`shard 1 of 2, stage 2 of 2 of MODEL on cpu`; sizes of 1 are left out."""
    parts = [
        f"{name} {index + 1} of {count}"
        for name, index, count in (
            ("shard", parallel.shard, parallel.num_shards),
            ("stage", parallel.stage, parallel.num_stages),
        )
        if count > 1
    ]
    part = ", ".join(parts) + " of " if parts else ""
    return f"{part}{Path(config.worker.model).name} on {config.worker.device}"


@contextmanager
def _reporting_failures(link: SchedulerLink, rank: int, epoch: int) -> Iterator[None]:
    """Report a failure in the block to the scheduler, which is waiting for this rank."""
    try:
        yield
    except LongshoreError as error:
        link.channel.send(WorkerFailed(epoch, rank, str(error), isinstance(error, RankLost)))
        raise


def _handshake(
    config: WorkerProcessConfig,
    loaded: _Loaded,
    lifeline: Lifeline,
    link: SchedulerLink,
) -> WorkerAccepted | BeginSleep | None:
    """Send the hello and wait for the scheduler's answer. None: the engine shut down during
    startup. Raises HandshakeRejected, EngineDead or SchedulerLost."""
    worker = loaded.worker
    # These describe what this rank has actually loaded.
    identity = msgspec.structs.replace(
        config.identity,
        model_fingerprint=loaded.fingerprint,
        decode_context_parallel_size=config.ranks.decode_context_parallel_size,
        cp_kv_cache_interleave_size=config.ranks.cp_kv_cache_interleave_size,
    )
    features = worker.features
    if config.kv_connector is not None:
        features = (*features, Feature.KV_CONNECTOR)
    if config.ec_transfer is not None:
        features = (*features, Feature.EC_CONNECTOR)
    with _reporting_failures(link, config.rank, NO_EPOCH):
        kv_cache = worker.kv_cache
    link.channel.send(
        WorkerHello(config.rank, identity, kv_cache, worker.heads, features, worker.routed_experts)
    )
    lifeline.report(Progress("loaded; waiting for the scheduler's handshake"))
    answer = link.receive(config.ranks.startup_timeout_s)
    match answer:
        case WorkerAccepted() | BeginSleep():
            return answer
        case None:
            raise EngineDead(
                f"the scheduler did not answer within {config.ranks.startup_timeout_s:g} s. Check "
                "that it and all ranks are running. If they need longer, raise --startup-timeout-s."
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
        "device": config.worker.device,
        "dtype": config.identity.dtype,
        "threads": str(torch.get_num_threads()),
        "num_blocks": str(accepted.num_blocks),
        "block_bytes": str(block_bytes(worker.kv_cache.groups)),
    }
