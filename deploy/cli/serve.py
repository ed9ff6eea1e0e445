"""`longshore serve`: runs engines and gateways, restarts those that die, until a stop signal."""

import logging
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import msgspec

from longshore.deploy.admin.key import read_admin_key
from longshore.deploy.admin.operations import Operations
from longshore.deploy.admin.server import AdminServer
from longshore.deploy.cli.options import ServeOptions
from longshore.deploy.cli.ready_message import (
    cache_sizes,
    model_line,
    node_ready_message,
    ready_lines,
    ready_message,
)
from longshore.deploy.gateway.api_keys import ApiKey, plain_keys
from longshore.deploy.gateway.config import GatewayConfig
from longshore.deploy.gateway.key_file import read_key_file
from longshore.deploy.gateway.router.config import PrefixRoutingConfig, RoutingConfig
from longshore.deploy.gateway.text.tokenizer import check_chat_template
from longshore.deploy.machine.device import require_device
from longshore.deploy.model.folder import ModelFolder
from longshore.deploy.parsers.registry import load_parsers
from longshore.deploy.requests.audio import require_extra
from longshore.deploy.supervisor.connector_options import with_pull_connector
from longshore.deploy.supervisor.engine_config import (
    NO_BLAS_THREADS,
    EnginePlan,
    engine_processes,
    plan_engine,
)
from longshore.deploy.supervisor.host_memory import check_host_memory
from longshore.deploy.supervisor.kv_events import event_source, kv_events_config
from longshore.deploy.supervisor.limits import check_address_space, raise_file_limit
from longshore.deploy.supervisor.listeners import bind, url_of
from longshore.deploy.supervisor.log_lines import LINE_FORMATS
from longshore.deploy.supervisor.process import STOP_TIMEOUT_S, ProcessSpec
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.supervisor.stop_signals import StopSignals
from longshore.deploy.supervisor.supervisor import StopRequested, Supervisor
from longshore.deploy.topology.node_plan import NodePlan, whole_deployment
from longshore.protocol.errors import ConfigError, EngineDead
from longshore.protocol.transport.channel import Endpoint

logger = logging.getLogger(__name__)


