"""Findings about libraries, given the results of their imports."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.machine.children import ProbeResult
from longshore.deploy.machine.finding import Finding
from longshore.deploy.machine.packages import EXTRAS, package_findings
from longshore.protocol.install_command import install_command
from tests.conftest import ROOT
from tests.deploy.machine.fake_host import fake_host

H100 = {"name": "NVIDIA H100", "total": 80 << 30, "free": 78 << 30}
GPU = {"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t NVIDIA H100\nIRQ: 1\n"}
NO_CUDA = {"cuda": None, "driver_cuda": 0, "devices": []}
ALL = {
    "torch": "2.13.0",
    "nixl": "1.5",
    "nixl-cu13": "1.5",
    "obstore": "0.9",
}


def look(
    root: Path,
    versions: Mapping[str, str] = ALL,
    files: Mapping[str, str] = {},
    **outcomes: Mapping[str, Any] | str,
) -> dict[str, Finding]:
    """outcomes: by name of the probe, facts, or the reason why there are none. By default torch has
    no CUDA, and all others load."""
    asked: list[str] = []

    def probe(names: list[str]) -> dict[str, ProbeResult]:
        asked.extend(names)
        facts = {name: outcomes.get(name, {}) for name in names}
        facts["torch"] = outcomes.get("torch", NO_CUDA)
        return {
            name: ProbeResult({}, each) if isinstance(each, str) else ProbeResult(each)
            for name, each in facts.items()
        }

    found = {
        each.what: each for each in package_findings(fake_host(root, files), versions.get, probe)
    }
    for name in asked[1:]:  # packages that are not installed are not imported
        assert found[f"extra {name}"].state != "absent"
    return found


def test_what_is_not_installed_is_not_imported_and_comes_with_its_command(tmp_path: Path) -> None:
    found = look(tmp_path, {"torch": "2.13.0"})
    for name, command in (
        ("audio", install_command("audio")),
        ("nixl", "pip install --no-deps 'nixl>=1.5' 'nixl-cu13>=1.5'"),
        ("cuda", install_command("cuda")),
        ("s3", install_command("s3")),
        ("xgrammar", install_command("xgrammar")),
        (
            "lmcache",
            f"{install_command('lmcache')} && pip install --no-deps lmcache==0.5.6",
        ),
    ):
        assert (found[f"extra {name}"].state, found[f"extra {name}"].fix) == ("absent", command)
    assert (found["GPUs"].state, found["torch"].state) == ("absent", "ok")


def test_what_loads_is_shown_with_its_versions(tmp_path: Path) -> None:
    found = look(tmp_path, nixl={"usable": ["UCX", "POSIX"], "unusable": {}})
    assert found["extra nixl"] == Finding(
        "extra nixl", "nixl 1.5, nixl-cu13 1.5; usable: UCX, POSIX"
    )
    assert found["extra s3"] == Finding("extra s3", "obstore 0.9")


@pytest.mark.parametrize(
    ("outcomes", "what", "words"),
    [
        (
            {"nixl": "ImportError: libcuda.so.1: cannot open shared object file"},
            "extra nixl",
            ["libcuda.so.1", "It needs an NVIDIA driver's libcuda.so.1"],
        ),
        (
            {"s3": "its import crashes (SIGSEGV): no output"},
            "extra s3",
            ["SIGSEGV", f"{install_command('s3')} --force-reinstall"],
        ),
        (
            {"nixl": {"usable": [], "unusable": {"UCX": "NIXL_ERR_BACKEND"}}},
            "extra nixl",
            ["UCX: NIXL_ERR_BACKEND", "UCX_TLS"],
        ),
    ],
)
def test_what_does_not_work_says_why_and_how_to_mend_it(
    tmp_path: Path, outcomes: dict[str, Any], what: str, words: list[str]
) -> None:
    found = look(tmp_path, **outcomes)[what]
    said = f"{found.found} {found.means} {found.fix}"
    assert found.state == "warning"
    assert all(word in said for word in words), said


def test_half_of_an_extra_is_named(tmp_path: Path) -> None:
    found = look(tmp_path, {"torch": "2", "nixl": "1.5"})["extra nixl"]
    assert (found.state, found.found) == ("warning", "nixl 1.5, but no nixl-cu13")


def test_what_no_code_of_this_version_imports_is_not_recommended(tmp_path: Path) -> None:
    """Each extra is imported somewhere besides the doctor."""
    code = "".join(
        path.read_text("utf-8")
        for folder in ("connectors", "deploy", "scheduler", "worker")
        for path in (ROOT / folder).rglob("*.py")
        if "machine" not in path.parts
    )
    modules = {
        "audio": "soundfile",
        "cuda": "cupy",
        "otel": "opentelemetry",
        "s3": "obstore",
    }
    for extra in EXTRAS:
        module = modules.get(extra.name, extra.name)
        assert re.search(rf"import {module}\b|from {module}\b|\"{module}[.\w]*\"", code), extra.name
    assert not {"RDMA", "locked memory"} & look(tmp_path).keys()


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        (NO_CUDA, ["is a CPU build", "index with CUDA builds"]),
        (
            {"cuda": "13.0", "driver_cuda": 12080, "devices": []},
            ["is for CUDA 13.0, but the driver supports at most CUDA 12.8", "Update the driver"],
        ),
        (
            {"cuda": "13.0", "driver_cuda": 13000, "devices": []},
            ["does not find them", "--gpus all"],
        ),
        ("its import hangs (longer than 60 s)", ["because torch does not load"]),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_a_problem_with_its_reason(
    tmp_path: Path, torch: Any, words: list[str]
) -> None:
    found = look(tmp_path, files=GPU, torch=torch)["GPUs"]
    assert (found.state, found.found) == ("problem", "NVIDIA H100")
    assert all(word in f"{found.means} {found.fix}" for word in words)


def test_a_gpu_is_shown_with_its_memory(tmp_path: Path) -> None:
    torch = {"cuda": "13.0", "driver_cuda": 13000, "devices": [H100]}
    found = look(tmp_path, files=GPU, torch=torch)
    assert found["GPUs"] == Finding("GPUs", "NVIDIA H100 (78.0 of 80.0 GiB free)")


def test_a_torch_that_is_missing_or_does_not_load_is_a_problem(tmp_path: Path) -> None:
    assert look(tmp_path, {}, torch="ModuleNotFoundError: torch")["torch"].state == "problem"
    found = look(tmp_path, torch="its import crashes (SIGILL): no output")["torch"]
    assert (found.state, "SIGILL" in found.found) == ("problem", True)
