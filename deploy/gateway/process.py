"""The gateway process: startup, serving, shutdown.

It listens immediately, so that /health answers while the model loads, and accepts requests once the
engine is ready. On a stop signal it accepts no more requests and lets running ones finish within a
deadline.
"""

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import uvicorn
import uvloop
from prometheus_client import disable_created_metrics

from longshore.deploy.admin.actions import SOCKET_NAME
from longshore.deploy.gateway.admin_routes import AdminRoutes, AdminSocket
from longshore.deploy.gateway.api.endpoint import Service, Services
from longshore.deploy.gateway.api_keys import ApiKey
from longshore.deploy.gateway.app import Gateway
from longshore.deploy.gateway.batches.store import BatchStore
from longshore.deploy.gateway.config import GatewayConfig
from longshore.deploy.gateway.engines.member_commands import MemberCommands
from longshore.deploy.gateway.http.connection import BoundedConnection
from longshore.deploy.gateway.idle_sleep import IdleSleep
from longshore.deploy.gateway.key_usage import KeyUsage
from longshore.deploy.gateway.load_log import LoadLog
from longshore.deploy.gateway.request_log import AccessLog
from longshore.deploy.gateway.responses_api.store import ResponseStore
from longshore.deploy.gateway.served_model import ServedModel
from longshore.deploy.requests.tracing import open_spans
from longshore.deploy.supervisor.limits import connections_left
from longshore.deploy.supervisor.logs import set_up_logging
from longshore.deploy.supervisor.replica import Replica
from longshore.deploy.supervisor.restart_history import read_restarts
from longshore.deploy.supervisor.runtime_dir import read_death_note, read_progress_note
from longshore.protocol.commands import EngineMember
from longshore.protocol.errors import EngineDead, HandshakeRejected, LongshoreError
from longshore.protocol.handshake import EngineReady
from longshore.protocol.logs.records import fields
from longshore.protocol.settings import read_config
from longshore.protocol.transport.lifeline import (
    ALIVE_INTERVAL_S,
    Failed,
    Lifeline,
    Progress,
    Ready,
    stop_signals,
)

logger = logging.getLogger(__name__)

GRACE_S: Final = 1
CONNECT_TIMEOUT_S: Final = 8.0
"""How long an engine that was ready may take to answer this gateway."""
# Iterations of the event loop before the port is closed; accepting a connection and reading from it
# take one each.
LAST_ROUNDS: Final = 32


def main(argv: Sequence[str]) -> int:
    """Serve until a stop signal; returns the exit status."""
    (config_file,) = argv
    config = read_config(Path(config_file), GatewayConfig)
    set_up_logging(config.log_level, is_relayed=config.lifeline_fd is not None)
    disable_created_metrics()  # an unused timestamp per counter
    runtime_dir = None if config.runtime_dir is None else Path(config.runtime_dir)
    commands = MemberCommands()
    lifeline = Lifeline(config.lifeline_fd, runtime_dir, commands.take)
    try:
        uvloop.run(_serve(config, lifeline, commands))
    except LongshoreError as error:
        lifeline.report(Failed(str(error)))
        return 1
    except Exception as error:
        if not lifeline.report_limit(error):
            raise
        return 1
    return 0


async def _serve(config: GatewayConfig, lifeline: Lifeline, commands: MemberCommands) -> None:
    process = GatewayProcess(config)
    members = asyncio.create_task(
        commands.run(process.add_engine, process.remove_engine, process.use_keys, lifeline.report)
    )
    try:
        serving = asyncio.create_task(process.serve())
        ready = asyncio.create_task(process.start(lifeline))
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            alive = asyncio.create_task(_report_alive(lifeline))
            load = asyncio.create_task(process.load_log.run())
            history = asyncio.create_task(process.history.run())
            idle = [asyncio.create_task(each.run()) for each in process.idle_sleeps]
            await serving
            for task in (alive, load, history, *idle):
                task.cancel()
        else:
            ready.cancel()  # stopped before the engine was ready
            await serving
    finally:
        members.cancel()
        process.close()


async def _report_alive(lifeline: Lifeline) -> None:
    """Report from the loop that serves all requests, so that one that hangs is noticed."""
    while True:
        lifeline.report_alive()
        await asyncio.sleep(ALIVE_INTERVAL_S)


