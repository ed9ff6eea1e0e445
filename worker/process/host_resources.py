"""Cores and memory of the host, and the limits that control groups set. Does not import torch.

`longshore doctor` reports these numbers, so its report matches what a server will use. `root` is
the folder above /proc and /sys; tests pass another one.
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
"""Limit and usage files of control groups, version 2 and version 1."""


@dataclass(frozen=True)
class HostMemory:
    """available_bytes: MemAvailable of the kernel, limited by what each control group has left.
    total_bytes: memory of the host.
    limit_bytes: the lowest control group limit below total_bytes, if any.
    """

    available_bytes: int
    total_bytes: int
    limit_bytes: int | None


def num_physical_cores(allowed: Collection[int] | None = None, root: Path = ROOT) -> int:
    """Physical cores among the allowed processors (None: those that this process may run on).
    Hyperthreads of one core share its vector units, so they count once. If the kernel gives no
    topology, every processor counts as a core."""
    if allowed is None:
        allowed = os.sched_getaffinity(0)
    folders = [root / f"sys/devices/system/cpu/cpu{cpu}/topology" for cpu in allowed]
    cores = [_text(folder / "thread_siblings_list") for folder in folders]
    return len(allowed) if None in cores else len(set(cores))


def host_memory(root: Path = ROOT) -> HostMemory | None:
    """Memory of the host; None if /proc/meminfo is missing or incomplete."""
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
    """CPU quota of the control groups, in cores; None if there is no quota."""
    quotas = []
    for folder in control_groups("cpu", root):
        granted, _, period = (_text(folder / "cpu.max") or "max").partition(" ")
        if granted != "max":
            quotas.append(int(granted) / int(period or _CPU_PERIOD_US))
        quota_us = _number(folder / "cpu.cfs_quota_us")
        if quota_us is not None and quota_us > 0:  # -1: no quota
            quotas.append(quota_us / (_number(folder / "cpu.cfs_period_us") or _CPU_PERIOD_US))
    return min(quotas, default=None)


def control_groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Folders of the control groups of this process: those of version 2, then those of version 1
    for `controller`, if any. Within each version the innermost comes first."""
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
        # In a container the path may be the host's while the mount is the container's.
        for length in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:length])


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def meminfo(name: str, root: Path = ROOT) -> int | None:
    """The value of one line of /proc/meminfo, in bytes or as a count; None if it is missing."""
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * (1024 if rest.endswith("kB") else 1)
    return None


def _text(path: Path) -> str | None:
    """The file's text, stripped; None if it cannot be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    """The file's integer; None if it does not hold exactly one."""
    text = _text(path)
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None
