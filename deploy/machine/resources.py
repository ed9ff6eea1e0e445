"""Findings about memory, disk, limits, the port, the clock and io_uring."""

import errno
import os
import resource
from collections.abc import Iterator
from typing import Final

from longshore.deploy.machine.finding import Finding
from longshore.deploy.machine.host import TIME_ERROR, Host, errno_name
from longshore.deploy.supervisor.fork_server import FORK_SERVER_MODULE
from longshore.deploy.supervisor.home_dir import can_create, temporary_home
from longshore.deploy.supervisor.runtime_dir import MAX_SOCKET_PATH_BYTES
from longshore.protocol.errors import ConfigError
from longshore.protocol.private_files import check_private
from longshore.worker.process.host_resources import host_memory, meminfo

MIN_OPEN_FILES: Final = 4096
"""A stream needs one. Gateways raise their soft limit to the hard one."""
MIN_SHARED_BYTES: Final = 1 << 30
MIN_TEMP_BYTES, LOW_TEMP_BYTES = 16 << 20, 256 << 20
LONGEST_SOCKET_NAME: Final = len("/longshore-12345678/worker-1000.sock")


def resource_findings(host: Host, port: int) -> Iterator[Finding]:
    """All findings of this module. port: port that a server would listen on."""
    yield _memory(host)
    yield from _fork_servers(host)
    yield from _overcommit(host)
    yield from _huge_pages(host)
    yield _shared_memory(host)
    yield _open_files(host)
    yield _temp_dir(host)
    yield _state_dir(host)
    yield _port(host, port)
    yield _clock(host)
    yield _io_uring(host)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


def _memory(host: Host) -> Finding:
    memory = host_memory(host.root, host.limit)
    if memory is None:
        return Finding("memory", "unknown: /proc/meminfo cannot be read", "warning")
    limit = memory.limit_bytes
    total = _gib(memory.total_bytes) if limit is None else f"{_gib(limit)} ({memory.limit_name})"
    found = f"{_gib(memory.available_bytes)} available of {total}"
    if memory.available_bytes < 1 << 30:
        return Finding(
            "memory",
            found,
            "warning",
            "A process that needs more is killed",
            "Stop other programs, raise the limit, or lower --num-blocks",
        )
    return Finding("memory", found)


