"""From a configuration to a running engine: sockets, the workers' handshake, the block pool."""

import asyncio
import logging
from pathlib import Path

import msgspec
import zmq

from longshore.connectors.base import ConnectorConfig, SchedulerConnector
from longshore.connectors.registry import load_scheduler_connector, parse_options
from longshore.protocol.channel import Channel, ServerChannel, close_context, open_socket
from longshore.protocol.errors import ConfigError, HandshakeRefused
from longshore.protocol.handshake import (
    Feature,
    FromWorker,
    Refused,
    ToClient,
    ToEngine,
    ToWorker,
    Welcome,
    WorkerHello,
    WorkerReady,
    check_identity,
)
from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.protocol.lifeline import Lifeline, Progress, Ready
from longshore.protocol.results import WorkerFailed
from longshore.scheduler.config import SchedulerProcessConfig
from longshore.scheduler.engine import Engine, EngineError
from longshore.scheduler.scheduler import Scheduler, check_pool_size

logger = logging.getLogger(__name__)


def serve(config: SchedulerProcessConfig, lifeline: Lifeline) -> None:
    """Run the engine until it is told to stop.

    Raises LongshoreError for everything an operator can cause.
    """
    if len(config.workers) != 1:
        raise ConfigError(
            f"{len(config.workers)} workers were configured; this version runs one worker per "
            "engine (no tensor or pipeline parallelism yet)"
        )
    if config.cache.enable_kv_cache_events:
        raise ConfigError("enable_kv_cache_events: this version publishes no events; leave it off")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker: Channel[ToWorker, FromWorker] = Channel(
        open_socket(context, zmq.DEALER, config.workers[0], bind=True), FromWorker
    )
    try:
        lifeline.report(Progress("waiting for the worker to load the model"))
        hello, kv_cache = welcome_worker(worker, config)
        if config.scheduler.num_speculative_tokens and Feature.DRAFTS not in hello.features:
            raise ConfigError(
                f"num_speculative_tokens={config.scheduler.num_speculative_tokens}: worker "
                f"{hello.rank} proposes and verifies no drafts. Set it to 0."
            )
        scheduler = Scheduler(
            config.scheduler,
            config.cache,
            kv_cache=kv_cache,
            hash_seed=bytes.fromhex(config.hash_seed),
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            epoch=config.epoch,
            verify_plan=config.verify_plan,
            features=frozenset(hello.features),
            connector=_load_connector(config, hello, kv_cache),
        )
        clients: ServerChannel[ToClient, ToEngine] = ServerChannel(
            open_socket(context, zmq.ROUTER, config.clients, bind=True), ToEngine
        )
        tokens = (kv_cache.num_blocks - 1) * config.cache.block_size
        lifeline.report(
            Ready({"num_blocks": str(kv_cache.num_blocks), "kv_cache_tokens": str(tokens)})
        )
        logger.info("ready: %d blocks, %d tokens fit", kv_cache.num_blocks, tokens)
        try:
            _run(Engine(config, scheduler, worker, clients))
        finally:
            clients.close()
    finally:
        worker.close()
        close_context(context)


def welcome_worker(
    worker: Channel[ToWorker, FromWorker], config: SchedulerProcessConfig
) -> tuple[WorkerHello, KVCacheConfig]:
    """The handshake: compare, agree on the number of blocks, wait until the worker is warm."""
    hello = worker.receive(timeout_s=None)
    if isinstance(hello, WorkerFailed):
        raise EngineError(f"worker {hello.rank} failed: {hello.reason}")
    if not isinstance(hello, WorkerHello):
        raise EngineError(f"a worker began with {type(hello).__name__} instead of WorkerHello")
    try:
        check_identity(config.identity, hello.identity, peer=f"worker {hello.rank}")
        kv_cache = _agree_on_blocks(hello.kv_cache, config)
    except (HandshakeRefused, ConfigError) as error:
        worker.send(Refused(str(error)))
        raise
    worker.send(Welcome(config.epoch, kv_cache.num_blocks, config.verify_plan))
    ready = worker.receive(timeout_s=None)
    if isinstance(ready, WorkerFailed):
        raise EngineError(f"worker {ready.rank} failed: {ready.reason}")
    if not isinstance(ready, WorkerReady):
        raise EngineError(f"a worker said {type(ready).__name__} instead of WorkerReady")
    return hello, kv_cache


def _load_connector(
    config: SchedulerProcessConfig, hello: WorkerHello, kv_cache: KVCacheConfig
) -> SchedulerConnector | None:
    """Raises ConfigError without a worker half: blocks would count as loaded that nobody fills."""
    if config.kv_connector is None:
        return None
    connector = load_scheduler_connector(
        config.kv_connector,
        ConnectorConfig(
            parse_options(config.kv_connector_config),
            block_size=config.cache.block_size,
            num_blocks=kv_cache.num_blocks,
            num_groups=len(kv_cache.groups),
            num_ranks=len(config.workers),
            engine_id=f"{config.engine_id}.{config.epoch}",
        ),
    )
    if Feature.KV_CONNECTOR not in hello.features:
        raise ConfigError(
            f"--kv-connector {config.kv_connector}: worker {hello.rank} has no connector half to "
            "move its blocks; this version's workers have none. Start without --kv-connector."
        )
    return connector


def _agree_on_blocks(offered: KVCacheConfig, config: SchedulerProcessConfig) -> KVCacheConfig:
    wanted = config.cache.num_blocks
    num_blocks = offered.num_blocks if wanted is None else min(wanted, offered.num_blocks)
    for group in offered.groups:
        if group.spec.block_size != config.cache.block_size:
            raise HandshakeRefused(
                f"the worker has blocks of {group.spec.block_size} tokens, the scheduler of "
                f"{config.cache.block_size}"
            )
    agreed = msgspec.structs.replace(offered, num_blocks=num_blocks)
    check_pool_size(config.scheduler, agreed)
    return agreed


def _run(engine: Engine) -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(engine.run())


def load_config(path: Path) -> SchedulerProcessConfig:
    """Raises ConfigError for a file that is not a scheduler's configuration."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SchedulerProcessConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}") from error
