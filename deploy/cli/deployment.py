"""What a node runs: its settings, checked, and the processes to start."""

import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from longshore.deploy.admin.key import read_private_key
from longshore.deploy.admin.operations import GATEWAYS, NewEngine, Operations
from longshore.deploy.cli.options import MAX_PROCESSES, EngineOptions, ServeOptions
from longshore.deploy.gateway.api_keys import ApiKey, digest_of, plain_keys
from longshore.deploy.gateway.config import GatewayConfig
from longshore.deploy.gateway.engines.split_requests import SplitConfig
from longshore.deploy.gateway.key_file import read_key_file
from longshore.deploy.gateway.openai.transfer_params import TransferAccess
from longshore.deploy.gateway.router.config import PrefixRoutingConfig, RoutingConfig
from longshore.deploy.gateway.text.tokenizer import check_text_files
from longshore.deploy.machine.device import num_gpus, require_device
from longshore.deploy.model.folder import ModelFolder
from longshore.deploy.parsers.registry import load_parsers
from longshore.deploy.requests.audio import require_extra
from longshore.deploy.supervisor.connector_options import check_router_key
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
from longshore.deploy.supervisor.process import ProcessSpec
from longshore.deploy.supervisor.replica import Replica
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.supervisor.stop_signals import StopSignals
from longshore.deploy.supervisor.supervisor import Supervisor
from longshore.deploy.topology.node_plan import NodeEngine, NodePlan
from longshore.protocol.commands import EngineMember
from longshore.protocol.errors import ConfigError


def prepare(model: ModelFolder, node: NodePlan) -> "Deployment":
    """Raises ConfigError for everything that can be known before a process is started."""
    options = node.options
    if model.audio is not None:
        require_extra("soundfile", "soxr", "python_multipart")
    check_router_key(options, next(iter(node.pulls.values()), None))
    keys = _Keys()
    if node.num_gateways:
        check_text_files(model.path, options.chat_template)
        load_parsers(options.tool_call_parser, options.reasoning_parser, "")
        keys = _read_keys(options)
    plans = _plan_engines(model, node)
    plan = next(iter(plans.values()))
    if options.routing_policy == "prefix_aware" and not plan.cache.enable_prefix_caching:
        raise ConfigError(
            "routing_policy=prefix_aware: the tokens of this model attend to later ones, so no "
            "prefix can be reused. Use another policy."
        )
    _check_machine(node, plans)
    return Deployment(node, plans, plan, _engine_set(node, plan), keys)


@dataclass(frozen=True)
class _Keys:
    """Of the clients of the gateways."""

    api: tuple[ApiKey, ...] = ()
    admin: str | None = None
    router: str | None = None


def _read_keys(options: ServeOptions) -> _Keys:
    if options.api_key_file is not None:
        api = read_key_file(options.api_key_file, options.share_prefix_cache)
    else:
        api = plain_keys(options.api_key or (), options.share_prefix_cache)
    files = {name: getattr(options, name) for name in ("admin_key_file", "router_key_file")}
    admin, router = (
        None if path is None else read_private_key(path, name) for name, path in files.items()
    )
    return _Keys(api, admin, router)


def _plan_engines(model: ModelFolder, node: NodePlan) -> dict[EngineOptions, EnginePlan]:
    """The plans of all engines, by their settings; those of the node are first. Raises ConfigError
    if a gateway could not treat them as one."""
    every = dict.fromkeys((*(engine.options for engine in node.engines), *node.others))
    plans: dict[EngineOptions, EnginePlan] = {
        options: plan_engine(options, model, node.hash_seed) for options in every
    }
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


def _check_machine(node: NodePlan, plans: Mapping[EngineOptions, EnginePlan]) -> None:
    """Raise ConfigError if this host has not what the node needs."""
    _raise_file_limit(node, [engine.options for engine in node.engines])
    on_cpu = []
    for engine in node.engines:
        plan = plans[engine.options]
        check_address_space(plan.device)
        require_device(plan.device)
        if plan.device == "cpu":
            on_cpu.append(plan)
    if on_cpu:
        check_host_memory(on_cpu[0], len(on_cpu) * (1 + node.options.standby_workers))


