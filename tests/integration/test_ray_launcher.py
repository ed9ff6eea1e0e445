"""`--launcher ray` on a cluster of two raylets, of which one is killed and returns."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.integration.deployment import PATIENCE_S, wait_until
from tests.integration.test_nodes import complete, has_engine, num_pulled_blocks, post
from tests.integration.topologies import ADDRESSES, TwoNodes, free_ports

pytestmark = [
    pytest.mark.services,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    # Ray's test cluster does not close the outputs of its processes.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

START_S: Final = 400.0
RAYLET: Final = {"num_cpus": 0, "object_store_memory": 80 << 20}
# A raylet that does not accept connections is dead after 2 s instead of 20; one that is only slow
# has as long as always.
HEALTH: Final = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """With the raylet of node a. A driver connects to a raylet with the address of its host, and
    ends with it; that of node b has another address."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    head = {**RAYLET, "resources": {"longshore:a": 1}, "include_log_monitor": False}
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="r") as folder,  # paths of sockets are short
    ):
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("UCX_TLS", "tcp")
        started = cluster_utils.Cluster(
            initialize_head=True,
            head_node_args={**head, "include_dashboard": False, "_system_config": HEALTH},
        )
        try:
            yield started
        finally:
            started.shutdown()


def add_b(cluster: Any) -> Any:
    services = pytest.importorskip("ray._private.services")
    raylet = cluster.add_node(node_ip_address=ADDRESSES["b"], **RAYLET)
    # In older versions, a file says which address this host has, and each raylet writes its own.
    if (write := getattr(services, "write_node_ip_address", None)) is not None:
        head = cluster.head_node
        write(head.get_session_dir_path(), head.node_ip_address)
    return raylet


class Launcher:
    """`longshore serve --launcher ray`. It ends with this context, and so do its nodes."""

    def __init__(self, cluster: Any, topology: Path) -> None:
        self._topology = topology
        self._output_file = topology.parent / "output.txt"
        command = [sys.executable, "-m", "longshore.deploy", "serve"]
        with self._output_file.open("wb") as output:
            self.process = psutil.Popen(
                [*command, "--topology", str(topology), "--launcher", "ray"],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RAY_ADDRESS": cluster.address},
            )

    @property
    def output(self) -> str:
        return self._output_file.read_text()

    def wait_for(self, line: str, count: int = 1) -> None:
        """Until it has said so, `count` times."""
        wait_until(
            lambda: self.output.count(line) == count or self.process.poll() is not None, START_S
        )
        assert self.output.count(line) == count, self.output

    def nodes(self) -> list[psutil.Process]:
        """The processes of `longshore node`."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                if "node" in command and str(self._topology) in command:
                    found.append(process)
        return found

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *error: object) -> None:
        if any(error):
            print(self.output)
        with contextlib.suppress(psutil.Error):
            self.process.kill()
        self.process.wait(PATIENCE_S)
        for node in self.nodes():
            node.kill()


@pytest.mark.long
def test_no_process_of_a_node_outlives_the_launcher(cluster: Any, tmp_path: Path) -> None:
    path = tmp_path / "topology.toml"
    port = free_ports(ADDRESSES["a"], 1)
    path.write_text(
        "[settings]\nnum_blocks = 600\nmax_num_seqs = 32\nthreads = 1\n"
        f'state_dir = "{tmp_path}/state"\n[nodes.a]\naddress = "{ADDRESSES["a"]}"\n'
        f'[[engines]]\nnode = "a"\n[[gateways]]\nnode = "a"\nport = {port}\n'
    )
    with Launcher(cluster, path) as launcher:
        launcher.wait_for(f"node a: ready at http://{ADDRESSES['a']}:{port}")
        (node,) = launcher.nodes()
        family = [node, *node.children(recursive=True)]
        assert len(family) == 5  # with the fork server, the worker, the scheduler and the gateway
        launcher.process.kill()
        psutil.wait_procs(family, timeout=PATIENCE_S)
        assert [process for process in family if process.is_running()] == []


def test_a_killed_raylet_costs_no_stream_and_its_node_returns(cluster: Any, tmp_path: Path) -> None:
    raylet = add_b(cluster)
    topology = TwoNodes(
        tmp_path, DEMO_MODEL_DIR, roles=("prefill", "decode"), more='dtype = "float32"\n'
    )
    with Launcher(cluster, topology.path) as launcher:
        for name, url in topology.urls.items():
            launcher.wait_for(f"node {name}: ready at {url}")
        url = topology.urls["a"]
        for engine in (0, 1):
            wait_until(lambda engine=engine: has_engine(url, engine))  # type: ignore[misc]
        complete(url, "Node a computes this prompt, and node b the output. " * 8, 16)
        wait_until(lambda: num_pulled_blocks(url) > 0)

        fields: dict[str, object] = {"max_tokens": 600, "ignore_eos": True, "stream": True}
        with ExitStack() as stack:
            streams = [stack.enter_context(post(url, f"{n} goes on", **fields)) for n in range(4)]
            for each in streams:
                assert each.readline().startswith(b"data: ")
            cluster.remove_node(raylet, allow_graceful=False)
            for each in streams:
                assert b'"finish_reason":"length"' in each.read()
        launcher.wait_for("node b is lost")

        add_b(cluster)
        url = topology.urls["b"]
        launcher.wait_for(f"node b: ready at {url}", count=2)
        for engine in (0, 1):
            wait_until(lambda engine=engine: has_engine(url, engine))  # type: ignore[misc]
        complete(url, "Node b is back, and computes the output again. " * 8, 16)
        wait_until(lambda: num_pulled_blocks(url) > 0)

        nodes = launcher.nodes()
        assert len(nodes) == 2
        launcher.process.terminate()
        assert launcher.process.wait(timeout=PATIENCE_S) == 0, launcher.output
        psutil.wait_procs(nodes, timeout=PATIENCE_S)
        assert launcher.nodes() == []
    assert secrets_in_ray(cluster, tmp_path) == []


def secrets_in_ray(cluster: Any, folder: Path) -> list[str]:
    """Files of Ray with a part of one of the key files."""
    secrets = [(folder / name).read_bytes().strip() for name in ("transfer.key", "block_hash_seed")]
    secrets += [
        msgspec.json.decode((folder / f"{name}.json").read_bytes())["secret"].encode()
        for name in ADDRESSES
    ]
    session = Path(cluster.head_node.get_session_dir_path())
    files = [path for path in session.rglob("*") if path.is_file()]
    assert any("worker" in path.name for path in files)  # the logs of actors
    return [str(path) for path in files for secret in secrets if secret in path.read_bytes()]
