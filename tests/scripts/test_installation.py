"""Longshore as a stranger installs it, without a clone: wheel, container, systemd."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.request
import venv
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from longshore.deploy.model.demo import make_prompt
from tests.conftest import ROOT

PACKAGES = ("protocol", "scheduler", "worker", "connectors", "deploy")
KERNELS = f"longshore/worker/kernels/_native{EXTENSION_SUFFIXES[0]}"
READY_TIMEOUT_S = 120.0
INSTALL = ("install", "--quiet", "--disable-pip-version-check", "--no-compile")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that is built from it. The tree is a
    copy, because a build folder in the tree could contain old files. Its kernels are compiled
    without optimisation, which takes a sixth of the time."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("src", *PACKAGES):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "_native*")
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    compiler = tree / "compiler"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0 -fno-lto\n')
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tree / "dist")]
    subprocess.run(
        [*command, str(tree)],
        check=True,
        timeout=600,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "CXX": str(compiler)},
    )
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (built,) = distributions.glob("*.whl")
    return built


def modules_and_data() -> set[str]:
    """Every module, the demo model and the dashboard, by their paths in the package."""
    expected = {f"longshore/{name}" for name in ("__init__.py", "__main__.py", "py.typed")}
    for package in PACKAGES:
        files = [
            path
            for pattern in ("**/*.py", "demo_model/*", "gateway/dashboard/dashboard.*")
            for path in (ROOT / package).glob(pattern)
        ]
        expected |= {f"longshore/{path.relative_to(ROOT).as_posix()}" for path in files}
    # These files have one name: the link src/longshore/testing gives them theirs.
    return {name.replace("longshore/deploy/testing/", "longshore/testing/") for name in expected}


@pytest.mark.slow
@pytest.mark.timeout(700)  # compiles the kernels
def test_wheel_holds_every_module_the_demo_model_the_dashboard_and_the_kernels(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert "longshore/deploy/demo_model/model.safetensors" in packed
    assert packed == modules_and_data() | {KERNELS}


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_source_distribution_holds_what_the_wheel_is_built_from(distributions: Path) -> None:
    (source,) = distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    kernels = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("worker/kernels/native/*.*")}
    assert {f"src/{name}" for name in modules_and_data()} - packed == set()
    assert {*kernels, "setup.py", "LICENSE", "README.md"} - packed == set()


@contextmanager
def serving(command: Sequence[str | Path], folder: Path) -> Iterator[str]:
    """Run the server until the end of the block; yields its URL."""
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            cwd=folder,
            env=variables_without_a_clone(folder),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while (ready := re.search(r"ready at (\S+)", log.read_text())) is None:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
        yield ready[1]
    finally:
        server.terminate()
        server.wait(timeout=60)
    assert server.returncode == 0, log.read_text()


def ask(url: str) -> None:
    """Ask the demo model where a record is, and check its answer."""
    prompt = make_prompt(num_records=8, seed=1)
    body = {"model": "demo_model", "messages": prompt.messages, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)["choices"][0]["message"]["content"]
    assert answer.strip() == prompt.answer


def run(command: Sequence[str | Path], folder: Path) -> str:
    variables = variables_without_a_clone(folder)
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def variables_without_a_clone(folder: Path) -> dict[str, str]:
    ours = ("PYTHON", "LONGSHORE_", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "TMPDIR": str(folder)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wheel_answers_from_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """With all that the wheel requires, and nothing else."""
    venv.create(tmp_path / "venv", with_pip=True)
    bin_dir = tmp_path / "venv" / "bin"
    pip = [str(bin_dir / "pip"), *INSTALL]
    constraints = ROOT / "constraints.txt"
    subprocess.run([*pip, "--constraint", str(constraints), str(wheel)], check=True, timeout=600)
    show = "import longshore.worker.kernels.native as n; print(n.library_path())"
    python = bin_dir / "python"
    assert run([python, "-c", show], tmp_path).startswith(f"{tmp_path}/venv/lib/")
    longshore = bin_dir / "longshore"
    with serving([longshore, "serve", "--port", "0"], tmp_path) as url:
        ask(url)
        assert "idle" in run([longshore, "doctor", "--url", url], tmp_path)
        with urllib.request.urlopen(f"{url}/dashboard", timeout=30) as page:
            assert b"<html" in page.read()


def interpreter(version: str) -> Path:
    """A Python of this version. Skips the test if the machine has none."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [*versions.glob(f"{version}.*/bin/python"), Path(f"/usr/bin/python{version}")]
    for path in found:
        if path.exists():
            return path
    pytest.skip(f"no Python {version} on this machine")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", [pytest.param("3.12", marks=pytest.mark.long), "3.13"])
def test_other_pythons_run_all_that_needs_no_torch(
    distributions: Path, tmp_path: Path, version: str
) -> None:
    """Built from source, in the locked versions, and without a compiler: then without kernels."""
    subprocess.run([interpreter(version), "-m", "venv", tmp_path / "venv"], check=True)
    bin_dir = tmp_path / "venv" / "bin"
    pip = [str(bin_dir / "pip"), *INSTALL, "--no-deps"]
    locks = ["--require-hashes", "--requirement", str(ROOT / "locks" / "runtime.txt")]
    subprocess.run([*pip, *locks], check=True, timeout=400)
    (source,) = distributions.glob("*.tar.gz")
    no_compiler = {**os.environ, "CC": "false", "CXX": "false"}
    subprocess.run([*pip, str(source)], check=True, timeout=200, env=no_compiler)
    modules = "longshore.scheduler.process, longshore.deploy.gateway.process"
    run([bin_dir / "python", "-W", "error", "-c", f"import {modules}"], tmp_path)
    simulate = ["simulate", "--num-requests", "20", "--request-rate", "6"]
    printed = run([bin_dir / "longshore", *simulate, "--cost-model", "h100-llama-8b"], tmp_path)
    assert "TTFT" in printed.upper()


