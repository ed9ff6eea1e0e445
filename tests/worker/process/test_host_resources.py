"""Cores and memory, read from folders of fictitious machines."""

import os
import resource
from pathlib import Path

import pytest

from longshore.deploy.machine.host import Host
from longshore.deploy.machine.processors import processor_findings
from longshore.deploy.machine.resources import resource_findings
from longshore.worker.process.host_resources import (
    CONTROL_GROUP_LIMIT,
    HostMemory,
    available_host_bytes,
    default_threads,
    host_memory,
    num_physical_cores,
    quota_cores,
)
from tests.deploy.machine.fake_host import GIB, fake_host

SLICE = "sys/fs/cgroup/longshore.slice"
NESTED = {
    "proc/self/cgroup": "0::/longshore.slice/engine.scope\n",
    f"{SLICE}/memory.max": f"{4 * GIB}\n",
    f"{SLICE}/memory.current": f"{GIB}\n",
    f"{SLICE}/cpu.max": "300000 100000\n",
    f"{SLICE}/engine.scope/memory.max": "max\n",
    f"{SLICE}/engine.scope/memory.current": f"{GIB}\n",
}
# A container sees the host's path and, mounted, its own group alone.
VERSION_1 = {
    "proc/self/cgroup": "12:memory:/docker/abc\n11:cpu,cpuacct:/docker/abc\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}
NO_LIMIT_1 = {
    "proc/self/cgroup": "12:memory:/docker/abc\n11:cpu,cpuacct:/docker/abc\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
}


def told_by_doctor(host: Host) -> dict[str, str]:
    found = [*processor_findings(host), *resource_findings(host, 8000)]
    return {each.what: each.found for each in found}


@pytest.mark.parametrize("files", [NESTED, VERSION_1], ids=["nested", "version 1"])
def test_limits_of_every_control_group_around_a_process_count(
    tmp_path: Path, files: dict[str, str]
) -> None:
    host = fake_host(tmp_path, files)
    memory = host_memory(tmp_path)
    assert memory == HostMemory(3 * GIB, 64 * GIB, 4 * GIB, CONTROL_GROUP_LIMIT)
    assert memory.description == "the control group limit is 4.00 GiB"
    assert quota_cores(tmp_path) == 3.0
    found = told_by_doctor(host)
    assert found["memory"] == "3.0 GiB available of 4.0 GiB (control group limit)"
    assert found["CPU quota"].startswith("3 cores")


def test_a_group_without_limits_sets_none(tmp_path: Path) -> None:
    fake_host(tmp_path, NO_LIMIT_1)
    memory = host_memory(tmp_path)
    assert memory == HostMemory(32 * GIB, 64 * GIB, None)
    assert memory.description == "this machine has 64.00 GiB"
    assert quota_cores(tmp_path) is None


@pytest.mark.parametrize(
    ("which", "name", "used_pages"),
    [(resource.RLIMIT_AS, "ulimit -v, RLIMIT_AS", 7), (resource.RLIMIT_DATA, "RLIMIT_DATA", 3)],
)
def test_limits_of_the_process_count_and_are_named(
    tmp_path: Path, which: int, name: str, used_pages: int
) -> None:
    def limit(asked: int) -> tuple[int, int]:
        size = 2 * GIB if asked == which else resource.RLIM_INFINITY
        return size, resource.RLIM_INFINITY

    host = fake_host(tmp_path, {"proc/self/statm": "7 6 5 4 0 3 0\n", **NESTED}, limit=limit)
    memory = host_memory(tmp_path, limit)
    assert memory is not None
    left = 2 * GIB - used_pages * os.sysconf("SC_PAGE_SIZE")
    assert (memory.available_bytes, memory.limit_bytes) == (left, 2 * GIB)
    assert name in memory.description
    assert name in told_by_doctor(host)["memory"]


def test_cores_without_a_topology_are_as_many_as_processors(tmp_path: Path) -> None:
    assert num_physical_cores(range(4), fake_host(tmp_path / "a").root) == 2
    files = {"sys/devices/system/cpu/cpu3/topology/thread_siblings_list": None}
    host = fake_host(tmp_path / "b", files)
    assert num_physical_cores(host.allowed_cpus, host.root) == 4
    assert told_by_doctor(host)["CPU"].startswith("4 cores")


@pytest.mark.parametrize(
    ("quota_us", "num_workers", "threads", "limit"),
    [
        (50_000, 1, 1, "1 thread: the CPU quota of the control group is 0.5 cores"),
        (170_000, 1, 1, "1 thread: the CPU quota of the control group is 1.7 cores"),
        (300_000, 2, 1, "1 thread: the CPU quota of the control group is 3 cores"),
        (300_000, 1, 3, "3 threads: the CPU quota of the control group is 3 cores"),
        (400_000, 2, 2, None),
        (-1, 1, 4, None),
        (-1, 8, 1, None),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_threads_are_the_physical_cores_or_the_whole_cores_of_the_quota(
    tmp_path: Path, version: int, quota_us: int, num_workers: int, threads: int, limit: str | None
) -> None:
    v1 = {
        "proc/self/cgroup": "3:cpu,cpuacct:/\n0::/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": f"{quota_us}\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    v2 = {"sys/fs/cgroup/cpu.max": f"{quota_us if quota_us > 0 else 'max'} 100000\n"}
    cores = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu}\n"
        for cpu in range(4)
    }
    root = fake_host(tmp_path, {**(v1 if version == 1 else v2), **cores}).root
    assert default_threads(num_workers, range(4), root) == (threads, limit)


def test_this_host_has_cores_and_memory() -> None:
    assert 1 <= num_physical_cores() <= len(os.sched_getaffinity(0))
    assert available_host_bytes() > 1 << 20
    assert host_memory(Path("/nonexistent")) is None
