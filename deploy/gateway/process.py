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
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import uvicorn
import uvloop
from prometheus_client import disable_created_metrics

from longshore.deploy.admin.actions import SOCKET_NAME
from longshore.deploy.gateway.admin_routes import AdminRoutes
from longshore.deploy.gateway.app import Gateway
from longshore.deploy.gateway.config import GatewayConfig
from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.engines.member_commands import MemberCommands
from longshore.deploy.gateway.engines.split_metrics import SplitMetrics
from longshore.deploy.gateway.http.connection import BoundedConnection
from longshore.deploy.gateway.key_usage import KeyUsage
from longshore.deploy.gateway.load_log import LoadLog
from longshore.deploy.gateway.openai.endpoint import Service
from longshore.deploy.gateway.openai.prompts import PromptReader
from longshore.deploy.gateway.openai.responses import Model
from longshore.deploy.gateway.responses_api.store import ResponseStore
from longshore.deploy.gateway.router.routing import Routing
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer, load_tokenizer
from longshore.deploy.parsers.answer import AnswerParsers
from longshore.deploy.parsers.registry import load_parsers
from longshore.deploy.requests.speech import SpeechModel
from longshore.deploy.supervisor.limits import connections_left
from longshore.deploy.supervisor.logs import set_up_logging
from longshore.deploy.supervisor.replica import Replica
from longshore.deploy.supervisor.restart_history import read_restarts
from longshore.deploy.supervisor.runtime_dir import read_death_note, read_progress_note
from longshore.protocol.commands import EngineMember
from longshore.protocol.errors import EngineDead, HandshakeRejected, LongshoreError
from longshore.protocol.handshake import ClientHello, EngineReady
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
    config = msgspec.json.decode(Path(config_file).read_bytes(), type=GatewayConfig)
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
        commands.run(process.add_engine, process.remove_engine, lifeline.report)
    )
    try:
        serving = asyncio.create_task(process.serve())
        ready = asyncio.create_task(process.start(lifeline))
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            alive = asyncio.create_task(_report_alive(lifeline))
            load = asyncio.create_task(process.load_log.run())
            await serving
            alive.cancel()
            load.cancel()
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
        model = Model(
            id=config.served_model_name,
            created=int(time.time()),
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
        )
        aliases = (msgspec.structs.replace(model, id=name) for name in config.model_aliases)
        self._gateway = Gateway(
            (model, *aliases),
            self._not_ready_reason,
            report_timeout_s=config.report_timeout_s,
            number=config.number,
            peers=config.peers,
            api_keys=config.api_keys,
            admin=_admin_routes(config),
            response_store=_response_store(config),
            allowed_hosts=config.allowed_hosts,
            cors_allow_origins=config.cors_allow_origins,
            access_log=config.access_log,
            vllm_metrics=config.vllm_metrics,
            is_strict=config.strict_requests,
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
        name = f"gateway {config.number}" if len(config.peers) > 1 else "gateway"
        hello = ClientHello(name=name, model_fingerprint=config.model_fingerprint)
        num_gateways = max(1, len(config.peers)) + config.num_elsewhere
        self._routing = Routing(
            config.routing,
            config.current_members,
            number=config.number,
            num_gateways=num_gateways,
        )
        self._gateway.metrics.watch(self._routing)
        self._gateway.lacking_knowledge = self._routing.lacking_knowledge
        self._engines = Engines(
            (),
            hello,
            router=self._routing.router,
            split_config=config.split,
            num_gateways=num_gateways,
            number=config.number,
            seed=config.seed,
            on_stats=self._gateway.metrics.observe_scheduler,
            on_ready=self._note_ready,
            why_stopped=partial(read_death_note, self._runtime_dir),
            why_lost=self._why_lost,
        )
        for member in config.current_members:
            self._engines.add_engine(member.number, member.clients)
        if any(member.role != "unified" for member in config.current_members):
            self._gateway.metrics.watch(SplitMetrics(self._engines.split))
        self._server = _Server(
            uvicorn.Config(
                self._gateway.app,
                http=partial(  # type: ignore[arg-type]  # uvicorn only calls it
                    BoundedConnection,
                    unread_timeout_s=config.unread_timeout_s,
                    max_connections=self._max_connections,
                ),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,  # `AccessLog` logs more
                # `stop` ends running requests before this timeout, which is for clients that do not
                # read.
                timeout_graceful_shutdown=round(config.drain_timeout_s) + GRACE_S,
                server_header=False,
            )
        )
        self.load_log = LoadLog(self._gateway.metrics.sample)
        self._tokenizer: ModelTokenizer | None = None

    async def start(self, lifeline: Lifeline) -> None:
        """Load the tokenizer, wait for the engine, then accept requests and report readiness."""
        config = self._config
        lifeline.report(Progress("loading the tokenizer"))
        self._tokenizer = tokenizer = load_tokenizer(
            Path(config.model),
            chat_template_file=None if config.chat_template is None else Path(config.chat_template),
            advice_level=logging.WARNING if config.generates_text else logging.DEBUG,
        )
        speech = None
        if config.audio is not None:
            speech = SpeechModel(
                Path(config.model),
                config.audio,
                tokenizer,
                vocab_size=config.vocab_size,
                max_model_len=config.max_model_len,
            )
        details = {"max_model_len": str(config.max_model_len)}
        if config.awaits_engines:
            lifeline.report(Progress("waiting for the scheduler"))
            engine = await self._engines.wait_until_ready(awaits_all=config.awaits_all_engines)
            await self._routing.wait_until_known()
            details = _details(engine)
        prompts = PromptReader(
            tokenizer,
            config.sampling_defaults,
            vocab_size=config.vocab_size,
            max_model_len=int(details["max_model_len"]),
            eos_token_ids=config.eos_token_ids,
        )
        self._gateway.serve_with(
            Service(
                config.served_model_name,
                self._engines,
                tokenizer,
                prompts,
                self._gateway.metrics,
                config.max_body_bytes,
                config.max_live_requests,
                self._key_usage,
                speech,
                config.max_audio_bytes,
                config.max_audio_s,
                config.embedding,
                config.classifier,
                transfers=config.transfers,
                parsers=_answer_parsers(config, tokenizer),
                has_score_template=config.chat_template is not None,
                model_aliases=config.model_aliases,
                session_header=(
                    config.routing.session_header
                    if config.routing.policy == "session_affinity"
                    else None
                ),
            )
        )
        # All present objects live as long as the process, so the garbage collector can skip them.
        gc.collect()
        gc.freeze()
        lifeline.report(Ready(details))

    async def add_engine(self, member: EngineMember) -> None:
        """Use another engine, and return when it is ready; do nothing if it is used. Raises
        EngineDead or HandshakeRejected; then it is not used."""
        if member.number in self._engines.clients:
            return
        self._routing.add_engine(member)
        self._engines.add_engine(member.number, member.clients)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._engines.clients[member.number].wait_until_ready()
        except (EngineDead, HandshakeRejected):
            self.remove_engine(member.number)
            raise
        except TimeoutError:
            self.remove_engine(member.number)
            raise EngineDead(
                f"engine {member.number} has not answered for {CONNECT_TIMEOUT_S:g} s"
            ) from None
        logger.info("engine %d (%s) gets requests", member.number, member.role)

    def remove_engine(self, engine: int) -> None:
        """Use an engine no more, if it is used. Raises ValueError if it is the only one."""
        if engine not in self._engines.clients:
            return
        if len(self._engines) == 1:
            raise ValueError(f"engine {engine} is the only one")
        self._routing.remove_engine(engine)
        self._engines.remove_engine(engine)
        self._gateway.metrics.remove_engine(str(engine))
        logger.info("engine %d gets no more requests", engine)

    def _max_connections(self) -> int:
        return connections_left(4 * len(self._engines) + len(self._config.peers))

    async def serve(self) -> None:
        """Serve HTTP until a stop signal, and then until the running requests have finished."""
        loop = asyncio.get_running_loop()
        for signal_number in stop_signals(self._config.lifeline_fd):
            loop.add_signal_handler(signal_number, self.stop)
        await self._gateway.peers.listen()
        try:
            with socket.socket(fileno=self._config.listen_fd) as listener:
                listener.setblocking(False)
                await self._server.serve(sockets=[listener])
        finally:
            self._gateway.peers.close()
            self._gateway.log.close()

    def stop(self) -> None:
        """Accept no more requests, and end when the running ones have finished. If the supervisor
        has given up an engine, they have failed."""
        if self._server.should_exit:
            return
        death = read_death_note(self._runtime_dir)
        if death is not None:
            self._engines.shut_down(f"the engine has stopped: {death}")
        logger.info(
            "draining: no new requests are accepted; %d are running",
            self._engines.num_own_requests,
        )
        self._server.should_exit = True
        self._engines.begin_drain()
        asyncio.get_running_loop().call_later(
            self._config.drain_timeout_s, self._engines.shut_down, "the server is shutting down"
        )

    def _note_ready(self, engine: int, is_ready: bool) -> None:
        self._routing.follow(engine, is_ready)
        if not is_ready:
            self._gateway.metrics.engine_lost(str(engine))

    def _why_lost(self, engine: int) -> str | None:
        return read_restarts(self._runtime_dir).deaths.get(Replica(engine).engine_id)

    def _not_ready_reason(self) -> str | None:
        if not self._gateway.is_serving and self._engines.death is None:
            progress = read_progress_note(self._runtime_dir)
            return "the engine is still starting" + (f": {progress}" if progress else "")
        if self._engines.not_ready_reason is not None:
            return self._engines.not_ready_reason
        return "draining" if self._server.should_exit else None

    def close(self) -> None:
        self._engines.close()
        self._routing.close()
        if self._tokenizer is not None:
            self._tokenizer.close()


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


def _admin_routes(config: GatewayConfig) -> AdminRoutes | None:
    if config.admin_key is None or config.runtime_dir is None:
        return None
    return AdminRoutes(config.admin_key, Path(config.runtime_dir) / f"{SOCKET_NAME}.sock")


def _response_store(config: GatewayConfig) -> ResponseStore | None:
    if config.runtime_dir is None or not config.max_stored_bytes:
        return None
    return ResponseStore(
        Path(config.runtime_dir) / "responses",
        number=config.number,
        num_gateways=max(1, len(config.peers)),
        max_bytes=config.max_stored_bytes,
        ttl_s=config.stored_response_ttl_s,
    )


def _answer_parsers(config: GatewayConfig, tokenizer: ModelTokenizer | None) -> AnswerParsers:
    template = "" if tokenizer is None else tokenizer.chat_template.source
    return load_parsers(config.tool_call_parser, config.reasoning_parser, template)


def _details(engine: EngineReady) -> dict[str, str]:
    return {
        "num_blocks": str(engine.num_blocks),
        "block_size": str(engine.identity.block_size),
        "max_model_len": str(engine.identity.max_model_len),
    }
