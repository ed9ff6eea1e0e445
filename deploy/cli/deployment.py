"""What a node runs: its settings, checked, and the processes to start."""

import logging
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeAlias

import msgspec

from longshore.deploy.admin.key import read_private_key
from longshore.deploy.admin.operations import GATEWAYS, NewEngine, Operations
from longshore.deploy.batch.lines import LEAST_URGENT
from longshore.deploy.gateway.api.transfer_params import TransferAccess
from longshore.deploy.gateway.api_keys import ApiKey, digest_of, plain_keys
from longshore.deploy.gateway.config import GatewayConfig, ModelConfig
from longshore.deploy.gateway.key_file import DeploymentKeys, read_key_file
from longshore.deploy.gateway.router.config import PrefixRoutingConfig, RoutingConfig
from longshore.deploy.gateway.settings import GatewaySettings, SplitSettings
from longshore.deploy.gateway.text.tokenizer import check_text_files, load_tokenizer
from longshore.deploy.machine.device import num_gpus, require_device
from longshore.deploy.model.folder import ModelFolder
from longshore.deploy.parsers.registry import load_parsers
from longshore.deploy.requests.audio import require_extra
from longshore.deploy.requests.speech import SpeechModel
from longshore.deploy.settings.options import MAX_PROCESSES, EngineOptions, ServeOptions
from longshore.deploy.settings.shown import shown_settings
from longshore.deploy.supervisor.connector_options import check_router_key
from longshore.deploy.supervisor.engine_config import engine_files, engine_processes
from longshore.deploy.supervisor.engine_plan import EnginePlan, check_host, plan_engine
from longshore.deploy.supervisor.engine_set import EngineSet
from longshore.deploy.supervisor.fork_server import NO_BLAS_THREADS
from longshore.deploy.supervisor.host_memory import check_host_memory
from longshore.deploy.supervisor.kv_events import event_source, kv_events_config
from longshore.deploy.supervisor.limits import check_address_space, raise_file_limit
from longshore.deploy.supervisor.process import ProcessSpec
from longshore.deploy.supervisor.replica import Replica
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.supervisor.state_dir import reasoning_key
from longshore.deploy.supervisor.stop_signals import StopSignals
from longshore.deploy.supervisor.supervisor import Supervisor
from longshore.deploy.topology.node_plan import NodeEngine, NodePlan
from longshore.protocol.commands import EngineMember
from longshore.protocol.errors import ConfigError
from longshore.protocol.settings import part_of


def prepare(models: Sequence[ModelFolder], node: NodePlan) -> "Deployment":
    """Prepare what runs on a node, and start nothing. Raises ConfigError for everything that can be
    known before a process is started."""
    options = node.options
    check_router_key(options, next(iter(node.pulls.values()), None))
    for place, model in enumerate(models):
        if model.audio is not None:
            require_extra("soundfile", "soxr")
        if node.num_gateways:
            _check_gateway_files(model, node.options_of(place))
    keys = _read_keys(options) if node.num_gateways else _Keys()
    plans: _Plans = {}
    for place, model in enumerate(models):
        plans |= _plan_engines(place, model, node)
    for engine in dict.fromkeys((each.replica.model, each.options) for each in node.engines):
        check_host(plans[engine])
    deployment = Deployment(node, plans, keys)
    _check_names(deployment.names)
    for place, plan in enumerate(deployment.of_models):
        is_aware = node.options_of(place).routing_policy == "prefix_aware"
        if is_aware and not plan.cache.enable_prefix_caching:
            raise ConfigError(
                f"routing_policy=prefix_aware: the tokens of {plan.model.name} attend to later "
                "ones, so no prefix can be reused. Use another policy."
            )
    _check_machine(deployment)
    return deployment


