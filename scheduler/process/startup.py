"""Startup of the scheduler process: sockets, workers, connector, clients, loop."""

import asyncio
import logging
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import uvloop
import zmq

from longshore.connectors.base import (
    ConnectorConfig,
    EncoderConnector,
    EncoderConnectorConfig,
    SchedulerConnector,
)
from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import Feature, FromWorker, ToClient, ToEngine
from longshore.protocol.kv_cache_spec import KVCacheConfig, tokens_that_fit
from longshore.protocol.transport.channel import Channel, ServerChannel, close_context, open_socket
from longshore.protocol.transport.lifeline import Lifeline, Progress, Ready
from longshore.scheduler.config import SchedulerProcessConfig
from longshore.scheduler.features.routed_experts import RoutedExpertsReader
from longshore.scheduler.features.tool_calls import load_decoder
from longshore.scheduler.inspect.trace import SchedulerTrace
from longshore.scheduler.process.engine_loop import Engine
from longshore.scheduler.process.kv_event_publisher import EventPublisher, EventSockets
from longshore.scheduler.process.structured_output.client import GrammarProcess
from longshore.scheduler.process.trace_file import open_trace
from longshore.scheduler.process.worker_handshake import (
    AcceptedWorkers,
    WorkerChannel,
    accept_workers,
)
from longshore.scheduler.recorder.recorder import RecordedScheduler, Recorder
from longshore.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


def serve(config: SchedulerProcessConfig, lifeline: Lifeline) -> None:
    """Run the engine until it is stopped. Raises LongshoreError for errors that an operator can
    cause."""
    with ExitStack() as stack:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(close_context, context)
        event_sockets = None
        if config.kv_events is not None:
            event_sockets = stack.enter_context(
                closing(EventSockets.open(context, config.kv_events))
            )
        workers: list[WorkerChannel] = []
        for endpoint in config.workers:
            worker_socket = open_socket(context, zmq.DEALER, endpoint, bind=True)
            workers.append(stack.enter_context(closing(Channel(worker_socket, FromWorker))))
        # Gateways connect while the workers are awaited; what they send waits for the engine.
        client_socket = open_socket(
            context,
            zmq.ROUTER,
            config.clients,
            bind=True,
            detects_silence=config.clients.address.startswith("tcp://"),
        )
        clients: ServerChannel[ToClient, ToEngine] = ServerChannel(client_socket, ToEngine)
        stack.enter_context(closing(clients))
        accepted = accept_workers(
            workers, config, on_progress=lambda doing: lifeline.report(Progress(doing))
        )
        grammars = None
        if config.structured_output is not None:
            grammars = stack.enter_context(closing(GrammarProcess(config, context)))
        trace = None
        if config.trace_path is not None:
            opened = open_trace(Path(config.trace_path), config.engine_id, config.trace_bytes)
            if opened is not None:
                trace, trace_file = opened
                stack.callback(trace_file.close)
        recorder = None
        if config.record is not None:
            recorder = Recorder(Path(config.record), config.record_bytes)
            stack.enter_context(closing(recorder))
        scheduler = _make_scheduler(config, accepted, grammars, trace, recorder)
        events = None
        if config.kv_events is not None and event_sockets is not None:
            events = EventPublisher(
                event_sockets,
                config.kv_events,
                accepted.kv_cache,
                context_parallel_size=config.cache.context_parallel_size,
            )
        lifeline.report(_ready(config, accepted.kv_cache))
        engine = Engine(
            config,
            scheduler,
            workers,
            clients,
            lifeline,
            accepted,
            events=events,
            grammars=grammars,
            recorder=recorder,
        )
        lifeline.handle_commands(engine.command)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(engine.run())


