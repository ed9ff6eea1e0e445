"""`--launcher ray` on a cluster of two raylets, of which one is killed and returns."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.integration.deployment import PATIENCE_S, wait_until
from tests.integration.test_nodes import complete, decisions_after_one, is_ready, post
from tests.integration.topologies import ADDRESSES, TwoNodes

pytestmark = [
    pytest.mark.services,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    # Ray's test cluster does not close the outputs of its processes.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

START_S = 400.0
STORE_BYTES = 80 << 20
# A raylet that does not accept connections is dead after 2 s instead of 20; one that is only slow
# has as long as always.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """With the raylet of node a. A driver connects to a raylet with the address of its host, and
    ends with it; that of node b has another address."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "resources": {"longshore:a": 1}}
    with tempfile.TemporaryDirectory(prefix="r") as folder:  # paths of sockets are short
        monkeypatch.setenv("RAY_TMPDIR", folder)
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
    raylet = cluster.add_node(
        node_ip_address=ADDRESSES["b"], num_cpus=1, object_store_memory=STORE_BYTES
    )
    # The file says which address this host has, and each raylet writes its own into it.
    head = cluster.head_node
    services.write_node_ip_address(head.get_session_dir_path(), head.node_ip_address)
    return raylet


def test_a_killed_raylet_costs_no_stream_and_its_node_returns(cluster: Any, tmp_path: Path) -> None:
    raylet = add_b(cluster)
    topology = TwoNodes(tmp_path, DEMO_MODEL_DIR)
    output = tmp_path / "output.txt"
    with output.open("wb") as stream:
        command = [sys.executable, "-m", "longshore.deploy", "serve"]
        process = psutil.Popen(
            [*command, "--topology", str(topology.path), "--launcher", "ray"],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "RAY_ADDRESS": cluster.address},
        )

    def has_ended() -> bool:
        return process.poll() is not None

    try:
        for name, url in topology.urls.items():
            said = f"node {name}: ready at {url}"
            wait_until(lambda said=said: said in output.read_text() or has_ended(), START_S)
            assert not has_ended()
        url = topology.urls["a"]
        wait_until(lambda: is_ready(url) and len(decisions_after_one(url)) == 2)

        fields: dict[str, object] = {"max_tokens": 600, "ignore_eos": True, "stream": True}
        with ExitStack() as stack:
            streams = [stack.enter_context(post(url, f"{n} goes on", **fields)) for n in range(4)]
            for each in streams:
                assert each.readline().startswith(b"data: ")
            cluster.remove_node(raylet, allow_graceful=False)
            for each in streams:
                assert b'"finish_reason":"length"' in each.read()
        wait_until(lambda: "node b is lost" in output.read_text(), START_S)
        complete(url, "node a serves alone")

        add_b(cluster)
        returned = f"node b: ready at {topology.urls['b']}"
        wait_until(lambda: output.read_text().count(returned) == 2, START_S)
        wait_until(lambda: is_ready(topology.urls["b"]))
        complete(topology.urls["b"], "node b serves again")
        nodes = _nodes(topology)
        assert len(nodes) == 2
        process.terminate()
        assert process.wait(timeout=PATIENCE_S) == 0
        psutil.wait_procs(nodes, timeout=PATIENCE_S)
        assert _nodes(topology) == []
    except BaseException:
        print(output.read_text())
        raise
    finally:
        with contextlib.suppress(psutil.Error):
            process.kill()
        for node in _nodes(topology):
            node.kill()


def _nodes(topology: TwoNodes) -> list[psutil.Process]:
    """The processes of `longshore node`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if "node" in command and str(topology.path) in command:
                found.append(process)
    return found
