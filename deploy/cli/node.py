"""`longshore node`, and `longshore serve --topology`: start what a topology has for one node."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

from longshore.connectors.pull.options import url_host
from longshore.deploy.cli.deployment import prepare
from longshore.deploy.cli.serve import serve
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.settings.options import ServeOptions
from longshore.deploy.supervisor.fork_server import VARIABLE_PREFIX
from longshore.deploy.supervisor.log_lines import LINE_FORMATS
from longshore.deploy.supervisor.logs import set_up_logging
from longshore.deploy.topology.file import PORTS_PER_ENGINE, Topology, read_topology
from longshore.deploy.topology.node_plan import NodePlan, plan_node
from longshore.protocol.errors import ConfigError

_OF_COMMAND: Final = ("topology", "launcher", "api_key")


def run_node(
    topology_file: Path,
    name: str,
    *,
    only_checks: bool = False,
    api_key: tuple[str, ...] | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve as `serve` does, or only check and print the plan of the node."""
    topology = read_topology(topology_file)
    plan = plan_node(topology, name, api_key)
    if only_checks:
        prepare([read_model_folder(topology.model_of(name), plan.options.state_dir)], plan)
        for line in describe(topology, plan):
            announce(line)
        return
    _serve(topology, plan, announce)


def check_variables(variables: Mapping[str, str]) -> None:
    """Raise ConfigError for settings in variables, which `longshore node` does not read: a node
    with LONGSHORE_API_KEY_FILE must not serve without keys."""
    for setting in fields(ServeOptions):
        name = VARIABLE_PREFIX + setting.name.upper()
        if setting.name not in _OF_COMMAND and name in variables:
            raise ConfigError(
                f"{name} is set, but all settings of a node come from its topology. Write "
                f"{setting.name} into [settings] of the file, and unset the variable."
            )


def serve_topology(
    models: Sequence[Path], options: ServeOptions, announce: Callable[[str], None] = print
) -> None:
    """Serve a topology of one node, or all nodes of one through a launcher."""
    assert options.topology is not None
    for setting in fields(ServeOptions):
        if setting.name in _OF_COMMAND:
            continue
        if getattr(options, setting.name) != setting.default:
            raise ConfigError(
                f"{setting.name} is set, but with --topology all settings come from the file. "
                f"Remove it, or write it into [settings] of {options.topology}."
            )
    if len(models) > 1:
        raise ConfigError(
            f"{len(models)} models are given, and a topology has one. Remove --topology, or start "
            "one topology for each."
        )
    (model,) = models
    topology = read_topology(options.topology)
    if model != DEMO_MODEL_DIR:
        if options.launcher is not None or topology.model not in (None, str(model)):
            raise ConfigError(
                f"MODEL is {model}, but the topology has "
                f"{topology.model or 'none'}. Set model in {options.topology}, and remove MODEL."
            )
        topology = replace(topology, model=str(model))
    if options.launcher == "ray":
        if options.api_key is not None:
            raise ConfigError(
                "api_key is set, but keys never pass through Ray. Set api_key_file in [settings] "
                f"of {options.topology} to a file on each node."
            )
        from longshore.deploy.topology.ray_launcher import import_ray, launch

        ray = import_ray()
        set_up_logging(topology.settings.log_level, LINE_FORMATS[topology.settings.log_format])
        launch(ray, topology, announce)
        return
    if len(topology.nodes) > 1:
        raise ConfigError(
            f"the topology {topology.path} has {len(topology.nodes)} nodes, and this command "
            "starts one. Run `longshore node --topology FILE --name NODE` on each node, or use "
            "--launcher ray."
        )
    (name,) = topology.nodes
    _serve(topology, plan_node(topology, name, options.api_key), announce)


def _serve(topology: Topology, plan: NodePlan, announce: Callable[[str], None]) -> None:
    options = plan.options
    set_up_logging(options.log_level, LINE_FORMATS[options.log_format])
    model = read_model_folder(topology.model_of(str(plan.name)), options.state_dir)
    serve([model], plan, announce)


def describe(topology: Topology, plan: NodePlan) -> list[str]:
    """What a node starts, and to what it connects."""
    name = str(plan.name)
    lines = [f"node {name} at {topology.nodes[name].address}: the topology is valid"]
    for engine in plan.engines:
        replica, options = engine.replica, engine.options
        text = f"engine {replica.number}: {replica.role}, {options.num_ranks} rank"
        text += "s" * (options.num_ranks > 1) + f" on {options.device}"
        if topology.engines[replica.number].devices:
            text += f" {', '.join(map(str, replica.devices))}"
        if engine.sockets is not None:
            first = int(engine.sockets.clients.address.rpartition(":")[2])
            text += f", ports {first} to {first + PORTS_PER_ENGINE - 1}"
        lines.append(text)
    if plan.num_gateways:
        processes = "" if plan.num_gateways == 1 else f" ({plan.num_gateways} processes)"
        host = url_host(plan.options.host)
        lines.append(f"gateway at http://{host}:{plan.options.port}{processes}")
        others = [
            f"engine {number} at {remote.clients.address}"
            for number, remote in plan.remote.items()
            if topology.engines[number].node != name
        ]
        lines += [f"connects to {other}" for other in others]
    return lines