def _make_scheduler(
    config: SchedulerProcessConfig,
    accepted: AcceptedWorkers,
    grammars: GrammarProcess | None,
    trace: SchedulerTrace | None,
    recorder: Recorder | None,
) -> Scheduler:
    num_drafts = config.scheduler.num_speculative_tokens
    if num_drafts and Feature.DRAFTS not in accepted.features:
        raise ConfigError(
            f"num_speculative_tokens={num_drafts}, but the workers do not support drafts. Set it "
            "to 0."
        )
    settings: dict[str, Any] = dict(
        kv_cache=accepted.kv_cache,
        hash_seed=bytes.fromhex(config.hash_seed),
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        epoch=config.epoch,
        verify_plan=config.verify_plan,
        features=accepted.features,
        connector=_load_connector(config, accepted),
        encoder_connector=_load_encoder_connector(config, accepted),
        grammars=grammars,
        num_ranks=len(config.workers),
        experts=_experts(config, accepted),
        decode=load_decoder(config.scheduler.policy, config.tokenizer_file),
        trace=trace,
    )
    if recorder is None:
        return Scheduler(config.scheduler, config.cache, **settings)
    return RecordedScheduler(config.scheduler, config.cache, recorder=recorder, **settings)


def _experts(
    config: SchedulerProcessConfig, accepted: AcceptedWorkers
) -> RoutedExpertsReader | None:
    """Raises ConfigError if only the scheduler was started with the setting."""
    if config.routed_experts_fd is None:
        return None
    if accepted.routed_experts is None:
        raise ConfigError(
            "--enable-return-routed-experts: rank 0 was started without it, so nothing would write "
            "the experts. Start scheduler and workers with the same settings."
        )
    return RoutedExpertsReader(config.routed_experts_fd, accepted.routed_experts, accepted.kv_cache)


def _ready(config: SchedulerProcessConfig, kv_cache: KVCacheConfig) -> Ready:
    """The size of the KV cache, which the start's log shows."""
    num_sharing = config.cache.context_parallel_size
    longest = config.scheduler.longest_request(num_sharing)
    tokens = tokens_that_fit(kv_cache.groups, kv_cache.num_blocks, longest)
    block_sizes = sorted({group.spec.block_size * num_sharing for group in kv_cache.groups})
    logger.debug("ready: %d blocks, which hold %d tokens", kv_cache.num_blocks, tokens)
    return Ready(
        {
            "num_blocks": str(kv_cache.num_blocks),
            "block_sizes": " or ".join(f"{size:,}" for size in block_sizes),
            "kv_cache_tokens": str(tokens),
        }
    )


def _load_connector(
    config: SchedulerProcessConfig, accepted: AcceptedWorkers
) -> SchedulerConnector | None:
    """Raises ConfigError if the connector cannot be loaded, or if a worker has none."""
    if config.kv_connector is None:
        return None
    # Imported only now: together with what it imports, it takes a tenth of the start.
    from longshore.connectors.registry import (
        engine_fields,
        load_scheduler_connector,
        parse_options,
    )

    if Feature.KV_CONNECTOR not in accepted.features:
        raise ConfigError(
            f"--kv-connector {config.kv_connector}: a worker was started without it, so nothing "
            "would move its blocks. Start scheduler and workers with the same --kv-connector."
        )
    fields = engine_fields(
        config.identity,
        accepted.kv_cache,
        options=parse_options(config.kv_connector_config),
        rank_block_bytes=accepted.rank_block_bytes,
        engine_id=config.engine_id,
        epoch=config.epoch,
    )
    fields["hash_block_size"] = config.cache.tokens_per_hash
    fields["publishes_events"] = config.kv_events is not None
    return load_scheduler_connector(config.kv_connector, ConnectorConfig(**fields))


def _load_encoder_connector(
    config: SchedulerProcessConfig, accepted: AcceptedWorkers
) -> EncoderConnector | None:
    """Raises ConfigError if the connector cannot be loaded, or if a worker has none."""
    transfer = config.ec_transfer
    if transfer is None:
        return None
    from longshore.connectors.encoder_registry import load_encoder_connector
    from longshore.connectors.registry import parse_options

    if Feature.EC_CONNECTOR not in accepted.features:
        raise ConfigError(
            f"--ec-connector {transfer.connector}: a worker was started without it, so nothing "
            "would move encoder outputs. Start scheduler and workers with the same --ec-connector."
        )
    return load_encoder_connector(
        transfer.connector,
        EncoderConnectorConfig(
            options=parse_options(transfer.options, "--ec-connector-config"),
            role=transfer.role,
            num_ranks=len(config.workers),
            engine_id=f"{config.engine_id}.{config.epoch}",
            identity=config.identity,
        ),
    )
