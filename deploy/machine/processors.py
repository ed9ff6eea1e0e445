"""Findings about processors: features, quota, NUMA, governor, clock source."""

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import longshore
from longshore.deploy.machine.finding import Finding
from longshore.deploy.machine.host import Host
from longshore.worker.process.host_resources import (
    default_threads,
    num_physical_cores,
    quota_cores,
)

_FEATURES: Final = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bfloat16",
    "amx_bf16": "AMX bfloat16",
}
_SELF_TUNING: Final = ("intel_pstate", "amd-pstate-epp")
_FAST_CLOCKS: Final = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")


def processor_findings(host: Host) -> Iterator[Finding]:
    """All findings of this module."""
    yield _cpu(host)
    yield kernels(Path(longshore.__file__).parent / "worker" / "kernels")
    yield from _quota(host)
    yield from _numa(host)
    yield from _governor(host)
    yield from _clock_source(host)


def _cpu(host: Host) -> Finding:
    flags: set[str] = set()
    for line in (host.text("/proc/cpuinfo") or "").splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.partition(":")[2].split())
            break
    names = [name for flag, name in _FEATURES.items() if flag in flags]
    has_what = ", ".join(names) or f"{platform.machine()} without AVX2"
    found = f"{num_physical_cores(host.allowed_cpus, host.root)} cores, {has_what}"
    if platform.machine() == "x86_64" and flags and "avx2" not in flags:
        return Finding(
            "CPU",
            found,
            "warning",
            "The CPU kernels need AVX2; plain PyTorch is used instead, which is several times "
            "slower",
            "Use a newer processor; in a virtual machine, pass the host's CPU through",
        )
    return Finding("CPU", found)


def kernels(folder: Path) -> Finding:
    """folder: the folder of the compiled kernels, if any."""
    if any(folder.glob("_native*.so")):
        return Finding("CPU kernels", "compiled")
    return Finding(
        "CPU kernels",
        "not compiled",
        "warning",
        "On CPUs plain PyTorch is used, which is several times slower",
        "Install a C++ compiler (g++), then reinstall Longshore",
    )


def _quota(host: Host) -> Iterator[Finding]:
    quota, num_cpus = quota_cores(host.root), len(host.allowed_cpus)
    if quota is None:
        yield Finding("CPU quota", "none")
        return
    found = f"{quota:g} cores of {num_cpus} processors"
    _, limit = default_threads(1, host.allowed_cpus, host.root)
    if limit is not None:
        found += f"; a CPU worker computes with {limit.partition(':')[0]}"
    if quota >= 1:
        yield Finding("CPU quota", found)
    else:
        yield Finding(
            "CPU quota",
            found,
            "warning",
            "All processes of a server share less than a core, so the system throttles them",
            "Raise the container's CPU limit",
        )


def _numa(host: Host) -> Iterator[Finding]:
    nodes = {}
    for path in host.paths("/sys/devices/system/node/node[0-9]*"):
        cpus = _cpus_of((host.text(f"/sys/devices/system/node/{path.name}/cpulist")) or "")
        nodes[path.name] = cpus & host.allowed_cpus
    used = [f"{name} ({len(cpus)} processors)" for name, cpus in nodes.items() if cpus]
    if len(used) > 1:
        first = next(name for name, cpus in nodes.items() if cpus).removeprefix("node")
        yield Finding(
            "NUMA",
            ", ".join(used),
            "warning",
            "A CPU worker with threads on several nodes is slowed down by remote memory",
            f"Start with numactl --cpunodebind={first} --membind={first}, one engine per node",
        )
    elif nodes:
        yield Finding("NUMA", ", ".join(used))


def _cpus_of(text: str) -> frozenset[int]:
    """Parse the kernel's format, such as `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _governor(host: Host) -> Iterator[Finding]:
    folder = f"/sys/devices/system/cpu/cpu{min(host.allowed_cpus)}/cpufreq"
    governor, driver = (
        host.text(f"{folder}/scaling_governor"),
        host.text(f"{folder}/scaling_driver"),
    )
    if governor is None:
        return
    if governor == "powersave" and driver not in _SELF_TUNING:
        yield Finding(
            "CPU governor",
            governor,
            "warning",
            "Processors stay at their lowest frequency",
            "cpupower frequency-set -g performance",
        )
    else:
        yield Finding("CPU governor", governor)


def _clock_source(host: Host) -> Iterator[Finding]:
    source = host.text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source is None:
        return
    if source in _FAST_CLOCKS:
        yield Finding("clock source", source)
    else:
        yield Finding(
            "clock source",
            source,
            "warning",
            "Reading the clock needs a system call, which slows down steps and streams",
            "See dmesg for why the kernel does not use the tsc; boot with tsc=reliable if possible",
        )