def serve(
    model: ModelFolder,
    options: ServeOptions,
    announce: Callable[[str], None] = print,
    node: NodePlan | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    node: what to start, of a deployment with a topology; it has the options, too.

    Raises ConfigError or StartFailed if the deployment cannot start, EngineDead if a process dies
    more often than it may be restarted.
    In every case all processes have ended and the runtime directory is removed on return.
    """
    deployment = _prepare(model, options, node)
    node, options = deployment.node, deployment.options
    with (
        StopSignals() as stop_signal,
        ExitStack() as port,
        Supervisor(RuntimeDir(), sys.stderr, LINE_FORMATS[options.log_format]) as supervisor,
        AdminServer(
            supervisor.runtime_dir, deployment.operations(supervisor, stop_signal)
        ) as admin,
    ):
        listeners = bind(options.host, options.port, node.num_gateways)
        for listener in listeners:
            port.enter_context(listener)
        url = url_of(listeners[0]) if listeners else None
        if url is None:
            logger.info("starting the engines of node %s", node.name)
        else:
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
        if node.engines:
            logger.info("%s", model_line(name, ready, node.replicas))
            logger.info("KV cache: %s", cache_sizes(ready, node.replicas))
        if url is None:
            announce(node_ready_message(str(node.name), name, ready, node.replicas))
        else:
            message = ready_message(url, name, ready, node.replicas, num_gateways=node.num_gateways)
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


def check(model: ModelFolder, node: NodePlan) -> None:
    """Raise what `serve` would raise before it starts a process."""
    _prepare(model, node.options, node)


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


def _prepare(model: ModelFolder, options: ServeOptions, node: NodePlan | None) -> "_Deployment":
    """Raises ConfigError for everything that can be known before a process is started."""
    if node is not None:
        options = node.options
    if model.audio is not None:
        require_extra("soundfile", "soxr", "python_multipart")
    api_keys: tuple[ApiKey, ...] = ()
    admin_key = None
    if node is None or node.num_gateways:
        check_chat_template(model.path, options.chat_template)
        api_keys = _api_keys(options)
        load_parsers(options.tool_call_parser, options.reasoning_parser, "")
        if options.admin_key_file is not None:
            admin_key = read_admin_key(options.admin_key_file)
    if options.scheduling_policy is None and options.api_key_file is not None and len(api_keys) > 1:
        options = replace(options, scheduling_policy="fair")
    if options.routing_policy == "prefix_aware" and len(options.roles) > 1:
        options = replace(options, enable_kv_cache_events=True)
    if options.prefill:
        options = with_pull_connector(options)
    node = node or whole_deployment(options)
    plans = _plans(model, node)
    plan = next(iter(plans.values()))
    if options.routing_policy == "prefix_aware" and not plan.cache.enable_prefix_caching:
        raise ConfigError(
            "routing_policy=prefix_aware: the tokens of this model attend to later ones, so no "
            "prefix can be reused. Use another policy."
        )
    num_copies = 1 + options.standby_workers
    num_workers = sum(engine.options.num_ranks for engine in node.engines) * num_copies
    num_processes = num_workers + len(node.engines) + node.num_gateways
    raise_file_limit(num_processes, options.max_live_requests)
    on_cpu = []
    for engine in node.engines:
        device = plans[engine.options].device
        check_address_space(device)
        require_device(device)
        if device == "cpu":
            on_cpu.append(plans[engine.options])
    if on_cpu:
        check_host_memory(on_cpu[0], len(on_cpu) * num_copies)
    return _Deployment(options, node, plans, plan, api_keys, admin_key)


def _plans(model: ModelFolder, node: NodePlan) -> dict[ServeOptions, EnginePlan]:
    """The plans of all engines, by their settings; those of the node are first. Raises ConfigError
    if a gateway could not treat them as one."""
    every = dict.fromkeys((*(engine.options for engine in node.engines), *node.others))
    plans = {options: plan_engine(options, model, node.hash_seed) for options in every}
    lengths = {plan.identity.max_model_len for plan in plans.values()}
    if len(lengths) > 1:
        raise ConfigError(
            f"the engines have different values of max_model_len ({_joined(lengths)}). Set "
            "max_model_len in [settings] of the topology."
        )
    sizes = {plan.cache.tokens_per_hash for plan in plans.values()}
    if node.options.routing_policy == "prefix_aware" and len(sizes) > 1:
        raise ConfigError(
            "routing_policy=prefix_aware: the engines have different numbers of tokens per block "
            f"hash ({_joined(sizes)}). Set hash_block_size in [settings] of the topology, to a "
            "common divisor of their block sizes."
        )
    return plans


def _joined(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _api_keys(options: ServeOptions) -> tuple[ApiKey, ...]:
    if options.api_key_file is not None:
        return read_key_file(options.api_key_file, options.share_prefix_cache)
    return plain_keys(options.api_key or (), options.share_prefix_cache)


@dataclass(frozen=True)
class _Deployment:
    """What is to run.

    plans: of the engines, by their settings. plan: that of one of them, for the gateways.
    """

    options: ServeOptions
    node: NodePlan
    plans: Mapping[ServeOptions, EnginePlan]
    plan: EnginePlan
    api_keys: tuple[ApiKey, ...]
    admin_key: str | None

    def operations(self, supervisor: Supervisor, stop_signal: StopSignals) -> Operations:
        """What an operator can do with it."""
        return Operations(
            supervisor,
            self.node.replicas,
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
            engine_processes(
                self.plans[engine.options],
                runtime_dir,
                engine.replica,
                sockets=engine.sockets,
                is_restarted=self.options.max_restarts > 0,
                num_standbys=self.options.standby_workers,
            )
            for engine in self.node.engines
        ]
        key_usage_fd = runtime_dir.shared_memory("longshore-key-usage") if self.api_keys else None
        peers = tuple(
            str(runtime_dir.socket_path(f"gateway-{number}")) for number in range(len(listeners))
        )
        own = {
            e.replica.number: clients
            for e, (_, clients) in zip(self.node.engines, engines, strict=True)
        }
        routing = self._routing(runtime_dir)
        return [
            *(worker for (*workers, _), _ in engines for worker in workers),
            *(scheduler for (*_, scheduler), _ in engines),
            *(
                self._gateway(
                    number,
                    listener,
                    key_usage_fd=key_usage_fd,
                    engines=self._clients(own),
                    peers=peers,
                    routing=routing,
                )
                for number, listener in enumerate(listeners)
            ),
        ]

    def _clients(self, own: Mapping[int, Endpoint]) -> tuple[Endpoint, ...]:
        """How gateways connect to all engines; `own` is how to those of this node."""
        remote = self.node.remote
        return tuple(
            remote[number].clients if number in remote else own[number]
            for number in range(len(self.node.roles))
        )

    def _routing(self, runtime_dir: RuntimeDir) -> RoutingConfig:
        options, plan, node = self.options, self.plan, self.node
        prefix = None
        sources = {number: remote.events for number, remote in node.remote.items()}
        for engine in node.engines:
            config = kv_events_config(engine.options, runtime_dir, engine.replica)
            if config is not None:
                sources.setdefault(engine.replica.number, event_source(config, runtime_dir))
        events = [sources[number] for number in sorted(sources)]
        if options.routing_policy == "prefix_aware" and len(events) > 1:
            prefix = PrefixRoutingConfig(
                events=tuple(events),
                hash_seed=plan.hash_seed.hex(),
                hash_algorithm=plan.cache.hash_algorithm,
                tokens_per_hash=plan.cache.tokens_per_hash,
                max_hashes=options.routing_index_blocks,
            )
        return RoutingConfig(options.routing_policy, options.routing_session_header, prefix)

    def _gateway(
        self,
        number: int,
        listener: socket.socket,
        *,
        key_usage_fd: int | None,
        engines: tuple[Endpoint, ...],
        peers: tuple[str, ...],
        routing: RoutingConfig,
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
            roles=self.node.roles,
            awaits_engines=not self.node.remote,
            number=number,
            peers=peers,
            num_elsewhere=self.node.num_gateways_elsewhere,
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
            stop_group="gateways",
            restart_group=f"gateway {number}" if options.gateways > 1 else "gateway",
            config_after=_next_gateway,
        )


def _next_gateway(config: GatewayConfig) -> GatewayConfig:
    """For a restart: an engine may be restarting, too, and the others can serve."""
    return msgspec.structs.replace(config, awaits_all_engines=False)