def _raise_file_limit(node: NodePlan, engines: Iterable[EngineOptions]) -> None:
    num_copies = 1 + node.options.standby_workers
    num_processes = sum(engine.num_ranks * num_copies + 1 for engine in engines)
    raise_file_limit(num_processes + node.num_gateways, node.options.max_live_requests)


def _engine_set(node: NodePlan, plan: EnginePlan) -> EngineSet:
    if node.name is not None:  # the topology says which engines there are
        own = {replica.number for replica in node.replicas}
        elsewhere = [role for number, role in enumerate(node.roles) if number not in own]
        return EngineSet(node.replicas, elsewhere=elsewhere)
    gpus = num_gpus() if plan.device.startswith("cuda") else None
    return EngineSet(
        node.replicas,
        max_engines=1 if ":" in plan.device else MAX_PROCESSES,
        num_gpu_groups=None if gpus is None else gpus // plan.options.num_ranks,
    )


@dataclass(frozen=True)
class Deployment:
    """What is to run on a node.

    plans: of the engines, by their settings. plan: that of one of them, for the gateways.
    engines: those of the node, as an operator changes them.
    """

    node: NodePlan
    plans: Mapping[EngineOptions, EnginePlan]
    plan: EnginePlan
    engines: EngineSet
    keys: _Keys

    @property
    def api_keys(self) -> tuple[ApiKey, ...]:
        return self.keys.api

    def operations(self, supervisor: Supervisor, stop_signal: StopSignals) -> Operations:
        """What an operator can do with it."""
        is_fixed = self.node.name is not None
        return Operations(
            supervisor,
            self.engines,
            maker=None if is_fixed else _EngineMaker(self, supervisor.runtime_dir),
            stop=stop_signal.request,
            state_dir=self.plan.state_dir,
            drain_timeout_s=self.node.options.drain_timeout_s,
            start_timeout_s=self.node.options.startup_timeout_s,
        )

    def processes(
        self, runtime_dir: RuntimeDir, listeners: Sequence[socket.socket]
    ) -> list[ProcessSpec]:
        """In start order: schedulers need their workers, and gateways need the schedulers."""
        engines = [self.engine_processes(runtime_dir, engine) for engine in self.node.engines]
        key_usage_fd = runtime_dir.shared_memory("longshore-key-usage") if self.api_keys else None
        peers = tuple(
            str(runtime_dir.socket_path(f"gateway-{number}")) for number in range(len(listeners))
        )
        members = self._members(runtime_dir)
        return [
            *(worker for *workers, _ in engines for worker in workers),
            *(scheduler for *_, scheduler in engines),
            *(
                self._gateway(
                    number,
                    listener,
                    key_usage_fd=key_usage_fd,
                    members=members,
                    peers=peers,
                    config_after=partial(self._next_gateway, runtime_dir),
                )
                for number, listener in enumerate(listeners)
            ),
        ]

    def engine_processes(self, runtime_dir: RuntimeDir, engine: NodeEngine) -> list[ProcessSpec]:
        """Workers first and the scheduler last."""
        specs, _ = engine_processes(
            self.plans[engine.options],
            runtime_dir,
            engine.replica,
            sockets=engine.sockets,
            is_restarted=self.node.options.max_restarts > 0,
            num_standbys=self.node.options.standby_workers,
        )
        return specs

    def _members(self, runtime_dir: RuntimeDir) -> tuple[EngineMember, ...]:
        """The engines that gateways use now, by number: those of this node, and of the others."""
        own = {engine.replica.number for engine in self.node.engines}
        remote = self.node.remote
        used = {number: member for number, member in remote.items() if number not in own}
        for replica in self.engines.used:
            number = replica.number
            used[number] = remote.get(number) or self.member(runtime_dir, replica)
        return tuple(used[number] for number in sorted(used))

    def member(self, runtime_dir: RuntimeDir, replica: Replica) -> EngineMember:
        """An engine of this node, as gateways of the node see it."""
        options = self.node.options
        config = None
        if options.routing_policy == "prefix_aware":
            config = kv_events_config(options, runtime_dir, replica)
        return EngineMember(
            replica.number,
            replica.role,
            runtime_dir.endpoint(replica.file_name("clients")),
            None if config is None else event_source(config, runtime_dir),
        )

    def _next_gateway(self, runtime_dir: RuntimeDir, config: GatewayConfig) -> GatewayConfig:
        """For a restart: an engine may be restarting, too, and the others can serve."""
        members = self._members(runtime_dir)
        return msgspec.structs.replace(config, awaits_all_engines=False, members=members)

    def _routing(self, members: Sequence[EngineMember]) -> RoutingConfig:
        options, plan = self.node.options, self.plan
        prefix = None
        if options.routing_policy == "prefix_aware":
            prefix = PrefixRoutingConfig(
                events=tuple(member.events for member in members if member.events is not None),
                hash_seed=plan.hash_seed.hex(),
                hash_algorithm=plan.cache.hash_algorithm,
                tokens_per_hash=plan.cache.tokens_per_hash,
                max_hashes=options.routing_index_blocks,
            )
        return RoutingConfig(options.routing_policy, options.routing_session_header, prefix)

    def _split_config(self) -> SplitConfig:
        options = self.node.options
        return SplitConfig(
            min_tokens=options.disaggregation_min_tokens,
            max_waiting=options.disaggregation_max_waiting,
        )

    def _transfers(self) -> TransferAccess:
        pulls, key = self.node.pulls.values(), self.keys.router
        return TransferAccess(
            "" if key is None else digest_of(key.encode()),
            tuple(sorted({host for options in pulls for host in options.remote_hosts})),
        )

    def _gateway(
        self,
        number: int,
        listener: socket.socket,
        *,
        key_usage_fd: int | None,
        members: Sequence[EngineMember],
        peers: tuple[str, ...],
        config_after: Callable[[GatewayConfig], GatewayConfig],
    ) -> ProcessSpec:
        options, plan, model = self.node.options, self.plan, self.plan.model
        served_name, *aliases = options.served_model_name or (model.name,)
        config = GatewayConfig(
            model=str(model.path),
            served_model_name=served_name,
            model_aliases=tuple(aliases),
            model_fingerprint=plan.identity.model_fingerprint,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_model_len=plan.identity.max_model_len,
            sampling_defaults=model.sampling_defaults,
            engines=tuple(member.clients for member in members),
            roles=tuple(member.role for member in members),
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
            admin_key=self.keys.admin,
            api_keys=self.api_keys,
            key_usage_fd=key_usage_fd,
            # A page of another site cannot have this machine's own name.
            allowed_hosts=(*(options.allowed_hosts or ()), options.host, socket.gethostname()),
            cors_allow_origins=options.cors_allow_origins or (),
            max_stored_bytes=options.stored_responses_mib << 20,
            stored_response_ttl_s=options.stored_response_ttl_s,
            access_log=options.access_log,
            vllm_metrics=options.metrics_names == "vllm",
            strict_requests=options.strict_requests,
            routing=self._routing(members),
            split=self._split_config(),
            transfers=self._transfers(),
            drain_timeout_s=options.drain_timeout_s,
            unread_timeout_s=options.unread_timeout_s,
            seed=options.seed,
            log_level=options.log_level,
        )
        name = f"gateway {number}" if len(peers) > 1 else "gateway"
        return ProcessSpec(
            name,
            "longshore.deploy.gateway",
            config,
            environment=NO_BLAS_THREADS,
            pass_fds=tuple(fd for fd in (listener.fileno(), key_usage_fd) if fd is not None),
            stop_group=GATEWAYS,
            restart_group=name,
            config_after=config_after,
        )


@dataclass(frozen=True)
class _EngineMaker:
    """See EngineMaker."""

    deployment: Deployment
    runtime_dir: RuntimeDir

    def make_engine(self, replica: Replica) -> NewEngine:
        deployment, node = self.deployment, self.deployment.node
        options = deployment.plan.options
        _raise_file_limit(node, [options] * replica.count)
        check_host_memory(deployment.plan, 1 + node.options.standby_workers)
        member = deployment.member(self.runtime_dir, replica)
        specs = deployment.engine_processes(self.runtime_dir, NodeEngine(replica, node.options))
        return NewEngine(specs, member)

    def clean_up(self, replica: Replica, specs: Sequence[ProcessSpec]) -> None:
        self.runtime_dir.release_memory(fd for spec in specs for fd in spec.pass_fds)
        self.runtime_dir.remove_files(*engine_files(replica))
