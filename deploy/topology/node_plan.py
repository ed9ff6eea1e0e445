"""What one node of a deployment starts, and how its gateways reach the engines of other nodes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from longshore.connectors.pull.options import PullOptions, url_host
from longshore.connectors.registry import parse_options
from longshore.deploy.gateway.key_file import read_key_file
from longshore.deploy.settings.options import ServeOptions
from longshore.deploy.supervisor.connector_options import (
    map_pull_options,
    pull_options,
    with_pull_connector,
)
from longshore.deploy.supervisor.engine_config import EngineSockets
from longshore.deploy.supervisor.replica import Replica, replicas
from longshore.deploy.topology.checks import (
    check_topology,
    connector_name,
    connector_port,
    encoder_options,
    hands_over_encoder_outputs,
    nodes_with_keys,
    offering,
    pulls_kv,
)
from longshore.deploy.topology.file import Engine, Topology
from longshore.deploy.topology.keys import check_transfer_secret, read_hash_seed, read_node_keys
from longshore.protocol.commands import EngineMember, Role
from longshore.protocol.errors import ConfigError
from longshore.protocol.events import EventSource
from longshore.protocol.transport.channel import Endpoint
from longshore.protocol.transport.security import CurveKeys


@dataclass(frozen=True)
class NodeEngine:
    """An engine that the node starts. sockets: see `engine_processes`."""

    replica: Replica
    options: ServeOptions
    sockets: EngineSockets | None = None


@dataclass(frozen=True)
class NodePlan:
    """options: of its gateways.
    engines:    that it starts.
    roles:      of all engines of the deployment.
    num_gateways: that it starts; they share a port.
    pulls:      options of the engines that pull KV from others, by number.
    remote:     the engines to which its gateways connect over the network, by number.
    others:     settings of the engines of other nodes.
    num_gateways_elsewhere: of other nodes.
    name:       of the node; None: the deployment has no others.
    hash_seed:  of block hashes; None: that of the state directory.
    of_models:  settings of each of several models; empty: there is one, with `options`.
    """

    options: ServeOptions
    engines: tuple[NodeEngine, ...]
    roles: tuple[Role, ...]
    num_gateways: int
    pulls: Mapping[int, PullOptions] = field(default_factory=dict, repr=False)
    remote: Mapping[int, EngineMember] = field(default_factory=dict)
    others: tuple[ServeOptions, ...] = ()
    num_gateways_elsewhere: int = 0
    name: str | None = None
    hash_seed: bytes | None = field(default=None, repr=False)
    of_models: tuple[ServeOptions, ...] = ()

    def options_of(self, model: int) -> ServeOptions:
        """The settings of a model, by its place."""
        return self.of_models[model] if self.of_models else self.options

    @property
    def replicas(self) -> list[Replica]:
        """The engines that it starts."""
        return [engine.replica for engine in self.engines]

    def replicas_of(self, model: int) -> list[Replica]:
        """Those of a model, by its place."""
        return [replica for replica in self.replicas if replica.model == model]


def whole_deployment(options: ServeOptions, of_models: Sequence[ServeOptions] = ()) -> NodePlan:
    """The plan of a deployment without a topology: on one host, equal engines for each model.
    Raises ConfigError for settings that do not fit.

    of_models: settings of each of several models; empty: there is one, with `options`.
    """
    if len(of_models) > 1:
        return _several_models(options, of_models)
    if of_models:
        (options,) = of_models
    if options.scheduling_policy is None and options.api_key_file is not None:
        keys = read_key_file(options.api_key_file, options.share_prefix_cache)
        if len(keys) > 1:
            options = replace(options, scheduling_policy="fair")
    if options.routing_policy == "prefix_aware":
        options = replace(options, enable_kv_cache_events=True)
    if options.prefill:
        options = with_pull_connector(options)
    pull = pull_options(options.kv_connector, options.kv_connector_config)
    engines = replicas(options.roles)
    return NodePlan(
        options,
        tuple(NodeEngine(replica, options) for replica in engines),
        options.roles,
        options.gateways,
        pulls={} if pull is None else {replica.number: pull for replica in engines},
    )


def _several_models(options: ServeOptions, of_models: Sequence[ServeOptions]) -> NodePlan:
    """Engines have consecutive numbers and GPUs, in the order of the models."""
    if options.prefill:
        raise ConfigError(
            f"prefill={options.prefill} and decode={options.decode} are for a server of one model, "
            f"and {len(of_models)} are given. Start one server for each."
        )
    plans = [whole_deployment(each) for each in of_models]
    num_engines = sum(len(plan.engines) for plan in plans)
    engines: list[NodeEngine] = []
    pulls: dict[int, PullOptions] = {}
    first_gpu = 0
    for model, plan in enumerate(plans):
        for engine in plan.engines:
            uses_gpus = engine.options.device != "cpu"
            end_gpu = first_gpu + (engine.options.num_ranks if uses_gpus else 0)
            replica = replace(
                engine.replica,
                number=len(engines),
                count=num_engines,
                devices=tuple(range(first_gpu, end_gpu)),
                model=model,
            )
            if engine.replica.number in plan.pulls:
                pulls[replica.number] = plan.pulls[engine.replica.number]
            engines.append(replace(engine, replica=replica))
            first_gpu = end_gpu
    return NodePlan(
        options,
        tuple(engines),
        tuple(engine.replica.role for engine in engines),
        options.gateways,
        pulls=pulls,
        of_models=tuple(plan.options for plan in plans),
    )


def plan_node(topology: Topology, name: str, api_key: tuple[str, ...] | None = None) -> NodePlan:
    """The plan of one node, whose keys are read. Raises ConfigError for everything that cannot work
    in the topology or with its keys."""
    check_topology(topology)
    if name not in topology.nodes:
        raise topology.error(
            "nodes", f"there is no node {name!r}; the nodes are {', '.join(topology.nodes)}"
        )
    gateways = topology.gateways_of(name)
    paths = topology.key_paths(name)
    keys = None
    if name in nodes_with_keys(topology):
        public_key = topology.nodes[name].public_key
        assert paths.node is not None  # checked above
        assert public_key is not None
        keys = read_node_keys(paths.node, public_key)
    roles = tuple(engine.role for engine in topology.engines)
    options = replace(topology.settings, api_key=api_key)
    if gateways is not None:
        options = replace(options, host=gateways.host, port=gateways.port, gateways=gateways.count)
    remote = {}
    if keys is not None and gateways is not None:
        remote = {
            engine.number: _remote_engine(topology, engine, keys)
            for engine in topology.engines
            if topology.is_remote(engine)
        }
    return NodePlan(
        options,
        _engines(topology, name, keys),
        roles,
        num_gateways=0 if gateways is None else gateways.count,
        pulls=_pulls(topology),
        remote=remote,
        others=tuple(
            _as_seen_elsewhere(engine.options) for engine in topology.engines if engine.node != name
        ),
        num_gateways_elsewhere=sum(each.count for each in topology.gateways if each.node != name),
        name=name,
        hash_seed=read_hash_seed(paths),
    )


def _engines(topology: Topology, name: str, keys: CurveKeys | None) -> tuple[NodeEngine, ...]:
    own = topology.engines_of(name)
    engines = []
    for engine, devices in zip(own, devices_of(own), strict=True):
        replica = Replica(
            engine.number,
            len(topology.engines),
            engine.role,
            num_on_host=len(own),
            devices=devices,
        )
        sockets = None
        if keys is not None and topology.is_remote(engine):
            sockets = _sockets(topology, engine, keys)
        options = _with_encoder_peers(topology, engine, _with_transfers(topology, engine))
        engines.append(NodeEngine(replica, options, sockets))
    return tuple(engines)


def devices_of(engines: Iterable[Engine]) -> Iterator[tuple[int, ...]]:
    """GPUs of the ranks of each engine of a node."""
    first_gpu = 0
    for engine in engines:
        devices = engine.devices
        if not devices and engine.options.device != "cpu":
            devices = tuple(range(first_gpu, first_gpu + engine.options.num_ranks))
        first_gpu = max(first_gpu, *(device + 1 for device in devices), 0)
        yield devices


def _url(topology: Topology, engine: Engine, offset: int) -> str:
    assert engine.port is not None  # checked for engines that other nodes use
    address = topology.nodes[engine.node].address
    host = f"[{address}]" if ":" in address else address
    return f"tcp://{host}:{engine.port + offset}"


def _sockets(topology: Topology, engine: Engine, keys: CurveKeys) -> EngineSockets:
    clients = tuple(topology.nodes[node].public_key or "" for node in topology.gateway_nodes)
    keys = msgspec.structs.replace(keys, also_authorized=clients)
    return EngineSockets(*(Endpoint(_url(topology, engine, i), keys) for i in range(3)))


def _remote_engine(topology: Topology, engine: Engine, keys: CurveKeys) -> EngineMember:
    """How gateways connect to an engine over the network."""
    keys = msgspec.structs.replace(keys, server=topology.nodes[engine.node].public_key)
    clients, events, replays = (Endpoint(_url(topology, engine, i), keys) for i in range(3))
    source = None
    if topology.settings.routing_policy == "prefix_aware":
        source = EventSource(events, replays, engine.options.kv_events_topic)
    return EngineMember(engine.number, engine.role, clients, source)


def _with_transfers(topology: Topology, engine: Engine) -> ServeOptions:
    """The options of an engine, with what its pull connector needs to reach the others. Raises
    ConfigError."""
    if not pulls_kv(engine):
        return engine.options
    if not _pulls_between_nodes(topology):
        return with_pull_connector(engine.options)
    secret_file = topology.key_paths(engine.node).transfer_secret
    assert secret_file is not None  # checked
    check_transfer_secret(secret_file)
    defaults = {**_transfer_addresses(topology, engine), "secret_file": secret_file}
    return with_pull_connector(engine.options, defaults)


def _with_encoder_peers(topology: Topology, engine: Engine, options: ServeOptions) -> ServeOptions:
    """The same, with what its encoder connector needs to reach the others. Raises ConfigError."""
    if not hands_over_encoder_outputs(engine):
        return options
    values = encoder_options(engine)
    defaults: dict[str, Any] = {
        "host": topology.nodes[engine.node].address,
        "port": connector_port(engine),
    }
    secret_file = topology.key_paths(engine.node).transfer_secret
    if secret_file is not None and "secret_file" not in values:
        check_transfer_secret(secret_file)
        defaults["secret_file"] = secret_file
    if options.ec_role != "ec_producer":
        defaults["peers"] = [
            _encoder_address(topology, each) for each in offering(topology, engine)
        ]
    config = msgspec.json.encode({**defaults, **values}).decode()
    return replace(options, ec_connector_config=config)


def _encoder_address(topology: Topology, engine: Engine) -> str:
    values = encoder_options(engine)
    host = url_host(str(values.get("host", topology.nodes[engine.node].address)))
    return f"{host}:{values.get('port', connector_port(engine))}"


def _pulls(topology: Topology) -> dict[int, PullOptions]:
    """What gateways must know of transfers; without secrets, whose files other nodes may lack."""
    found = {}
    for engine in topology.engines:
        if not pulls_kv(engine):
            continue
        defaults = _transfer_addresses(topology, engine) if _pulls_between_nodes(topology) else {}

        def public(options: dict[str, Any], defaults: Mapping[str, Any] = defaults) -> Any:
            given = {name: value for name, value in options.items() if name != "secret_file"}
            return {**defaults, **given}

        config = msgspec.json.encode(_map_pull_options(engine, public)).decode()
        pull = pull_options(connector_name(engine), config)
        assert pull is not None
        found[engine.number] = pull
    return found


def _pulls_between_nodes(topology: Topology) -> bool:
    return len({engine.node for engine in topology.engines if pulls_kv(engine)}) > 1


def _transfer_addresses(topology: Topology, engine: Engine) -> dict[str, Any]:
    """Where an engine listens for others that pull its KV, and from where it pulls."""
    pulling = [each for each in topology.engines if pulls_kv(each)]
    return {
        "host": topology.nodes[engine.node].address,
        "port": connector_port(engine),
        "remote_hosts": sorted({host for each in pulling for host in _hosts(topology, each)}),
    }


def _hosts(topology: Topology, engine: Engine) -> list[str]:
    """The addresses from which the engine's blocks are pulled."""
    hosts: list[str] = []

    def note(options: dict[str, Any]) -> dict[str, Any]:
        hosts.append(str(options.get("host", topology.nodes[engine.node].address)))
        return options

    _map_pull_options(engine, note)
    return hosts


def _map_pull_options(
    engine: Engine, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    values = parse_options(engine.options.kv_connector_config)
    return map_pull_options(connector_name(engine), values, change)


def _as_seen_elsewhere(options: ServeOptions) -> ServeOptions:
    """Settings from which another node derives the limits of requests: it may have neither the
    device nor the packages of the engine."""
    return replace(
        options,
        device="cpu",
        kv_connector=None,
        kv_connector_config="{}",
        kv_role="kv_both",
        ec_connector=None,
        ec_connector_config="{}",
        ec_role="ec_both",
        verify_kv=None,
        preemption_mode="recompute",
        scheduling_policy=None,
        structured_output_backend="auto",
    )