def pip_files() -> list[str]:
    """The files and folders of this machine that pip's configuration names, for a build."""
    pip = [sys.executable, "-m", "pip", "config"]
    debug = subprocess.run([*pip, "debug"], capture_output=True, text=True, check=True).stdout
    listed = subprocess.run([*pip, "list"], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s*(/\S+), exists: True$", debug, re.M)
    found += re.findall(r"(?<![\w:/])(/[\w./-]+)", listed)  # not the path of a URL
    found += [str(Path(path).parent) for path in re.findall(r"file://(/[\w./-]+)", listed)]
    return sorted({path for path in found if Path(path).exists()})


@pytest.fixture
def buildah(tmp_path: Path) -> Iterator[Sequence[str]]:
    """The command, with its own storage."""
    storage = ["--root", str(tmp_path / "storage"), "--runroot", str(tmp_path / "run")]
    command = ["env", "BUILDAH_ISOLATION=chroot", "buildah", *storage]
    yield command
    subprocess.run([*command, "rm", "--all"], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(tmp_path / "storage")


def debian(folder: Path) -> Path:
    """A minimal Debian, packed."""
    root = folder / "root"
    debootstrap = ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm"]
    subprocess.run([*debootstrap, root], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["umount", root / "proc"], check=False, stderr=subprocess.DEVNULL)
    packed = folder / "debian.tar"
    subprocess.run(["tar", "-C", root, "--one-file-system", "-cf", packed, "."], check=True)
    subprocess.run(["rm", "-rf", "--one-file-system", root], check=True)
    return packed


@pytest.mark.long
@pytest.mark.services
@pytest.mark.timeout(3600)
def test_image_answers_as_any_user_and_writes_only_to_its_volume(
    buildah: Sequence[str], tmp_path: Path
) -> None:
    def output(*arguments: str | Path) -> str:
        command = [*buildah, *map(str, arguments)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    output("from", "--name", "base", "scratch")
    output("add", "base", debian(tmp_path), "/")
    output("commit", "base", "localhost/debian")
    volumes = [word for path in pip_files() for word in ("--volume", f"{path}:{path}:ro")]
    dockerfile = ["--file", ROOT / "deploy" / "docker" / "Dockerfile", "--target", "cpu"]
    base = ["--build-arg", "BASE=localhost/debian"]
    output("build", "--format", "docker", *volumes, *base, *dockerfile, "--tag", "longshore", ROOT)
    config = json.loads(output("inspect", "--type", "image", "longshore"))["Docker"]["config"]
    assert config["User"] == "10001:0"
    assert "/health" in config["Healthcheck"]["Test"][-1]

    output("from", "--name", "server", "longshore")
    root = Path(output("mount", "server"))
    size = subprocess.run(["du", "-sx", "-B1", root], capture_output=True, text=True, check=True)
    assert int(size.stdout.split()[0]) < 2e9  # as docs/installation.md says
    data = tmp_path / "data"  # as Kubernetes prepares a volume with fsGroup
    data.mkdir()
    os.chown(data, 0, 4321)
    data.chmod(0o2770)
    marker = tmp_path / "marker"
    marker.touch()
    inside = [
        *buildah,
        "run",
        "--user",
        "4321:4321",
        "--volume",
        f"{data}:/data:rw",
        "server",
        "--",
    ]
    disk = {"cpu_bytes_to_use": "64MiB", "disk_path": "/data/kv", "disk_bytes": "256MiB"}
    flags = ["--kv-connector", "offloading", "--kv-connector-config", json.dumps(disk)]
    with serving([*inside, "longshore", "serve", "--port", "0", *flags], tmp_path) as url:
        ask(url)
        run([*inside, "longshore", "admin", "drain"], tmp_path)
    find = ["find", root, "-xdev", "-type", "f", "-newer", marker, "-not", "-path", f"{root}/tmp/*"]
    written = subprocess.run(find, capture_output=True, text=True, check=True).stdout
    assert (written, (data / "kv").is_dir()) == ("", True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
def test_systemd_accepts_the_units() -> None:
    units = sorted((ROOT / "deploy" / "systemd").iterdir())
    done = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=60
    )
    lines = [line for line in done.stderr.splitlines() if "is not executable" not in line]
    assert (len(units), lines) == (2, [])


def test_servers_of_two_units_do_not_share_a_folder_that_goes_with_one_of_them() -> None:
    """systemd removes a RuntimeDirectory when its unit stops."""
    for unit in (ROOT / "deploy" / "systemd").iterdir():
        lines = unit.read_text().splitlines()
        (runtime,) = [line.partition("=")[2] for line in lines if "RuntimeDirectory=" in line]
        assert ("%i" in runtime) == ("@" in unit.name)
        assert any(line.endswith(f" TMPDIR=%t/{runtime}") for line in lines)
