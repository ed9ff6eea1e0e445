"""The chart of deploy/kubernetes/ as Helm renders it: it matches the schemas of Kubernetes, and the
server takes its flags. No API server is here."""

import json
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from longshore.deploy.cli.main import app
from longshore.deploy.gateway.vllm_metrics import ALWAYS
from longshore.deploy.topology.file import Topology, read_topology
from tests.conftest import ROOT

pytestmark = pytest.mark.services

FOLDER: Final = ROOT / "deploy" / "kubernetes"
TOOLS: Final = ROOT / ".venv-clients" / "deployment_tools" / "bin"
RENDER: Final = """
import json, sys, helm_python
with helm_python.Chart.load(sys.argv[1]) as chart:
    print(json.dumps(chart.render(json.loads(sys.argv[2]), name="longshore", namespace="default")))
"""
CUSTOM: Final = ("PodMonitor", "ScaledObject")  # kinds whose schemas Kubernetes does not have
TOPOLOGY: Final = """
[nodes.a]
address = "127.0.0.1"

[settings]
kv_connector = "nixl"
drain_timeout_s = 60

[[engines]]
node = "a"
role = "prefill"

[[engines]]
node = "a"
role = "decode"

[[gateways]]
node = "a"
port = 8000
"""
VALUES: Final[dict[str, dict[str, Any]]] = {
    "defaults": {},
    "everything": {
        "model": "Qwen/Qwen3-0.6B",
        "args": ["--max-model-len", "32k"],
        "env": [{"name": "HF_TOKEN", "value": "x"}],
        "imagePullSecrets": [{"name": "registry"}],
        "replicas": 3,
        "drainTimeoutS": 20,
        "keysSecret": "keys",
        "volume": {"storageClassName": "fast"},
        "diskTier": {"bytes": "10GiB"},
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "podMonitor": {"enabled": True},
        "keda": {"enabled": True},
    },
    "topology": {
        "topology": {
            "file": TOPOLOGY,
            "nodes": {
                "a": {"host": "host-a", "keysSecret": "keys-a", "gatewayPort": 8000},
                "b": {"host": "host-b"},
            },
        },
        "env": [{"name": "HF_TOKEN", "value": "x"}],
        "podMonitor": {"enabled": True},
    },
}


@cache
def rendered(name: str) -> list[dict[str, Any]]:
    """The objects of the chart with one of the VALUES."""
    command = [TOOLS / "python", "-c", RENDER, FOLDER / "chart", json.dumps(VALUES[name])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout).values()
    return [each for text in files for each in yaml.safe_load_all(text) if each is not None]


def of_kind(kind: str, values: str) -> list[dict[str, Any]]:
    return [each for each in rendered(values) if each["kind"] == kind]


def pod(values: str, index: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """The spec of a pod, and its container."""
    spec = of_kind("StatefulSet", values)[index]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


@pytest.mark.parametrize("name", VALUES)
def test_objects_match_the_schemas_of_kubernetes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "objects.yaml"
    path.write_text(
        yaml.safe_dump_all([each for each in rendered(name) if each["kind"] not in CUSTOM])
    )
    command = [TOOLS / "kubernetes-validate", "--strict", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["defaults", "everything"])
def test_the_server_takes_its_arguments(name: str) -> None:
    _, container = pod(name)
    # Kubernetes puts in the variable of the container.
    args = [arg.replace("$(NAMESPACE)", "default") for arg in container["args"]]
    app.parse_args(args, exit_on_error=False, print_error=False)
    assert ("--api-key-file=/etc/longshore/keys.toml" in container["args"]) == (
        name == "everything"
    )


@pytest.mark.parametrize("name", VALUES)
def test_a_pod_has_as_long_to_end_as_its_drain_takes(name: str) -> None:
    spec, container = pod(name)
    drain_s = VALUES[name].get("drainTimeoutS", 60)
    assert spec["terminationGracePeriodSeconds"] >= drain_s + 5 + 37  # preStop, notify_stopping
    (*shell, script) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, script.split("exec ")[1]) == (["sh", "-c"], "longshore admin drain")
    if name != "topology":
        assert f"--drain-timeout-s={drain_s}" in container["args"]