def _fork_servers(host: Host) -> Iterator[Finding]:
    """Those of all deployments on this machine, by their command lines."""
    sizes = []
    for process in (host.root / "proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            if FORK_SERVER_MODULE.encode() in arguments:
                sizes.append(int((process / "statm").read_bytes().split()[1]))
        except (OSError, IndexError):  # it has just ended
            continue
    if sizes:
        mib = sum(sizes) * os.sysconf("SC_PAGE_SIZE") / 2**20
        found = f"{len(sizes)} with {mib:,.0f} MiB, most of which their workers share"
        yield Finding("fork servers", found)


def _overcommit(host: Host) -> Iterator[Finding]:
    mode = host.number("/proc/sys/vm/overcommit_memory")
    if mode == 2:
        yield Finding(
            "overcommit",
            "disabled (vm.overcommit_memory=2)",
            "warning",
            "CUDA and torch reserve far more memory than they use, and may fail",
            "sysctl vm.overcommit_memory=0",
        )
    elif mode is not None:
        yield Finding("overcommit", "allowed")


def _huge_pages(host: Host) -> Iterator[Finding]:
    modes = host.text("/sys/kernel/mm/transparent_hugepage/enabled")
    if modes is None:
        return
    mode = modes.partition("[")[2].partition("]")[0]
    reserved = meminfo("HugePages_Total", host.root) or 0
    found = f"transparent: {mode}; {reserved} reserved"
    if mode == "never":
        yield Finding(
            "huge pages",
            found,
            "warning",
            "On CPUs, weights and KV use many small pages, which is somewhat slower",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    else:
        yield Finding("huge pages", found)


def _shared_memory(host: Host) -> Finding:
    try:
        free_bytes = host.free_bytes(host.root / "dev/shm")
    except OSError:
        return Finding(
            "/dev/shm",
            "missing",
            "warning",
            "NCCL and other libraries share memory between ranks there",
            "mount -t tmpfs tmpfs /dev/shm",
        )
    if free_bytes >= MIN_SHARED_BYTES:
        return Finding("/dev/shm", f"{_gib(free_bytes)} free")
    return Finding(
        "/dev/shm",
        f"{free_bytes / 2**20:,.0f} MiB free",
        "warning",
        "NCCL and other libraries that share memory between ranks may fail",
        "docker: --shm-size=8g; else mount -o remount,size=8g /dev/shm",
    )


def _open_files(host: Host) -> Finding:
    _, hard = host.limit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Finding("open files", "unlimited")
    if hard >= MIN_OPEN_FILES:
        return Finding("open files", f"{hard:,} at most")
    return Finding(
        "open files",
        f"{hard:,} at most",
        "problem",
        "Each stream needs one",
        f"Raise the hard limit (ulimit -Hn) to {MIN_OPEN_FILES:,} or more",
    )


def _temp_dir(host: Host) -> Finding:
    folder = host.temp_dir
    too_long = len(bytes(folder)) + LONGEST_SOCKET_NAME - MAX_SOCKET_PATH_BYTES
    if too_long > 0:
        return Finding(
            "TMPDIR",
            f"{folder}",
            "problem",
            f"The paths of sockets in it would be {too_long} characters too long",
            "Set TMPDIR to a shorter path",
        )
    try:
        free_bytes = host.free_bytes(folder)
    except OSError as error:
        return Finding("TMPDIR", f"{folder}: {error.strerror}", "problem", fix="Set TMPDIR")
    found = f"{folder}, {_gib(free_bytes)} free"
    if free_bytes >= LOW_TEMP_BYTES:
        return Finding("TMPDIR", found)
    return Finding(
        "TMPDIR",
        f"{folder}, {free_bytes / 2**20:,.0f} MiB free",
        "problem" if free_bytes < MIN_TEMP_BYTES else "warning",
        "Processes store configurations and sockets in it, and compilers far more",
        "Free space, or set TMPDIR to another folder",
    )


def _state_dir(host: Host) -> Finding:
    """The default of --state-dir, which is not created here."""
    what, fix = "state directory", "Pass --state-dir with another directory"
    try:
        path = host.state_dir()
        if path.exists():
            check_private(path)
    except ConfigError as error:
        return Finding(what, str(error), "problem", "serve rejects it", fix)
    if not can_create(path):
        return Finding(what, f"{path} is not writable", "problem", "serve rejects it", fix)
    if path == temporary_home():
        means = "The user has no home that it can write to; stored KV is lost with the container"
        return Finding(what, f"{path}", "warning", means, fix)
    return Finding(what, f"{path}" if path.exists() else f"{path}, created at the first start")


def _port(host: Host, port: int) -> Finding:
    problem = host.port_problem(port)
    if problem is None:
        return Finding(f"port {port}", "free")
    return Finding(
        f"port {port}",
        problem,
        "warning",
        "A server already uses it, or using it is not permitted",
        "Choose another --port",
    )


def _clock(host: Host) -> Finding:
    if host.clock_state() == TIME_ERROR:
        return Finding(
            "clock",
            "not synchronised",
            "warning",
            "Log lines of several hosts cannot be ordered, and TLS may reject certificates",
            "Run chrony or systemd-timesyncd",
        )
    return Finding("clock", "synchronised" if host.clock_state() >= 0 else "unknown")


def _io_uring(host: Host) -> Finding:
    number = host.io_uring_errno()
    if number == errno.EFAULT:
        return Finding("io_uring", "available")
    return Finding(
        "io_uring",
        f"not available ({errno_name(number)})",
        "absent",
        "With NIXL, the disk tier is slower",
        "sysctl kernel.io_uring_disabled=0; in a container, use a seccomp profile that allows it",
    )
