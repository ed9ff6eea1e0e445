"""`longshore serve`: runs engines and gateways, restarts those that die, until a stop signal."""

import logging
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from longshore.connectors.pull.options import PullOptions
from longshore.deploy.admin.key import read_private_key
from longshore.deploy.admin.operations import GATEWAYS, NewEngine, Operations
from longshore.deploy.admin.server import AdminServer
from longshore.deploy.cli.options import MAX_PROCESSES, ServeOptions
from longshore.deploy.cli.ready_message import (
    cache_sizes,
    model_line,
    ready_lines,
    ready_message,
)
from longshore.deploy.gateway.api_keys import ApiKey, digest_of, plain_keys
from longshore.deploy.gateway.config import GatewayConfig
from longshore.deploy.gateway.engines.split_requests import SplitConfig
from longshore.deploy.gateway.key_file import read_key_file
from longshore.deploy.gateway.openai.transfer_params import TransferAccess
from longshore.deploy.gateway.router.config import PrefixRoutingConfig, RoutingConfig
from longshore.deploy.gateway.text.tokenizer import check_chat_template
from longshore.deploy.machine.device import num_gpus, require_device
from longshore.deploy.model.folder import ModelFolder
from longshore.deploy.parsers.registry import load_parsers
from longshore.deploy.requests.audio import require_extra
from longshore.deploy.supervisor.connector_options import (
    check_router_key,
    pull_options,
    with_pull_connector,
)
from longshore.deploy.supervisor.engine_config import (
    NO_BLAS_THREADS,
    EnginePlan,
    engine_files,
    engine_processes,
    plan_engine,
)
from longshore.deploy.supervisor.engine_set import EngineSet
from longshore.deploy.supervisor.host_memory import check_host_memory
from longshore.deploy.supervisor.kv_events import event_source, kv_events_config
from longshore.deploy.supervisor.limits import check_address_space, raise_file_limit
from longshore.deploy.supervisor.listeners import bind, url_of
from longshore.deploy.supervisor.log_lines import LINE_FORMATS
from longshore.deploy.supervisor.process import STOP_TIMEOUT_S, ProcessSpec
from longshore.deploy.supervisor.replica import Replica, replicas
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.supervisor.stop_signals import StopSignals
from longshore.deploy.supervisor.supervisor import StopRequested, Supervisor
from longshore.protocol.commands import EngineMember
from longshore.protocol.errors import ConfigError, EngineDead
from longshore.protocol.transport.channel import Endpoint

logger = logging.getLogger(__name__)


