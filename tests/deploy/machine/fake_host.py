"""A machine that has what a test specifies, in a folder."""

import errno
import resource
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from longshore.deploy.machine.host import Host

GIB: Final = 1 << 30

HEALTHY: Final[Mapping[str, str]] = {
    "proc/cpuinfo": "processor : 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n",
    "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\nHugePages_Total: 0\n",
    "proc/self/cgroup": "0::/\n",
    "proc/sys/vm/overcommit_memory": "0\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/devices/system/node/node0/cpulist": "0-3\n",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    **{
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 2},{cpu % 2 + 2}"
        for cpu in range(4)
    },
}


def fake_host(root: Path, files: Mapping[str, str | None] = {}, **answers: Any) -> Host:
    """A healthy machine of two cores with four processors, except for `files` (None: the file is
    missing) and `answers`."""
    for name, text in {**HEALTHY, **files}.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    host = Host(
        root=root,
        temp_dir=Path("/tmp"),
        state_dir=lambda: root / "state",
        allowed_cpus=frozenset(range(4)),
        limit=lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        free_bytes=lambda path: 8 * GIB,
        io_uring_errno=lambda: errno.EFAULT,
        clock_state=lambda: 0,
        port_problem=lambda port: None,
    )
    return replace(host, **answers)