class GatewayProcess:
    """Everything that lives as long as the process."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        settings = config.settings
        supervisor = _supervisor(config)
        self._gateway = Gateway(
            config.models,
            self._not_ready_reason,
            report_timeout_s=config.report_timeout_s,
            number=config.number,
            peers=config.peers,
            api_keys=config.api_keys,
            admin=_admin_routes(config, supervisor),
            response_store=_response_store(config),
            allowed_hosts=config.allowed_hosts,
            cors_allow_origins=settings.cors_allow_origins or (),
            log=AccessLog(is_on=settings.access_log, has_probes=settings.access_log_probes),
            vllm_metrics=settings.metrics_names == "vllm",
            is_strict=settings.strict_requests,
            batch_store=_batch_store(config),
            batch_priority=config.batch_priority,
            server_settings=config.server_settings,
        )
        self._key_usage = KeyUsage(
            config.api_keys,
            self._gateway.metrics,
            number=config.number,
            num_gateways=max(1, len(config.peers)),
            memory_fd=config.key_usage_fd,
        )
        self._runtime_dir = None if config.runtime_dir is None else Path(config.runtime_dir)
        self._gateway.metrics.watch_restarts(partial(read_restarts, self._runtime_dir))
        self._gateway.lacking_knowledge = self._lacking_knowledge
        first, metrics = config.models[0], self._gateway.metrics
        self._spans = open_spans(config.otlp_traces_endpoint, first.name)
        self._models = [
            ServedModel(
                model,
                config,
                metrics if model is first else metrics.of_model(model.name),
                spans=self._spans,
                perform=None if supervisor is None else supervisor.is_done,
                why_stopped=partial(read_death_note, self._runtime_dir),
                why_lost=self._why_lost,
            )
            for model in config.models
        ]
        for further in self._models[1:]:
            further.metrics.watch_readiness(self._not_ready_reason)
        self._server = _Server(
            uvicorn.Config(
                self._gateway.app,
                http=partial(  # type: ignore[arg-type]  # uvicorn only calls it
                    BoundedConnection,
                    unread_timeout_s=settings.unread_timeout_s,
                    max_connections=self._max_connections,
                ),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,  # `AccessLog` logs more
                # `stop` ends running requests before this timeout, which is for clients that do not
                # read.
                timeout_graceful_shutdown=round(settings.drain_timeout_s) + GRACE_S,
                server_header=False,
            )
        )
        self._batches: asyncio.Task[None] | None = None
        self.history = self._gateway.history
        self.load_log = LoadLog(self._gateway.metrics.sample)

    async def start(self, lifeline: Lifeline) -> None:
        """Load the tokenizers, wait for the engines, then accept requests and report readiness."""
        config = self._config
        lifeline.report(Progress("loading the tokenizer"))
        for model in self._models:
            model.load_tokenizer()
        engines: list[EngineReady | None] = [None] * len(self._models)
        details = {"max_model_len": str(config.models[0].max_model_len)}
        if config.awaits_engines:
            lifeline.report(Progress("waiting for the scheduler"))
            engines = [await model.wait_until_ready() for model in self._models]
            if engines[0] is not None:
                details = _details(engines[0])
        services: list[Service] = []
        for model, engine in zip(self._models, engines, strict=True):
            first = services[0] if services else None
            services.append(model.service(engine, self._key_usage, first))
        self._gateway.serve_with(Services(services))
        # All present objects live as long as the process, so the garbage collector can skip them.
        gc.collect()
        gc.freeze()
        lifeline.report(Ready(details))

    @property
    def idle_sleeps(self) -> list[IdleSleep]:
        """Of the models whose engines sleep by themselves."""
        return [model.idle_sleep for model in self._models if model.idle_sleep is not None]

    async def add_engine(self, member: EngineMember) -> None:
        """Use another engine, and return when it is ready; do nothing if it is used. Raises
        EngineDead or HandshakeRejected; then it is not used."""
        model = self._models[0]  # the only one, if engines can be added
        clients = model.engines.clients
        if member.number in clients:
            return
        model.add_engine(member)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await clients[member.number].wait_until_ready()
        except (EngineDead, HandshakeRejected):
            self.remove_engine(member.number)
            raise
        except TimeoutError:
            self.remove_engine(member.number)
            raise EngineDead(
                f"engine {member.number} has not answered for {CONNECT_TIMEOUT_S:g} s"
            ) from None
        about = fields(engine=f"engine-{member.number}")
        logger.info("engine %d (%s) gets requests", member.number, member.role, extra=about)

    def remove_engine(self, engine: int) -> None:
        """Use an engine no more, if it is used. Raises ValueError if it is the only one of its
        model."""
        for model in self._models:
            if engine not in model.engines.clients:
                continue
            if len(model.engines) == 1:
                raise ValueError(f"engine {engine} is the only one")
            model.remove_engine(engine)
            about = fields(engine=f"engine-{engine}")
            logger.info("engine %d gets no more requests", engine, extra=about)

    def use_keys(self, path: Path) -> int:
        """Take the API keys of a file of the supervisor; returns their number. Running requests go
        on, also those of keys that are gone."""
        keys = msgspec.json.decode(path.read_bytes(), type=tuple[ApiKey, ...])
        self._key_usage.use(keys)
        self._gateway.use_keys(keys)
        logger.info("%d API keys are valid from now on", len(keys))
        return len(keys)

    def _max_connections(self) -> int:
        num_engines = sum(len(model.engines) for model in self._models)
        return connections_left(4 * num_engines + len(self._config.peers))

    async def serve(self) -> None:
        """Serve HTTP until a stop signal, and then until the running requests have finished."""
        loop = asyncio.get_running_loop()
        for signal_number in stop_signals(self._config.lifeline_fd):
            loop.add_signal_handler(signal_number, self.stop)
        await self._gateway.peers.listen()
        if self._gateway.batches is not None:
            self._batches = asyncio.create_task(self._gateway.batches.run())
        try:
            with socket.socket(fileno=self._config.listen_fd) as listener:
                listener.setblocking(False)
                await self._server.serve(sockets=[listener])
        finally:
            self._stop_batches()
            self._gateway.peers.close()
            self._gateway.log.close()

    def stop(self) -> None:
        """Accept no more requests, and end when the running ones have finished. If the supervisor
        has given up an engine, they have failed."""
        if self._server.should_exit:
            return
        death = read_death_note(self._runtime_dir)
        if death is not None:
            self._shut_down(f"the engine has stopped: {death}")
        logger.info(
            "draining: no new requests are accepted; %d are running",
            sum(model.engines.num_own_requests for model in self._models),
        )
        self._server.should_exit = True
        self._stop_batches()
        for model in self._models:
            model.engines.begin_drain()
        asyncio.get_running_loop().call_later(
            self._config.settings.drain_timeout_s, self._shut_down, "the server is shutting down"
        )

    def _shut_down(self, reason: str) -> None:
        for model in self._models:
            model.engines.shut_down(reason)

    def _stop_batches(self) -> None:
        """They go on with the next process."""
        if self._batches is not None:
            self._batches.cancel()

    def _why_lost(self, engine: int) -> str | None:
        return read_restarts(self._runtime_dir).deaths.get(Replica(engine).engine_id)

    def _not_ready_reason(self) -> str | None:
        deaths = [each.engines.death for each in self._models if each.engines.death is not None]
        if not self._gateway.is_serving and not deaths:
            progress = read_progress_note(self._runtime_dir)
            return "the engine is still starting" + (f": {progress}" if progress else "")
        for model in self._models:
            if (reason := model.not_ready_reason) is not None:
                return reason if len(self._models) == 1 else f"{model.config.name}: {reason}"
        return "draining" if self._server.should_exit else None

    def _lacking_knowledge(self) -> str | None:
        found = (model.routing.lacking_knowledge() for model in self._models)
        return next((each for each in found if each is not None), None)

    def close(self) -> None:
        for model in self._models:
            model.close()
        if self._spans is not None:
            self._spans.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process with the received signal.
    Connections in the listen queue at shutdown are answered, not reset."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for _ in range(LAST_ROUNDS):
            await asyncio.sleep(0)  # one iteration of the event loop
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _supervisor(config: GatewayConfig) -> AdminSocket | None:
    if config.runtime_dir is None:
        return None
    return AdminSocket(Path(config.runtime_dir) / f"{SOCKET_NAME}.sock")


def _admin_routes(config: GatewayConfig, supervisor: AdminSocket | None) -> AdminRoutes | None:
    if config.admin_key is None or supervisor is None:
        return None
    return AdminRoutes(config.admin_key, supervisor)


def _response_store(config: GatewayConfig) -> ResponseStore | None:
    if config.runtime_dir is None or not config.max_stored_bytes:
        return None
    return ResponseStore(
        Path(config.runtime_dir) / "responses",
        number=config.number,
        num_gateways=max(1, len(config.peers)),
        max_bytes=config.max_stored_bytes,
        ttl_s=config.settings.stored_response_ttl_s,
    )


def _batch_store(config: GatewayConfig) -> BatchStore | None:
    max_bytes = config.settings.stored_files_mib << 20
    if config.files_dir is None or not max_bytes:
        return None
    return BatchStore(
        Path(config.files_dir), max_bytes=max_bytes, ttl_s=config.settings.stored_file_ttl_s
    )


def _details(engine: EngineReady) -> dict[str, str]:
    return {
        "num_blocks": str(engine.num_blocks),
        "block_size": str(engine.identity.block_size),
        "max_model_len": str(engine.identity.max_model_len),
    }