def serve(
    model: ModelFolder, options: ServeOptions, announce: Callable[[str], None] = print
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    Raises ConfigError or StartFailed if the deployment cannot start, EngineDead if a process dies
    more often than it may be restarted.
    In every case all processes have ended and the runtime directory is removed on return.
    """
    deployment = _prepare(model, options)
    with (
        StopSignals() as stop_signal,
        ExitStack() as port,
        Supervisor(RuntimeDir(), sys.stderr, LINE_FORMATS[options.log_format]) as supervisor,
        AdminServer(
            supervisor.runtime_dir, deployment.operations(supervisor, stop_signal)
        ) as admin,
    ):
        listeners = bind(options.host, options.port, options.gateways)
        for listener in listeners:
            port.enter_context(listener)
        url = url_of(listeners[0])
        logger.info("starting at %s (/ready shows the progress)", url)
        logger.debug("`longshore admin` uses the socket %s", admin.path)
        specs = deployment.processes(supervisor.runtime_dir, listeners)
        try:
            ready = supervisor.start(
                specs, timeout_s=options.startup_timeout_s, stop_signal=stop_signal
            )
        except StopRequested:
            logger.info("stopped before startup was complete")
            return
        name, *_ = options.served_model_name or (model.name,)
        engines = replicas(options.roles)
        logger.info("%s", model_line(name, ready, engines))
        logger.info("KV cache: %s", cache_sizes(ready, engines))
        message = ready_message(url, name, ready, engines, num_gateways=options.gateways)
        for line in ready_lines(
            url, message, can_chat=model.can_chat, needs_key=bool(deployment.api_keys)
        ):
            announce(line)
        death = supervisor.keep_running(
            max_restarts=options.max_restarts,
            start_timeout_s=options.startup_timeout_s,
            stop_signal=stop_signal,
            hang_timeout_s=options.hang_timeout_s,
        )
        port.close()  # held for a restarted gateway; now the gateways close it when they drain
        if death is not None:
            supervisor.stop_now(death)
            raise EngineDead(f"{death} All other processes have been stopped; restart the server.")
        _drain(supervisor, stop_signal, options.drain_timeout_s)
    logger.info("stopped")


def _drain(supervisor: Supervisor, stop_signal: StopSignals, timeout_s: float) -> None:
    """Finish running requests, then stop all processes. Raises EngineDead if some were killed."""
    stop_signal.clear()  # a second signal aborts the draining
    logger.info(
        "stopping: running requests have %.0f s to finish; press Ctrl-C again to abort them",
        timeout_s,
    )
    is_clean = supervisor.stop(timeout_s + STOP_TIMEOUT_S, stop_signal)
    if not is_clean and not stop_signal.is_set():
        raise EngineDead("some processes did not stop cleanly; see the log lines above.")


def _prepare(model: ModelFolder, options: ServeOptions) -> "_Deployment":
    """Raises ConfigError for everything that can be known before a process is started."""
    if model.audio is not None:
        require_extra("soundfile", "soxr", "python_multipart")
    check_chat_template(model.path, options.chat_template)
    api_keys = _api_keys(options)
    if options.scheduling_policy is None and options.api_key_file is not None and len(api_keys) > 1:
        options = replace(options, scheduling_policy="fair")
    if options.routing_policy == "prefix_aware":
        options = replace(options, enable_kv_cache_events=True)
    if options.prefill:
        options = with_pull_connector(options)
    plan = plan_engine(options, model)
    if options.routing_policy == "prefix_aware" and not plan.cache.enable_prefix_caching:
        raise ConfigError(
            "routing_policy=prefix_aware: the tokens of this model attend to later ones, so no "
            "prefix can be reused. Use another policy."
        )
    load_parsers(options.tool_call_parser, options.reasoning_parser, "")
    key_file = options.admin_key_file
    admin_key = None if key_file is None else read_private_key(key_file, "admin_key_file")
    pull = pull_options(options.kv_connector, options.kv_connector_config)
    check_router_key(options, pull)
    router_key = None
    if options.router_key_file is not None:
        router_key = read_private_key(options.router_key_file, "router_key_file")
    num_engines = len(options.roles)
    raise_file_limit(_num_processes(options, num_engines), options.max_live_requests)
    check_address_space(plan.device)
    require_device(plan.device)
    check_host_memory(plan, num_engines * (1 + options.standby_workers))
    gpus = num_gpus() if plan.device.startswith("cuda") else None
    engines = EngineSet(
        replicas(options.roles),
        max_engines=1 if ":" in plan.device else MAX_PROCESSES,
        num_gpu_groups=None if gpus is None else gpus // options.num_ranks,
    )
    return _Deployment(options, plan, engines, api_keys, admin_key, router_key, pull)


def _num_processes(options: ServeOptions, num_engines: int) -> int:
    num_workers = options.num_ranks * (1 + options.standby_workers)
    return num_engines * (num_workers + 1) + options.gateways


def _api_keys(options: ServeOptions) -> tuple[ApiKey, ...]:
    if options.api_key_file is not None:
        return read_key_file(options.api_key_file, options.share_prefix_cache)
    return plain_keys(options.api_key or (), options.share_prefix_cache)


@dataclass(frozen=True)
class _Deployment:
    """What is to run."""

    options: ServeOptions
    plan: EnginePlan
    engines: EngineSet
    api_keys: tuple[ApiKey, ...]
    admin_key: str | None
    router_key: str | None
    pull: PullOptions | None

    def operations(self, supervisor: Supervisor, stop_signal: StopSignals) -> Operations:
        """What an operator can do with it."""
        return Operations(
            supervisor,
            self.engines,
            maker=_EngineMaker(self, supervisor.runtime_dir),
            stop=stop_signal.request,
            state_dir=self.plan.state_dir,
            drain_timeout_s=self.options.drain_timeout_s,
            start_timeout_s=self.options.startup_timeout_s,
        )

    def processes(
        self, runtime_dir: RuntimeDir, listeners: Sequence[socket.socket]
    ) -> list[ProcessSpec]:
        """In start order: schedulers need their workers, and gateways need the schedulers."""
        engines = [
            self.engine_processes(runtime_dir, replica) for replica in replicas(self.options.roles)
        ]
        key_usage_fd = runtime_dir.shared_memory("longshore-key-usage") if self.api_keys else None
        peers = tuple(
            str(runtime_dir.socket_path(f"gateway-{number}")) for number in range(len(listeners))
        )
        clients = tuple(clients for _, clients in engines)
        routing = self._routing(runtime_dir)
        return [
            *(worker for (*workers, _), _ in engines for worker in workers),
            *(scheduler for (*_, scheduler), _ in engines),
            *(
                self._gateway(
                    number,
                    listener,
                    key_usage_fd=key_usage_fd,
                    engines=clients,
                    peers=peers,
                    routing=routing,
                    config_after=partial(self._next_gateway, runtime_dir),
                )
                for number, listener in enumerate(listeners)
            ),
        ]

    def engine_processes(
        self, runtime_dir: RuntimeDir, replica: Replica
    ) -> tuple[list[ProcessSpec], Endpoint]:
        return engine_processes(
            self.plan,
            runtime_dir,
            replica,
            is_restarted=self.options.max_restarts > 0,
            num_standbys=self.options.standby_workers,
        )

    def member(self, runtime_dir: RuntimeDir, replica: Replica) -> EngineMember:
        """The engine as gateways see it."""
        config = None
        if self.options.routing_policy == "prefix_aware":
            config = kv_events_config(self.options, runtime_dir, replica)
        return EngineMember(
            replica.number,
            replica.role,
            runtime_dir.endpoint(replica.file_name("clients")),
            None if config is None else event_source(config, runtime_dir),
        )

    def _next_gateway(self, runtime_dir: RuntimeDir, config: GatewayConfig) -> GatewayConfig:
        """For a restart: an engine may be restarting, too, and the others can serve."""
        members = tuple(self.member(runtime_dir, replica) for replica in self.engines.used)
        return msgspec.structs.replace(config, awaits_all_engines=False, members=members)

    def _routing(self, runtime_dir: RuntimeDir) -> RoutingConfig:
        options, plan = self.options, self.plan
        prefix = None
        events = [
            event_source(config, runtime_dir)
            for replica in replicas(options.roles)
            if (config := kv_events_config(options, runtime_dir, replica)) is not None
        ]
        if options.routing_policy == "prefix_aware":
            prefix = PrefixRoutingConfig(
                events=tuple(events),
                hash_seed=plan.hash_seed.hex(),
                hash_algorithm=plan.cache.hash_algorithm,
                tokens_per_hash=plan.cache.tokens_per_hash,
                max_hashes=options.routing_index_blocks,
            )
        return RoutingConfig(options.routing_policy, options.routing_session_header, prefix)

    def _split_config(self) -> SplitConfig:
        return SplitConfig(
            min_tokens=self.options.disaggregation_min_tokens,
            max_waiting=self.options.disaggregation_max_waiting,
        )

    def _gateway(
        self,
        number: int,
        listener: socket.socket,
        *,
        key_usage_fd: int | None,
        engines: tuple[Endpoint, ...],
        peers: tuple[str, ...],
        routing: RoutingConfig,
        config_after: Callable[[GatewayConfig], GatewayConfig],
    ) -> ProcessSpec:
        options, plan, model = self.options, self.plan, self.plan.model
        name, *aliases = options.served_model_name or (model.name,)
        config = GatewayConfig(
            model=str(model.path),
            served_model_name=name,
            model_aliases=tuple(aliases),
            model_fingerprint=plan.identity.model_fingerprint,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_model_len=plan.identity.max_model_len,
            sampling_defaults=model.sampling_defaults,
            engines=engines,
            roles=options.roles,
            number=number,
            peers=peers,
            listen_fd=listener.fileno(),
            chat_template=None if options.chat_template is None else str(options.chat_template),
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
            max_body_bytes=options.max_body_mib << 20,
            embedding=model.embedding,
            classifier=model.classifier,
            audio=model.audio,
            max_audio_bytes=options.max_audio_mib << 20,
            max_audio_s=options.max_audio_s,
            max_live_requests=options.max_live_requests,
            admin_key=self.admin_key,
            api_keys=self.api_keys,
            key_usage_fd=key_usage_fd,
            cors_allow_origins=options.cors_allow_origins or (),
            max_stored_bytes=options.stored_responses_mib << 20,
            stored_response_ttl_s=options.stored_response_ttl_s,
            access_log=options.access_log,
            vllm_metrics=options.metrics_names == "vllm",
            strict_requests=options.strict_requests,
            routing=routing,
            split=self._split_config(),
            transfers=TransferAccess(
                "" if self.router_key is None else digest_of(self.router_key.encode()),
                () if self.pull is None else self.pull.remote_hosts,
            ),
            drain_timeout_s=options.drain_timeout_s,
            unread_timeout_s=options.unread_timeout_s,
            seed=options.seed,
            log_level=options.log_level,
        )
        return ProcessSpec(
            f"gateway {number}" if options.gateways > 1 else "gateway",
            "longshore.deploy.gateway",
            config,
            environment=NO_BLAS_THREADS,
            pass_fds=tuple(fd for fd in (listener.fileno(), key_usage_fd) if fd is not None),
            stop_group=GATEWAYS,
            restart_group=f"gateway {number}" if options.gateways > 1 else "gateway",
            config_after=config_after,
        )


@dataclass(frozen=True)
class _EngineMaker:
    """See EngineMaker."""

    deployment: _Deployment
    runtime_dir: RuntimeDir

    def make_engine(self, replica: Replica) -> NewEngine:
        options, plan = self.deployment.options, self.deployment.plan
        num_processes = _num_processes(options, replica.count)
        raise_file_limit(num_processes, options.max_live_requests)
        check_host_memory(plan, 1 + options.standby_workers)
        member = self.deployment.member(self.runtime_dir, replica)
        specs, _ = self.deployment.engine_processes(self.runtime_dir, replica)
        return NewEngine(specs, member)

    def clean_up(self, replica: Replica, specs: Sequence[ProcessSpec]) -> None:
        self.runtime_dir.release_memory(fd for spec in specs for fd in spec.pass_fds)
        self.runtime_dir.remove_files(*engine_files(replica))
