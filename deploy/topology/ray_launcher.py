"""`longshore serve --topology FILE --launcher ray`: Ray places `longshore node` on each node, one
actor per node in a placement group, and starts it again when the node or a replacement returns.

Ray gets the path of the topology file, the names of nodes and numbers of GPUs, and never a key:
each node reads its own key files.
"""

import importlib
import logging
import select
from collections.abc import Callable, Mapping
from typing import Any, Final

from longshore.deploy.supervisor.process import STOP_TIMEOUT_S
from longshore.deploy.supervisor.stop_signals import StopSignals
from longshore.deploy.topology.checks import check_topology
from longshore.deploy.topology.file import Topology
from longshore.deploy.topology.node_plan import devices_of
from longshore.deploy.topology.node_runner import NodeRunner, NodeStatus
from longshore.protocol.errors import ConfigError, EngineDead
from longshore.protocol.install_command import install_command

logger = logging.getLogger(__name__)

POLL_S: Final = 1.0
_SHARE: Final = 0.001
"""Of the resource that stands for a host; it only says where an actor is placed."""
RESOURCE_PREFIX: Final = "longshore:"


def launch(ray: Any, topology: Topology, announce: Callable[[str], None] = print) -> None:
    """Run all nodes until SIGTERM or SIGINT. Raises ConfigError if there is no Ray cluster or a
    node is not in it."""
    check_topology(topology)
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError as error:
        raise ConfigError(
            "there is no Ray cluster to connect to. Run `ray start --head` on one node and `ray "
            "start --address=HEAD:6379` on the others, or set RAY_ADDRESS."
        ) from error
    try:
        _run(ray, topology, announce)
    finally:
        ray.shutdown()


def import_ray() -> Any:
    """The package. Raises ConfigError if it is missing."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"--launcher ray needs the package ray ({error}). Run {install_command('ray')} on "
            "all nodes, or start `longshore node` on each without Ray."
        ) from error


def _run(ray: Any, topology: Topology, announce: Callable[[str], None]) -> None:
    bundles = bundles_of(topology, [node for node in ray.nodes() if node["Alive"]])
    group = ray.util.placement_group(list(bundles.values()), strategy="STRICT_SPREAD")
    try:
        if not group.wait(topology.settings.startup_timeout_s):
            raise ConfigError(
                f"Ray could not reserve {bundles} on different nodes within "
                f"{topology.settings.startup_timeout_s:g} s. Look at `ray status`, and at "
                "startup_timeout_s."
            )
        runners = _start(ray, topology, group, bundles)
        with StopSignals() as stop_signal:  # after ray.init, which has handlers of its own
            watch = _Watch(ray, runners, announce)
            while not stop_signal.is_set():
                watch.poll()
                select.select([stop_signal], [], [], POLL_S)
            _stop(ray, runners, topology.settings.drain_timeout_s + 3 * STOP_TIMEOUT_S)
    finally:
        ray.util.remove_placement_group(group)


def bundles_of(topology: Topology, alive: list[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The resources to reserve for each node. alive: Ray's nodes. Raises ConfigError."""
    bundles = {}
    for name, node in topology.nodes.items():
        by_name, by_address = f"{RESOURCE_PREFIX}{name}", f"node:{node.address}"
        for resource in (by_name, by_address):
            hosts = [each for each in alive if resource in each["Resources"]]
            if hosts:
                break
        else:
            addresses = ", ".join(str(each["NodeManagerAddress"]) for each in alive)
            raise topology.error(
                f"nodes.{name}",
                f"no node of the Ray cluster has the address {node.address}; it has {addresses}. "
                "Run `ray start` on this node, with --node-ip-address, or with --resources "
                f"'{{\"{by_name}\": 1}}' if Ray uses another network.",
            )
        num_gpus = _num_gpus(topology, name, has_gpus="GPU" in hosts[0]["Resources"])
        bundles[name] = {resource: _SHARE, **({"GPU": float(num_gpus)} if num_gpus else {})}
    return bundles


def _num_gpus(topology: Topology, name: str, *, has_gpus: bool) -> int:
    """GPUs that the engines of a node use. Raises ConfigError for numbers that Ray does not give
    them: it shows a process only the GPUs that are reserved for it, numbered from 0."""
    engines = [
        engine
        for engine in topology.engines_of(name)
        if engine.options.device != "cpu" and (has_gpus or engine.options.device != "auto")
    ]
    count = sum(engine.options.num_ranks for engine in engines)
    last = max((device for devices in devices_of(engines) for device in devices), default=-1)
    if last >= count:
        raise topology.error(
            f"nodes.{name}",
            f"its engines would use GPU {last}, but with --launcher ray the {count} GPUs that Ray "
            f"reserves for the node are numbered from 0 to {count - 1}. Remove devices "
            "from all of them.",
        )
    return count


def _start(
    ray: Any, topology: Topology, group: Any, bundles: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    actor = ray.remote(NodeRunner)
    runners = {}
    for index, (name, bundle) in enumerate(bundles.items()):
        runners[name] = actor.options(
            num_cpus=0,
            num_gpus=bundle.get("GPU", 0),
            max_restarts=-1,
            max_concurrency=4,
            scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
        ).remote(str(topology.path.absolute()), name, topology.digest)
    return runners


class _Watch:
    """Tells the user what happens on the nodes."""

    def __init__(
        self, ray: Any, runners: Mapping[str, Any], announce: Callable[[str], None]
    ) -> None:
        self._ray, self._runners, self._announce = ray, runners, announce
        self._pending: dict[str, Any] = {}
        self._known: dict[str, NodeStatus] = {}
        self._is_lost: dict[str, bool] = {}

    def poll(self) -> None:
        """Does not wait for nodes that do not answer."""
        for name, runner in self._runners.items():
            if name not in self._pending:
                self._pending[name] = runner.status.remote()
            answer = self._pending[name]
            done, _ = self._ray.wait([answer], timeout=0.1)
            if not done:
                continue
            del self._pending[name]
            try:
                status = self._ray.get(answer)
            except self._ray.exceptions.RayError as error:
                if not self._is_lost.get(name):
                    reason = str(error).strip().partition("\n")[0]
                    logger.warning("node %s is lost, and waits for its return: %s", name, reason)
                    self._is_lost[name] = True
                continue
            self._note(name, status)

    def _note(self, name: str, status: NodeStatus) -> None:
        known = self._known.get(name, NodeStatus(0, (), None))
        if self._is_lost.get(name):
            logger.info("node %s has returned", name)
            known = NodeStatus(0, (), None)
        self._is_lost[name] = False
        for line in status.announced[len(known.announced) :]:
            self._announce(f"node {name}: {line}")
        if status.problem not in (known.problem, None) and status.num_starts:
            logger.error("node %s: %s", name, status.problem)
        self._known[name] = status


def _stop(ray: Any, runners: Mapping[str, Any], timeout_s: float) -> None:
    """Let all nodes drain and end. Raises EngineDead for those that were killed."""
    logger.info("stopping all nodes")
    answers = {name: runner.stop.remote(timeout_s) for name, runner in runners.items()}
    ray.wait(list(answers.values()), num_returns=len(answers), timeout=timeout_s + STOP_TIMEOUT_S)
    late = []
    for name, answer in answers.items():
        try:
            is_clean = ray.get(answer, timeout=0)
        except (ray.exceptions.RayError, TimeoutError):
            is_clean = False
        if not is_clean:
            late.append(name)
        ray.kill(runners[name])
    if late:
        raise EngineDead(f"some nodes did not stop cleanly: {', '.join(late)}")
