"""What the host has: cores and memory, and what control groups leave of them. Loads no tensor
library.

The doctor tells what it finds here, so that it says what a server is going to do. root: of the
kernel's files; a test gives another one.
"""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")

_CPU_PERIOD_US: Final = 100_000
_MEMORY_FILES: Final = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Limit and use, of both versions."""


@dataclass(frozen=True)
class HostMemory:
    """available_bytes: that can still be allocated: what the kernel calls available, and not more
    than each control group leaves.
    total_bytes: of the host. limit_bytes: the lowest of its control groups below that, if any.
    """

    available_bytes: int
    total_bytes: int
    limit_bytes: int | None


def num_physical_cores(allowed: Collection[int] | None = None, root: Path = ROOT) -> int:
    """Physical cores among the allowed processors (None: those that this process may run on):
    hyperthreads share the units that matter. Without a topology each is a core."""
    if allowed is None:
        allowed = os.sched_getaffinity(0)
    folders = [root / f"sys/devices/system/cpu/cpu{cpu}/topology" for cpu in allowed]
    cores = [_text(folder / "thread_siblings_list") for folder in folders]
    return len(allowed) if None in cores else len(set(cores))


def host_memory(root: Path = ROOT) -> HostMemory | None:
    """None if /proc/meminfo does not tell."""
    total, available = (meminfo(f"Mem{name}", root) for name in ("Total", "Available"))
    if total is None or available is None:
        return None
    limit = None
    for folder in control_groups("memory", root):
        for limit_file, used_file in _MEMORY_FILES:
            own_limit = _number(folder / limit_file)
            if own_limit is not None and own_limit < total:
                left = max(own_limit - (_number(folder / used_file) or 0), 0)
                available = min(available, left)
                limit = own_limit if limit is None else min(limit, own_limit)
    return HostMemory(available, total, limit)


def available_host_bytes() -> int:
    """Bytes of memory that can still be allocated."""
    memory = host_memory()
    if memory is None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return memory.available_bytes


def quota_cores(root: Path = ROOT) -> float | None:
    """CPU time that the control groups grant, in cores; None if they set no bound."""
    quotas = []
    for folder in control_groups("cpu", root):
        granted, _, period = (_text(folder / "cpu.max") or "max").partition(" ")
        if granted != "max":
            quotas.append(int(granted) / int(period or _CPU_PERIOD_US))
        quota_us = _number(folder / "cpu.cfs_quota_us")
        if quota_us is not None and quota_us > 0:  # -1: none
            quotas.append(quota_us / (_number(folder / "cpu.cfs_period_us") or _CPU_PERIOD_US))
    return min(quotas, default=None)


def control_groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Folders of the control groups that this process is in, of version 2 and, where there is one
    for `controller`, of version 1; of each version the innermost first."""
    mounted = root / "sys/fs/cgroup"
    paths = {mounted: ""}
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[mounted] = path
        elif controller in controllers.split(","):
            paths[mounted / controller] = path
    for mount, path in paths.items():
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # In a container the path may be the host's, and the mount the container's own.
        for length in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:length])


def resident_bytes() -> int:
    """Of this process: what it holds in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def meminfo(name: str, root: Path = ROOT) -> int | None:
    """A line of /proc/meminfo: bytes, or a count."""
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * (1024 if rest.endswith("kB") else 1)
    return None


def _text(path: Path) -> str | None:
    """Without space around it; None if it cannot be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    """None if the file does not hold one whole number."""
    text = _text(path)
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None
