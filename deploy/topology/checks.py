"""Finds what cannot work in a topology before anything starts; without I/O."""

from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import pairwise
from typing import Any, Final

from longshore.connectors.encoder_registry import BUILT_IN
from longshore.connectors.registry import parse_options
from longshore.deploy.settings.options import SPLIT_ONLY, ServeOptions
from longshore.deploy.supervisor.connector_options import (
    PULL_CONNECTORS,
    can_pull,
    pull_connectors,
)
from longshore.deploy.topology.file import PORTS_PER_ENGINE, Engine, Topology
from longshore.protocol.transport.security import is_key

_PORT_USES: Final = ("requests", "KV events", "replays of KV events", "the connector")


def check_topology(topology: Topology) -> None:
    """Raise ConfigError, with the path of the key, for the first thing that cannot work."""
    for check in _CHECKS:
        check(topology)


def _check_addresses(topology: Topology) -> None:
    addresses = {name: _address(topology, name) for name in topology.nodes}
    local = [name for name, address in addresses.items() if address.is_loopback]
    others = [name for name in addresses if name not in local]
    if local and others:
        raise topology.error(
            f"nodes.{local[0]}.address",
            f"{addresses[local[0]]} is a loopback address, which node {others[0]} "
            f"({addresses[others[0]]}) cannot reach. Use the address in the private network.",
        )


def _address(topology: Topology, name: str) -> IPv4Address | IPv6Address:
    text = topology.nodes[name].address
    where = f"nodes.{name}.address"
    try:
        address = ip_address(text)
    except ValueError as error:
        raise topology.error(
            where, f"{text!r} is not an IP address. Names of hosts are not supported."
        ) from error
    if address.is_unspecified or address.is_multicast:
        raise topology.error(
            where,
            f"{text} is not the address of one host, so other nodes cannot connect to it. Use the "
            "address in the private network.",
        )
    return address


def _check_places(topology: Topology) -> None:
    known = ", ".join(topology.nodes)
    places = [
        *((engine.where, engine.node) for engine in topology.engines),
        *((f"gateways[{i}]", gateways.node) for i, gateways in enumerate(topology.gateways)),
    ]
    for where, node in places:
        if node not in topology.nodes:
            raise topology.error(
                f"{where}.node", f"there is no node {node!r}; the nodes are {known}"
            )
    used = {node for _, node in places}
    for name in topology.nodes:
        if name not in used:
            raise topology.error(
                f"nodes.{name}",
                "it has neither engines nor gateways. Remove it, or set node in an [[engines]] or "
                "[[gateways]] table.",
            )
    seen: set[str] = set()
    for i, gateways in enumerate(topology.gateways):
        if gateways.node in seen:
            raise topology.error(
                f"gateways[{i}].node",
                f"node {gateways.node} has gateways already. Set count of the first table to start "
                "more processes.",
            )
        seen.add(gateways.node)


def _check_roles(topology: Topology) -> None:
    roles = {engine.role for engine in topology.engines}
    if roles == {"unified"} or roles == {"prefill", "decode"}:
        return
    if "unified" in roles:
        engine = next(each for each in topology.engines if each.role == "unified")
        raise topology.error(
            f"{engine.where}.role",
            "unified engines compute whole requests, and cannot be in one topology with prefill "
            "and decode engines. Give all engines the roles prefill and decode, or none of them.",
        )
    (only,) = roles
    missing = "decode" if only == "prefill" else "prefill"
    raise topology.error(
        "engines",
        f"all engines have the role {only}, so no request could be answered. Add an [[engines]] "
        f"table with role = '{missing}', or remove the roles.",
    )