def _check_gateway_files(model: ModelFolder, options: ServeOptions) -> None:
    check_text_files(model.path, model.tokenizer_file, options.chat_template)
    if model.audio is not None:
        SpeechModel(
            model.path,
            model.audio,
            load_tokenizer(model.path, model.tokenizer_file, advice_level=logging.DEBUG),
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
        )
    load_parsers(options.tool_call_parser, options.reasoning_parser, "")


def _check_names(of_models: Sequence[Sequence[str]]) -> None:
    """Raise ConfigError if two models have a name in common."""
    counts = Counter(name for names in of_models for name in set(names))
    for name, count in counts.items():
        if count > 1:
            raise ConfigError(
                f"{count} models have the name {name!r}, and requests select a model by it. Give "
                "them others: served_model_name in a file of --models."
            )


@dataclass(frozen=True)
class _Keys:
    """Of the clients of the gateways."""

    api: DeploymentKeys = field(default_factory=DeploymentKeys)
    admin: str | None = None
    router: str | None = None


def _read_keys(options: ServeOptions) -> _Keys:
    if options.api_key_file is not None:
        path, sharing = options.api_key_file, options.share_prefix_cache
        api = DeploymentKeys(read_key_file(path, sharing), path.absolute(), sharing)
    else:
        api = DeploymentKeys(plain_keys(options.api_key or (), options.share_prefix_cache))
    files = {name: getattr(options, name) for name in ("admin_key_file", "router_key_file")}
    admin, router = (
        None if path is None else read_private_key(path, name) for name, path in files.items()
    )
    return _Keys(api, admin, router)


_Plans: TypeAlias = dict[tuple[int, EngineOptions], EnginePlan]
"""By the model's place, and the settings."""


def _plan_engines(place: int, model: ModelFolder, node: NodePlan) -> _Plans:
    """The plans of all engines of a model; those of the node are first. Raises ConfigError if a
    gateway could not treat them as one."""
    own = (engine.options for engine in node.engines if engine.replica.model == place)
    plans: _Plans = {
        (place, options): plan_engine(options, model, node.hash_seed)
        for options in dict.fromkeys((*own, *node.others))
    }
    lengths = {plan.identity.max_model_len for plan in plans.values()}
    if len(lengths) > 1:
        raise ConfigError(
            f"the engines have different values of max_model_len ({_joined(lengths)}). Set "
            "max_model_len in [settings] of the topology."
        )
    sizes = {plan.cache.tokens_per_hash for plan in plans.values()}
    if node.options_of(place).routing_policy == "prefix_aware" and len(sizes) > 1:
        raise ConfigError(
            "routing_policy=prefix_aware: the engines have different numbers of tokens per block "
            f"hash ({_joined(sizes)}). Set hash_block_size in [settings] of the topology, to a "
            "common divisor of their block sizes."
        )
    return plans