@pytest.mark.parametrize("name", VALUES)
def test_probes_ask_for_what_they_should(name: str) -> None:
    _, container = pod(name)
    startup = container["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] == 600
    paths = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness")]
    assert (paths, container["livenessProbe"]["httpGet"]["path"]) == (["/ready"] * 2, "/health")


@pytest.mark.parametrize("name", VALUES)
def test_pods_are_not_root_and_write_only_to_their_volumes(name: str) -> None:
    spec, container = pod(name)
    assert spec["securityContext"]["runAsNonRoot"]
    # Otherwise the group could use private files, which the server refuses.
    assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert container["securityContext"]["readOnlyRootFilesystem"]
    writable = [each["mountPath"] for each in container["volumeMounts"] if "readOnly" not in each]
    assert writable == ["/data", "/tmp", "/dev/shm"]


def test_keys_are_files_of_root_that_the_group_reads() -> None:
    spec, container = pod("everything")
    (keys,) = [volume["secret"] for volume in spec["volumes"] if volume["name"] == "keys"]
    assert keys == {"secretName": "keys", "defaultMode": 0o440}
    assert {"name": "keys", "mountPath": "/etc/longshore", "readOnly": True} in (
        container["volumeMounts"]
    )


def test_the_disk_tier_is_on_the_volume_of_the_pod() -> None:
    _, container = pod("everything")
    (config,) = [arg for arg in container["args"] if arg.startswith("--kv-connector-config=")]
    assert json.loads(config.partition("=")[2])["disk_path"].startswith("/data/")
    (claim,) = of_kind("StatefulSet", "everything")[0]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"


def test_services_and_monitors_select_the_pods() -> None:
    labels = of_kind("StatefulSet", "everything")[0]["spec"]["template"]["metadata"]["labels"]
    for service in of_kind("Service", "everything"):
        assert service["spec"]["selector"].items() <= labels.items()
    (monitor,) = of_kind("PodMonitor", "everything")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["spec"]["jobLabel"]] == "longshore"  # which the alerts expect


def test_pods_are_scaled_by_a_metric_that_is_served() -> None:
    (scaled,) = of_kind("ScaledObject", "everything")
    assert "replicas" not in of_kind("StatefulSet", "everything")[0]["spec"]
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert query.startswith("sum(vllm:num_requests_waiting{")
    assert "num_requests_waiting" in ALWAYS


def test_each_node_of_a_topology_has_a_pod_that_reads_it(tmp_path: Path) -> None:
    (config,) = of_kind("ConfigMap", "topology")
    path = tmp_path / "topology.toml"
    path.write_text(config["data"]["topology.toml"])
    assert isinstance(read_topology(path), Topology)
    assert tomllib.loads(path.read_text()) == tomllib.loads(TOPOLOGY)
    assert of_kind("Service", "topology") == []
    for index, node in enumerate(("a", "b")):
        spec, container = pod("topology", index)
        assert container["args"] == [
            "node",
            "--topology",
            "/topology/topology.toml",
            "--name",
            node,
        ]
        assert spec["nodeSelector"] == {"kubernetes.io/hostname": f"host-{node}"}
        assert ("startupProbe" in container) == (node == "a")


def test_the_base_of_kustomize_is_the_chart_with_its_defaults() -> None:
    """To write it: helm template longshore deploy/kubernetes/chart"""
    kustomization = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())
    (name,) = kustomization["resources"]
    base = list(yaml.safe_load_all((FOLDER / "base" / name).read_text()))
    assert base == rendered("defaults")


def test_hadolint_accepts_the_dockerfile() -> None:
    command = [TOOLS / "hadolint", ROOT / "deploy" / "docker" / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