def _check_connectors(topology: Topology) -> None:
    """All engines of a split deployment pull KV of one type by one library."""
    split = [engine for engine in topology.engines if engine.role != "unified"]
    names = {
        engine.number: _pull_connectors(engine) or (connector_name(engine),) for engine in split
    }
    for engine in split:
        if not can_pull(connector_name(engine), _connector_options(engine)):
            raise topology.error(
                f"{engine.where}.kv_connector",
                f"{engine.options.kv_connector!r} does not pull KV from other engines, as the role "
                f"{engine.role} needs. Use one of {', '.join(PULL_CONNECTORS)}, or multi with one "
                "of them.",
            )
    for first, second in pairwise(split):
        if names[first.number] != names[second.number]:
            raise topology.error(
                f"{second.where}.kv_connector",
                f"{' and '.join(names[second.number])} cannot pull from "
                f"{' and '.join(names[first.number])}, which {first.where} has. Set the same "
                "connector in [settings].",
            )
        for name in ("dtype", "kv_cache_dtype"):
            one, other = getattr(first.options, name), getattr(second.options, name)
            may_be_equal = name == "dtype" and "auto" in (one, other)
            if one != other and not may_be_equal:
                raise topology.error(
                    f"{second.where}.{name}",
                    f"{other!r} is not {one!r}, which {first.where} has, so no KV could be pulled. "
                    f"Set {name} in [settings].",
                )


def connector_name(engine: Engine) -> str:
    """Empty if the engine has none."""
    default = "" if engine.role == "unified" else PULL_CONNECTORS[0]
    return engine.options.kv_connector or default


def pulls_kv(engine: Engine) -> bool:
    """Whether it pulls KV from other engines by one of PULL_CONNECTORS."""
    return bool(_pull_connectors(engine))


def _pull_connectors(engine: Engine) -> tuple[str, ...]:
    return pull_connectors(connector_name(engine), _connector_options(engine))


def _connector_options(engine: Engine) -> dict[str, Any]:
    return parse_options(engine.options.kv_connector_config)


def connector_port(engine: Engine) -> int:
    """0: any free one."""
    return 0 if engine.port is None else engine.port + _PORT_USES.index("the connector")


def _check_encoder_connectors(topology: Topology) -> None:
    """The engines that hand encoder outputs to each other can find and trust each other."""
    engines = [engine for engine in topology.engines if hands_over_encoder_outputs(engine)]
    for engine in engines:
        values = encoder_options(engine)
        others = offering(topology, engine)
        if engine.options.ec_role != "ec_producer" and not others and "peers" not in values:
            raise topology.error(
                f"{engine.where}.ec_role",
                f"{engine.options.ec_role!r} asks other engines for encoder outputs, and no other "
                f"engine offers them by {engine.options.ec_connector}. Set ec_connector and the "
                "role ec_producer or ec_both for another one, or remove ec_connector here.",
            )
        if engine.options.ec_role != "ec_consumer" and not (engine.port or values.get("port")):
            raise topology.error(
                f"{engine.where}.port",
                f"it offers encoder outputs by {engine.options.ec_connector}, so others must know "
                f"its port. Set the first of {PORTS_PER_ENGINE} consecutive free ports.",
            )
        is_secret = "secret_file" in values or topology.key_paths(engine.node).transfer_secret
        if len({each.node for each in engines}) > 1 and not is_secret:
            raise topology.error(
                "keys.transfer_secret",
                "it is missing: engines on different nodes hand encoder outputs to each other. Run "
                "`longshore keys transfer` once, and copy its file to all nodes of engines.",
            )


def hands_over_encoder_outputs(engine: Engine) -> bool:
    """Whether it does so by a connector whose options the topology can complete."""
    return engine.options.ec_connector in BUILT_IN


def encoder_options(engine: Engine) -> dict[str, Any]:
    """The options as they are in the file."""
    return parse_options(engine.options.ec_connector_config, "--ec-connector-config")


def offering(topology: Topology, engine: Engine) -> list[Engine]:
    """The other engines that may have encoder outputs for an engine."""
    return [
        each
        for each in topology.engines
        if each is not engine
        and each.options.ec_connector == engine.options.ec_connector
        and each.options.ec_role != "ec_consumer"
    ]


def _check_split_settings(topology: Topology) -> None:
    split = [engine for engine in topology.engines if engine.role != "unified"]
    for engine in split:
        if engine.options.kv_role != "kv_both":
            raise topology.error(
                f"{engine.where}.kv_role",
                f"{engine.options.kv_role!r} is not supported with the role {engine.role}, which "
                "says whether the engine sends or receives KV. Remove kv_role.",
            )
    for name in () if split else SPLIT_ONLY:
        if getattr(topology.settings, name) != getattr(ServeOptions, name):
            raise topology.error(
                f"settings.{name}",
                "no engine has the role prefill or decode, so it has no effect. Set the roles of "
                "the engines, or remove it.",
            )


