"""What the host has: cores and memory. Loads no tensor library."""

import os
from pathlib import Path


def num_physical_cores() -> int:
    """Physical cores that this process may run on: hyperthreads share the units that matter."""
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            return len(allowed)
    return len(cores)


def available_host_bytes() -> int:
    """Bytes of memory that can still be allocated: what the kernel calls available, and not more
    than the control group allows."""
    return min(_available_bytes(), _available_cgroup_bytes())


def resident_bytes() -> int:
    """Of this process: what it holds in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _available_cgroup_bytes() -> int:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used_bytes = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return 2**63
    return 2**63 if limit == "max" else max(0, int(limit) - used_bytes)