def _joined(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _check_machine(deployment: "Deployment") -> None:
    """Raise ConfigError if this host has not what the node needs."""
    node = deployment.node
    _raise_file_limit(node, [engine.options for engine in node.engines])
    copies: list[EnginePlan] = []
    for engine in node.engines:
        plan = deployment.plan_of(engine)
        check_address_space(plan.device)
        require_device(plan.device)
        if plan.device == "cuda" and engine.replica.devices:
            _check_gpus(engine.replica.devices)
        copies += [plan] * (1 + node.options.standby_workers)
    check_host_memory(copies)


def _check_gpus(devices: Sequence[int]) -> None:
    """Raise ConfigError if one of these GPUs does not exist."""
    found = num_gpus()
    if found is not None and max(devices) >= found:
        raise ConfigError(
            f"the engines need at least {max(devices) + 1} GPUs, one for each rank, and this "
            f"machine has {found}. Use fewer engines or ranks; of several models, those that may "
            "be slower can have device = 'cpu' in a file of --models."
        )


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

    plans: of the engines.
    """

    node: NodePlan
    plans: _Plans
    keys: _Keys

    @cached_property
    def engines(self) -> EngineSet:
        """Those of the node, as an operator changes them."""
        return _engine_set(self.node, self.plan)

    @cached_property
    def of_models(self) -> list[EnginePlan]:
        """The plan of one engine of each model, for the gateways."""
        first: dict[int, EnginePlan] = {}
        for (model, _), plan in self.plans.items():
            first.setdefault(model, plan)
        return list(first.values())

    @property
    def plan(self) -> EnginePlan:
        """Of an engine of the first model."""
        return self.of_models[0]

    def plan_of(self, engine: NodeEngine) -> EnginePlan:
        return self.plans[engine.replica.model, engine.options]

    @property
    def names(self) -> list[tuple[str, ...]]:
        """The names of each model in the API."""
        return [
            self.node.options_of(place).served_model_name or (plan.model.name,)
            for place, plan in enumerate(self.of_models)
        ]

    @property
    def api_keys(self) -> tuple[ApiKey, ...]:
        return self.keys.api.keys

    def operations(self, supervisor: Supervisor, stop_signal: StopSignals) -> Operations:
        """What an operator can do with it."""
        fixed = "the topology says which engines there are"
        if self.node.of_models:
            fixed = "a server of several models keeps the engines that it was started with"
        is_fixed = self.node.name is not None or bool(self.node.of_models)
        return Operations(
            supervisor,
            self.engines,
            maker=None if is_fixed else _EngineMaker(self, supervisor.runtime_dir),
            fixed=fixed,
            models=[names[0] for names in self.names],
            keys=self.keys.api,
            stop=stop_signal.request,
            state_dir=self.plan.state_dir,
            drain_timeout_s=self.node.options.drain_timeout_s,
            start_timeout_s=self.node.options.startup_timeout_s,
        )

    def processes(
        self, runtime_dir: RuntimeDir, listeners: Sequence[socket.socket]
    ) -> list[ProcessSpec]:
        """The processes in start order: schedulers need their workers, and gateways need the
        schedulers."""
        engines = [self.engine_processes(runtime_dir, engine) for engine in self.node.engines]
        key_usage_fd = runtime_dir.shared_memory("longshore-key-usage") if self.api_keys else None
        peers = tuple(
            str(runtime_dir.socket_path(f"gateway-{number}")) for number in range(len(listeners))
        )
        models = tuple(self._model(runtime_dir, place) for place in range(len(self.of_models)))
        return [
            *(worker for *workers, _ in engines for worker in workers),
            *(scheduler for *_, scheduler in engines),
            *(
                self._gateway(
                    number,
                    listener,
                    key_usage_fd=key_usage_fd,
                    models=models,
                    peers=peers,
                    config_after=partial(self._next_gateway, runtime_dir),
                )
                for number, listener in enumerate(listeners)
            ),
        ]

    def engine_processes(self, runtime_dir: RuntimeDir, engine: NodeEngine) -> list[ProcessSpec]:
        """Workers first and the scheduler last."""
        specs, _ = engine_processes(
            self.plan_of(engine),
            runtime_dir,
            engine.replica,
            sockets=engine.sockets,
            is_restarted=self.node.options.max_restarts > 0,
            num_standbys=self.node.options.standby_workers,
        )
        return specs

    def _members(self, runtime_dir: RuntimeDir, model: int) -> tuple[EngineMember, ...]:
        """The engines of a model that gateways use now, by number: those of this node, and of the
        others."""
        own = {engine.replica.number for engine in self.node.engines}
        remote = self.node.remote
        used = {number: member for number, member in remote.items() if number not in own}
        for replica in (each for each in self.engines.used if each.model == model):
            number = replica.number
            used[number] = remote.get(number) or self.member(runtime_dir, replica)
        return tuple(used[number] for number in sorted(used))

    def member(self, runtime_dir: RuntimeDir, replica: Replica) -> EngineMember:
        """An engine of this node, as gateways of the node see it."""
        options = self.node.options_of(replica.model)
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
        models = tuple(
            msgspec.structs.replace(model, members=self._members(runtime_dir, place))
            for place, model in enumerate(config.models)
        )
        return msgspec.structs.replace(
            config, awaits_all_engines=False, models=models, api_keys=self.api_keys
        )

    def _routing(self, place: int) -> RoutingConfig:
        options, plan = self.node.options_of(place), self.of_models[place]
        prefix = None
        if options.routing_policy == "prefix_aware":
            prefix = PrefixRoutingConfig(
                hash_seed=plan.hash_seed.hex(),
                hash_algorithm=plan.cache.hash_algorithm,
                tokens_per_hash=plan.cache.tokens_per_hash,
            )
        return part_of(RoutingConfig, options, prefix=prefix)

    def _transfers(self) -> TransferAccess:
        pulls, key = self.node.pulls.values(), self.keys.router
        return TransferAccess(
            "" if key is None else digest_of(key.encode()),
            tuple(sorted({host for options in pulls for host in options.remote_hosts})),
        )

    def _model(self, runtime_dir: RuntimeDir, place: int) -> ModelConfig:
        """A model, as gateways need it."""
        options, plan = self.node.options_of(place), self.of_models[place]
        model = plan.model
        name, *aliases = self.names[place]
        return ModelConfig(
            folder=str(model.path),
            tokenizer_file=None if (file := model.tokenizer_file) is None else str(file),
            name=name,
            aliases=tuple(aliases),
            fingerprint=plan.identity.model_fingerprint,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_model_len=plan.identity.max_model_len,
            sampling_defaults=model.sampling_defaults,
            members=self._members(runtime_dir, place),
            chat_template=None if options.chat_template is None else str(options.chat_template),
            embedding=model.embedding,
            classifier=model.classifier,
            audio=model.audio,
            keeps_states=plan.keeps_states,
            routing=self._routing(place),
            settings=part_of(GatewaySettings, options),
        )

    def _gateway(
        self,
        number: int,
        listener: socket.socket,
        *,
        key_usage_fd: int | None,
        models: tuple[ModelConfig, ...],
        peers: tuple[str, ...],
        config_after: Callable[[GatewayConfig], GatewayConfig],
    ) -> ProcessSpec:
        options, plan = self.node.options, self.plan
        config = part_of(
            GatewayConfig,
            options,
            settings=part_of(GatewaySettings, options),
            server_settings=shown_settings(options),
            models=models,
            awaits_engines=not self.node.remote,
            number=number,
            peers=peers,
            num_elsewhere=self.node.num_gateways_elsewhere,
            listen_fd=listener.fileno(),
            max_body_bytes=options.max_body_mib << 20,
            max_audio_bytes=options.max_audio_mib << 20,
            admin_key=self.keys.admin,
            api_keys=self.api_keys,
            key_usage_fd=key_usage_fd,
            # A page of another site cannot have this machine's own name.
            allowed_hosts=(*(options.allowed_hosts or ()), options.host, socket.gethostname()),
            max_stored_bytes=options.stored_responses_mib << 20,
            files_dir=str(plan.state_dir),
            batch_priority=LEAST_URGENT if options.scheduling_policy == "priority" else None,
            reasoning_key=reasoning_key(plan.hash_seed).hex(),
            split=part_of(SplitSettings, options),
            transfers=self._transfers(),
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
        check_host_memory([deployment.plan] * (1 + node.options.standby_workers))
        member = deployment.member(self.runtime_dir, replica)
        specs = deployment.engine_processes(self.runtime_dir, NodeEngine(replica, node.options))
        return NewEngine(specs, member)

    def clean_up(self, replica: Replica, specs: Sequence[ProcessSpec]) -> None:
        self.runtime_dir.release_memory(fd for spec in specs for fd in spec.pass_fds)
        self.runtime_dir.remove_files(*engine_files(replica))
