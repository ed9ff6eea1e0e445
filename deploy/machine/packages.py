"""Findings about libraries: versions, whether they load, and whether they are compatible."""

import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

import longshore
from longshore.connectors.lmcache.options import install_lmcache
from longshore.deploy.machine.children import ProbeResult, probe_command, run_all
from longshore.deploy.machine.finding import Finding
from longshore.deploy.machine.host import Host
from longshore.protocol.install_command import install_command

VersionOf = Callable[[str], str | None]
RunProbes = Callable[[list[str]], Mapping[str, ProbeResult]]


class Extra(msgspec.Struct, frozen=True):
    """An extra of Longshore.

    packages: its packages. hints: what to do, by a part of the failure's message.
    install:  command; None: `install_command`.
    """

    name: str
    packages: tuple[str, ...]
    purpose: str
    install: Callable[[], str] | None = None
    hints: Mapping[str, str] = {}

    @property
    def command(self) -> str:
        return self.install() if self.install else install_command(self.name)


# Only what this version uses: what is recommended here costs users a download.
EXTRAS: Final = (
    Extra("audio", ("soundfile", "soxr"), "speech to text"),
    Extra(
        "nixl",
        ("nixl", "nixl-cu13"),
        "prefill and decode apart; faster access to the files of the disk tier",
        # Its dependencies would install the builds for both CUDA versions.
        install=lambda: "pip install --no-deps 'nixl>=1.5' 'nixl-cu13>=1.5'",
        hints={"libcuda": "It needs an NVIDIA driver's libcuda.so.1 or a build for CPUs"},
    ),
    Extra(
        "mooncake",
        ("mooncake-transfer-engine-non-cuda",),
        "prefill and decode apart, with Mooncake",
        hints={"libibverbs": "It needs the system package libibverbs1"},
    ),
    Extra("cuda", ("cupy-cuda13x",), "prefill and decode apart, with NCCL between GPUs"),
    Extra("lmcache", ("lmcache",), "KV in LMCache's tiers", install=install_lmcache),
    Extra(
        "otel",
        ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
        "spans of requests for OpenTelemetry",
    ),
    Extra("ray", ("ray",), "nodes of a topology, placed by Ray"),
    Extra("s3", ("obstore",), "a KV tier in object stores"),
    Extra("tokenizers", ("sentencepiece", "tiktoken"), "tokenizers without tokenizer.json"),
    Extra("xgrammar", ("xgrammar",), "a second backend of structured output"),
)


def version_of(package: str) -> str | None:
    """The installed version; None if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def run_probes(names: list[str]) -> Mapping[str, ProbeResult]:
    """Import the libraries in child processes."""
    return run_all({name: probe_command(name) for name in names})


def package_findings(
    host: Host, versions: VersionOf = version_of, probe: RunProbes = run_probes
) -> Iterator[Finding]:
    """All findings of this module."""
    installed = [extra for extra in EXTRAS if any(map(versions, extra.packages))]
    outcomes = probe(["torch", *(extra.name for extra in installed)])
    yield Finding("longshore", longshore.__version__)
    yield Finding("Python", f"{platform.python_version()} on {platform.system()}")
    yield _torch(versions("torch"), outcomes["torch"])
    yield _gpus(host, versions("torch"), outcomes["torch"])
    for extra in EXTRAS:
        yield _extra(extra, versions, outcomes.get(extra.name))


def _torch(version: str | None, outcome: ProbeResult) -> Finding:
    if version is None:
        return Finding(
            "torch", "not installed", "problem", "Workers need it", "Reinstall Longshore"
        )
    if outcome.failure is not None:
        return Finding(
            "torch",
            f"{version}: {outcome.failure}",
            "problem",
            "Workers need it",
            "pip install --force-reinstall torch",
        )
    return Finding("torch", version)


def _gpus(host: Host, version: str | None, outcome: ProbeResult) -> Finding:
    """The driver's GPUs, and whether torch can use them."""
    names = [
        line.partition(":")[2].strip()
        for path in host.paths("/proc/driver/nvidia/gpus/*/information")
        for line in path.read_text("utf-8", "replace").splitlines()
        if line.startswith("Model:")
    ]
    devices = outcome.facts.get("devices", [])
    if devices:
        each = ", ".join(
            f"{device['name']} ({device['free'] / 2**30:,.1f} of {device['total'] / 2**30:,.1f} "
            "GiB free)"
            for device in devices
        )
        return Finding("GPUs", each)
    if not names:
        return Finding("GPUs", "none", "absent", "Workers compute on the CPU")
    found = ", ".join(names)
    if outcome.failure is not None:
        return Finding(
            "GPUs",
            found,
            "problem",
            "They cannot be used, because torch does not load",
            "See the finding about torch",
        )
    if outcome.facts.get("cuda") is None:
        return Finding(
            "GPUs",
            found,
            "problem",
            f"torch {version} is a CPU build and cannot use them",
            "pip install --force-reinstall torch, from an index with CUDA builds",
        )
    supported, needs = outcome.facts["driver_cuda"], outcome.facts["cuda"]
    needs_major, needs_minor = (int(part) for part in f"{needs}.0".split(".")[:2])
    if 0 < supported < needs_major * 1000 + needs_minor * 10:
        newest = f"{supported // 1000}.{supported % 1000 // 10}"
        return Finding(
            "GPUs",
            found,
            "problem",
            f"torch {version} is for CUDA {needs}, but the driver supports at most CUDA {newest}",
            f"Update the driver, or install torch for CUDA {newest}",
        )
    return Finding(
        "GPUs",
        found,
        "problem",
        f"torch {version} does not find them",
        "Check nvidia-smi, CUDA_VISIBLE_DEVICES, and the container's GPUs (docker: --gpus all)",
    )


def _extra(extra: Extra, versions: VersionOf, outcome: ProbeResult | None) -> Finding:
    what = f"extra {extra.name}"
    found = {package: versions(package) for package in extra.packages}
    missing = [package for package, version in found.items() if version is None]
    shown = ", ".join(f"{package} {version}" for package, version in found.items() if version)
    if outcome is None:
        return Finding(what, "not installed", "absent", f"For {extra.purpose}", extra.command)
    if missing:
        return Finding(
            what, f"{shown}, but no {', '.join(missing)}", "warning", _lost(extra), extra.command
        )
    if outcome.failure is not None:
        fixes = [fix for part, fix in extra.hints.items() if part in outcome.failure]
        again = f"{extra.command} --force-reinstall"
        return Finding(
            what, f"{shown}: {outcome.failure}", "warning", _lost(extra), (fixes or [again])[0]
        )
    facts = outcome.facts
    if facts.get("unusable"):
        why = ", ".join(f"{name}: {reason}" for name, reason in facts["unusable"].items())
        return Finding(
            what,
            f"{shown}; plugins that cannot be created: {why}",
            "warning",
            _lost(extra),
            "Run with NIXL_LOG_LEVEL=DEBUG; usual causes are a second UCX in the process, and "
            "UCX_TLS or UCX_MODULE_DIR of another one",
        )
    plugins = f"; usable: {', '.join(facts['usable'])}" if facts.get("usable") else ""
    return Finding(what, shown + plugins)


def _lost(extra: Extra) -> str:
    return f"No {extra.purpose}"
