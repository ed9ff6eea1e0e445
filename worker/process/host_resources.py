"""Cores and memory of the host, and the limits of control groups and of the process. Does not
import torch.

`longshore doctor` reports these numbers, so its report matches what a server will use. `root` is
the folder above /proc and /sys; tests pass another one.
"""

import os
import resource
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from longshore.worker.process.byte_size import byte_size

ROOT: Final = Path("/")

_CPU_PERIOD_US: Final = 100_000
_MEMORY_FILES: Final = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Limit and usage files of control groups, version 2 and version 1."""
CONTROL_GROUP_LIMIT: Final = "control group limit"
ADDRESS_SPACE_LIMIT: Final = "limit of address space (ulimit -v, RLIMIT_AS)"
_PROCESS_LIMITS: Final = (
    (ADDRESS_SPACE_LIMIT, resource.RLIMIT_AS, 0),
    ("limit of data (ulimit -d, RLIMIT_DATA)", resource.RLIMIT_DATA, 5),
)
"""Limits of a process, with the columns of /proc/self/statm that they apply to."""


@dataclass(frozen=True)
class HostMemory:
    """available_bytes: MemAvailable of the kernel, limited by what each limit leaves.
    total_bytes: memory of the host.
    limit_bytes: the lowest limit of a control group, or of the process, below total_bytes, if any.
    limit_name: what sets it.
    """

    available_bytes: int
    total_bytes: int
    limit_bytes: int | None
    limit_name: str | None = None

    @property
    def usable_bytes(self) -> int:
        """What this process can never exceed."""
        return self.total_bytes if self.limit_bytes is None else self.limit_bytes

    @property
    def description(self) -> str:
        """What sets `usable_bytes`, for a message."""
        size = byte_size(self.usable_bytes)
        if self.limit_name is None:
            return f"this machine has {size}"
        return f"the {self.limit_name} is {size}"


def num_physical_cores(allowed: Collection[int] | None = None, root: Path = ROOT) -> int:
    """Physical cores among the allowed processors (None: those that this process may run on).
    Hyperthreads of one core share its vector units, so they count once. If the kernel gives no
    topology, every processor counts as a core."""
    if allowed is None:
        allowed = os.sched_getaffinity(0)
    folders = [root / f"sys/devices/system/cpu/cpu{cpu}/topology" for cpu in allowed]
    cores = [_text(folder / "thread_siblings_list") for folder in folders]
    return len(allowed) if None in cores else len(set(cores))


def default_threads(
    num_workers: int, allowed: Collection[int] | None = None, root: Path = ROOT
) -> tuple[int, str | None]:
    """Threads for each of the workers that share this machine: the physical cores, or the whole
    cores of the CPU quota if these are fewer, divided among them, and at least one. If the quota is
    the limit, the second value says so."""
    cores, quota = num_physical_cores(allowed, root), quota_cores(root)
    if quota is None or quota >= cores:
        return max(1, cores // num_workers), None
    num_threads = max(1, int(quota) // num_workers)
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    return num_threads, f"{threads}: the CPU quota of the control group is {quota:g} cores"


def host_memory(
    root: Path = ROOT, limit_of: Callable[[int], tuple[int, int]] = resource.getrlimit
) -> HostMemory | None:
    """Memory of the host; None if /proc/meminfo is missing or incomplete. limit_of: (soft, hard) of
    a RLIMIT_* of this process."""
    total, available = (meminfo(f"Mem{name}", root) for name in ("Total", "Available"))
    if total is None or available is None:
        return None
    lowest: tuple[int | None, str | None] = (None, None)
    for name, limit, used in _memory_limits(root, limit_of):
        if limit < total:
            available = min(available, max(limit - used, 0))
            if lowest[0] is None or limit < lowest[0]:
                lowest = (limit, name)
    return HostMemory(available, total, *lowest)


def _memory_limits(
    root: Path, limit_of: Callable[[int], tuple[int, int]]
) -> Iterator[tuple[str, int, int]]:
    """Name, limit and usage, in bytes."""
    for folder in control_groups("memory", root):
        for limit_file, used_file in _MEMORY_FILES:
            limit = _number(folder / limit_file)
            if limit is not None:
                yield CONTROL_GROUP_LIMIT, limit, _number(folder / used_file) or 0
    pages = (_text(root / "proc/self/statm") or "").split()
    for name, which, column in _PROCESS_LIMITS:
        limit, _ = limit_of(which)
        if limit != resource.RLIM_INFINITY:
            used = int(pages[column]) * os.sysconf("SC_PAGE_SIZE") if pages else 0
            yield name, limit, used


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
