"""Memory, disk and limits of fictitious machines."""

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.machine.host import TIME_ERROR, Host
from longshore.deploy.machine.resources import resource_findings
from longshore.deploy.supervisor.fork_server import FORK_SERVER_MODULE
from longshore.deploy.supervisor.home_dir import temporary_home
from tests.deploy.machine.fake_host import GIB, fake_host


def no_such_file(path: Path) -> int:
    raise FileNotFoundError(errno.ENOENT, "No such file or directory")


def limited(soft: int, hard: int) -> Any:
    return lambda which: (soft, hard)


def test_a_healthy_machine_has_nothing_to_complain_about(tmp_path: Path) -> None:
    found = {each.what: each for each in resource_findings(fake_host(tmp_path), 8000)}
    assert {each.state for each in found.values()} == {"ok"}
    assert found["memory"].found == "32.0 GiB available of 64.0 GiB"
    assert found["port 8000"].found == "free"


@pytest.mark.parametrize(
    ("files", "answers", "what", "state", "words"),
    [
        (
            {
                "sys/fs/cgroup/memory.max": f"{4 * GIB}",
                "sys/fs/cgroup/memory.current": f"{3 * GIB}",
            },
            {},
            "memory",
            "ok",
            ["1.0 GiB available of 4.0 GiB (control group limit)"],
        ),
        (
            {"sys/fs/cgroup/memory.max": f"{GIB}", "sys/fs/cgroup/memory.current": f"{GIB - 5}"},
            {},
            "memory",
            "warning",
            ["0.0 GiB available", "killed", "--num-blocks"],
        ),
        (
            {"proc/sys/vm/overcommit_memory": "2"},
            {},
            "overcommit",
            "warning",
            ["sysctl vm.overcommit_memory=0"],
        ),
        (
            {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"},
            {},
            "huge pages",
            "warning",
            ["transparent: never", "echo madvise"],
        ),
        (
            {},
            {"free_bytes": lambda path: 64 << 20},
            "/dev/shm",
            "warning",
            ["64 MiB", "--shm-size"],
        ),
        ({}, {"free_bytes": no_such_file}, "/dev/shm", "warning", ["missing", "mount -t tmpfs"]),
        ({}, {"free_bytes": lambda path: 64 << 20}, "TMPDIR", "warning", ["64 MiB free"]),
        (
            {},
            {"free_bytes": lambda path: 1 << 20},
            "TMPDIR",
            "problem",
            ["1 MiB free", "Free space"],
        ),
        ({}, {"free_bytes": no_such_file}, "TMPDIR", "problem", ["No such file", "Set TMPDIR"]),
        ({}, {"temp_dir": Path("/" + "t" * 90)}, "TMPDIR", "problem", ["too long", "shorter"]),
        ({}, {}, "state directory", "ok", ["/state", "created at the first start"]),
        (
            {},
            {"state_dir": lambda: Path(__file__) / "state"},
            "state directory",
            "problem",
            ["test_resources.py/state is not writable", "--state-dir"],
        ),
        (
            {},
            {"state_dir": lambda: Path("/usr")},
            "state directory",
            "problem",
            ["other users can use it", "chmod 700 /usr", "--state-dir"],
        ),
        (
            {},
            {"state_dir": temporary_home},
            "state directory",
            "warning",
            ["longshore-home-", "lost with the container", "--state-dir"],
        ),
        ({}, {"limit": limited(256, 1024)}, "open files", "problem", ["1,024", "4,096"]),
        (
            {},
            {"port_problem": lambda port: "Address already in use"},
            "port 8000",
            "warning",
            ["--port"],
        ),
        (
            {},
            {"clock_state": lambda: TIME_ERROR},
            "clock",
            "warning",
            ["not synchronised", "chrony"],
        ),
        ({}, {"io_uring_errno": lambda: errno.EPERM}, "io_uring", "absent", ["EPERM", "seccomp"]),
        ({"proc/meminfo": ""}, {}, "memory", "warning", ["unknown"]),
    ],
)
def test_each_finding_says_what_it_is_what_it_means_and_what_to_do(
    tmp_path: Path,
    files: dict[str, str],
    answers: dict[str, Any],
    what: str,
    state: str,
    words: list[str],
) -> None:
    host = fake_host(tmp_path, files, **answers)
    found = {each.what: each for each in resource_findings(host, 8000)}[what]
    said = f"{found.found} {found.means} {found.fix}"
    assert found.state == state, said
    assert all(word in said for word in words), said


def test_this_machine_can_be_asked() -> None:
    host = Host()
    assert host.text("/proc/meminfo")
    assert host.io_uring_errno() != 0
    assert host.clock_state() in range(-1, TIME_ERROR + 1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == host.limit(resource.RLIMIT_NOFILE)


def test_the_memory_of_fork_servers_is_that_of_processes_with_their_module(tmp_path: Path) -> None:
    pages = 2**20 // os.sysconf("SC_PAGE_SIZE")
    files = {
        "proc/71/cmdline": f"python\0-P\0-m\0{FORK_SERVER_MODULE}\0003\0torch\0",
        "proc/71/statm": f"900 {200 * pages} 3 1 0 2 0",
        "proc/72/cmdline": f"python\0-P\0-m\0{FORK_SERVER_MODULE}\0",
        "proc/72/statm": f"900 {30 * pages} 3 1 0 2 0",
        "proc/73/cmdline": f"grep\0of {FORK_SERVER_MODULE}\0",
        "proc/73/statm": f"900 {pages} 3 1 0 2 0",
        "proc/74/cmdline": f"python\0-m\0{FORK_SERVER_MODULE}\0",  # it has ended meanwhile
    }
    found = {each.what: each for each in resource_findings(fake_host(tmp_path, files), 8000)}
    assert found["fork servers"].found == "2 with 230 MiB, most of which their workers share"
    assert found["fork servers"].state == "ok"