def _check_ports(topology: Topology) -> None:
    taken: dict[tuple[str, int], str] = {}
    for address, port, where, use in _ports(topology):
        other = taken.setdefault((address, port), where)
        if other != where:
            raise topology.error(
                where,
                f"port {port} ({use}) is also a port of {other}. An engine uses {PORTS_PER_ENGINE} "
                "consecutive ports from its `port` on.",
            )
    for engine in topology.engines:
        if engine.port is None and topology.is_remote(engine):
            raise topology.error(
                f"{engine.where}.port",
                f"gateways of other nodes than {engine.node} use this engine. Set the first of "
                f"{PORTS_PER_ENGINE} consecutive free ports of the node.",
            )


def _ports(topology: Topology) -> Iterator[tuple[str, int, str, str]]:
    """Address, port, table and use of every port."""
    for engine in topology.engines:
        for offset, use in enumerate(_PORT_USES if engine.port is not None else ()):
            assert engine.port is not None
            yield topology.nodes[engine.node].address, engine.port + offset, engine.where, use
    for i, gateways in enumerate(topology.gateways):
        address = topology.nodes[gateways.node].address
        if gateways.host in ("0.0.0.0", "::", address):  # else another interface
            yield address, gateways.port, f"gateways[{i}]", "HTTP"


def _check_keys(topology: Topology) -> None:
    """Nodes that talk to each other have keys, each its own."""
    owners: dict[str, str] = {}
    for name in nodes_with_keys(topology):
        node = topology.nodes[name]
        if node.public_key is None:
            raise topology.error(
                f"nodes.{name}.public_key",
                "engines and gateways are on different nodes, so each node needs keys. Run "
                f"`longshore keys node` on {name}, and write the public key here.",
            )
        if not is_key(node.public_key):
            raise topology.error(
                f"nodes.{name}.public_key",
                f"{node.public_key!r} is not a key. Write the one that `longshore keys node` has "
                f"printed on {name}.",
            )
        if node.public_key in owners:
            raise topology.error(
                f"nodes.{name}.public_key",
                f"node {owners[node.public_key]} has the same key. Run `longshore keys node` on "
                "each node.",
            )
        owners[node.public_key] = name
        if topology.key_paths(name).node is None:
            raise topology.error(
                "keys.node", "it is missing: the file that `longshore keys node` has written"
            )
    pulling = [engine for engine in topology.engines if pulls_kv(engine)]
    for engine in pulling if len({engine.node for engine in pulling}) > 1 else ():
        if topology.key_paths(engine.node).transfer_secret is None:
            raise topology.error(
                "keys.transfer_secret",
                "it is missing: engines on different nodes pull KV from each other. Run `longshore "
                "keys transfer` once, and copy its file to all nodes of engines.",
            )
    if topology.settings.enable_kv_cache_events and len(topology.nodes) > 1:
        for name in topology.nodes:
            if topology.key_paths(name).block_hash_seed is None:
                raise topology.error(
                    "keys.block_hash_seed",
                    "it is missing: gateways and engines on different nodes find KV blocks by the "
                    "same hashes. Copy the file block_hash_seed of one state directory to all "
                    "nodes.",
                )


def nodes_with_keys(topology: Topology) -> list[str]:
    """Nodes whose engines are used from other nodes, or whose gateways use engines of others."""
    remote = [engine for engine in topology.engines if topology.is_remote(engine)]
    if not remote:
        return []
    used = {engine.node for engine in remote} | set(topology.gateway_nodes)
    return [name for name in topology.nodes if name in used]


def _check_prefixes(topology: Topology) -> None:
    if topology.settings.routing_policy != "prefix_aware":
        return
    for engine in topology.engines:
        if not engine.options.enable_prefix_caching:
            raise topology.error(
                f"{engine.where}.enable_prefix_caching", "routing_policy = 'prefix_aware' needs it"
            )


_CHECKS: Final[tuple[Callable[[Topology], None], ...]] = (
    _check_addresses,
    _check_places,
    _check_roles,
    _check_connectors,
    _check_encoder_connectors,
    _check_split_settings,
    _check_ports,
    _check_keys,
    _check_prefixes,
)
