"""`longshore doctor --machine`: what this machine has for serving, and what would help.

Nothing is loaded for it: packages are looked up, not imported.
"""

import importlib.metadata
import platform
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec
from rich.table import Table
from rich.text import Text

import longshore
from longshore.worker.host import available_host_bytes, num_physical_cores

State: TypeAlias = Literal["good", "missing", "bad"]

MIN_OPEN_FILES: Final = 4096
"""A stream takes one, and gateways raise their limit to the hard one."""

EXTRAS: Final = {"audio": (("soundfile", "soxr", "python-multipart"), "speech to text")}
"""Packages, and what they are for, by extra."""

_CPU_FLAGS: Final = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bfloat16",
    "amx_bf16": "AMX bfloat16",
}


class Finding(msgspec.Struct, frozen=True):
    """state: `missing` costs a feature or speed, with `bad` something will fail. advice: what to
    do about it, if anything."""

    what: str
    found: str
    state: State = "good"
    advice: str = ""


def findings(port: int) -> list[Finding]:
    """port: that a server is going to listen on."""
    return [
        Finding("longshore", longshore.__version__),
        _python(),
        *_torch(),
        _cpu(),
        _kernels(),
        _gpus(),
        _memory(),
        _open_files(),
        _shared_memory(),
        _port(port),
        *_extras(),
    ]


def table(found: list[Finding]) -> Table:
    """For a terminal."""
    lines = Table(title="This machine", title_justify="left", show_header=False)
    for finding in found:
        style = {"good": "", "missing": "dim", "bad": "bold red"}[finding.state]
        said = f"{finding.found}. {finding.advice}" if finding.advice else finding.found
        lines.add_row(finding.what, Text(said), style=style)
    return lines


def _python() -> Finding:
    return Finding("Python", f"{platform.python_version()} on {platform.system()}")


def _torch() -> Iterator[Finding]:
    version = _version("torch")
    if version is None:
        yield Finding("torch", "not installed", "bad", "Install longshore again; workers need it.")
    else:
        yield Finding("torch", version)


def _cpu() -> Finding:
    flags: set[str] = set()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith(("flags", "Features")):
            flags = set(line.partition(":")[2].split())
            break
    names = [name for flag, name in _CPU_FLAGS.items() if flag in flags]
    return Finding("CPU", f"{num_physical_cores()} cores, {', '.join(names) or platform.machine()}")


def _kernels() -> Finding:
    folder = Path(longshore.__file__).parent / "worker" / "kernels"
    if any(folder.glob("_native*.so")):
        return Finding("CPU kernels", "compiled")
    return Finding(
        "CPU kernels",
        "not compiled: plain torch computes, several times slower",
        "missing",
        "Install a C++ compiler (g++), then longshore again.",
    )


def _gpus() -> Finding:
    folders = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [
        line.partition(":")[2].strip()
        for path in folders
        for line in _lines(str(path))
        if line.startswith("Model:")
    ]
    if not names:
        return Finding("GPUs", "none", "missing")
    if (_version("torch") or "").endswith("+cpu"):
        return Finding(
            "GPUs", ", ".join(names), "bad", "torch is a build for CPUs; install one for CUDA."
        )
    return Finding("GPUs", ", ".join(names))


def _memory() -> Finding:
    return Finding("memory", f"{available_host_bytes() / 2**30:,.1f} GiB available")


def _open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Finding("open files", "unlimited")
    if hard >= MIN_OPEN_FILES:
        return Finding("open files", f"{hard:,} at most")
    return Finding(
        "open files",
        f"{hard:,} at most",
        "bad",
        f"Each stream takes one: raise the hard limit (ulimit -Hn) to {MIN_OPEN_FILES:,} or more.",
    )


def _shared_memory() -> Finding:
    try:
        free_bytes = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("/dev/shm", "missing", "missing")
    return Finding("/dev/shm", f"{free_bytes / 2**30:,.1f} GiB free")


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            advice = "A server runs there, or choose another --port."
            return Finding(f"port {port}", f"{error.strerror}", "missing", advice)
    return Finding(f"port {port}", "free")


def _extras() -> Iterator[Finding]:
    for extra, (packages, purpose) in EXTRAS.items():
        versions = {package: _version(package) for package in packages}
        lacking = [package for package, version in versions.items() if version is None]
        what = f"extra {extra}"
        if not lacking:
            found = ", ".join(f"{package} {version}" for package, version in versions.items())
            yield Finding(what, found)
        else:
            yield Finding(
                what,
                f"no {', '.join(lacking)}",
                "missing",
                f"For {purpose}: pip install 'longshore[{extra}]'.",
            )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
