"""Hosts of their own on one machine: network namespaces, with a router namespace between them.

Needs root, and `ip` and `tc` of iproute2. A network has no link to that of the machine, so several
networks can have the same addresses. The names of its namespaces contain the process id of a guard,
which removes everything once the process that made the network has ended, however it ends. Run as a
program, this module is the guard, or what delays the packets of a router.
"""

import ctypes
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from types import TracebackType
from typing import Final, Self

NAMES: Final = "longshore-hosts"
SUBNET: Final = "10.77"
DELAYED: Final = "100"
"""The routing table of packets that are to be delayed; empty while none are."""

_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x0001 | 0x1000


def run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def missing_permission() -> str | None:
    """Why this process cannot make a network; None: it can."""
    name = f"{NAMES}-{os.getpid()}-try"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True, text=True)
        run("ip", "netns", "del", name)
        run("tc", "-V")
    except FileNotFoundError as error:
        return f"{error.filename} of iproute2 is not installed"
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {(error.stderr or '').strip()}"
    return None


@contextmanager
def _in_namespace(path: str) -> Iterator[None]:
    """This thread, and the threads and processes that it starts, have their network there."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(fd: int) -> None:
        if libc.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns into {path}")

    with open("/proc/thread-self/ns/net") as before, open(path) as wanted:
        enter(wanted.fileno())
        try:
            yield
        finally:
            enter(before.fileno())


class Host:
    """A namespace with one interface. A network makes it."""

    def __init__(self, network: "Network", name: str, number: int) -> None:
        self._network, self._number = network, number
        self.name = name
        self.namespace = f"{network.name}-{name}"
        self.address = f"{SUBNET}.{number}.2"
        self._link = f"to-{number}"
        self._is_cut = False
        gateway = f"{SUBNET}.{number}.1"
        run("ip", "netns", "add", self.namespace)
        router = network.router
        for command in (
            f"-n {self.namespace} link add eth0 type veth peer name {self._link} netns {router}",
            f"-n {self.namespace} link set dev lo up",
            f"-n {self.namespace} addr add {self.address}/24 dev eth0",
            f"-n {self.namespace} link set dev eth0 up",
            f"-n {router} addr add {gateway}/24 dev {self._link}",
            f"-n {router} link set dev {self._link} up",
            f"-n {self.namespace} route add default via {gateway}",
        ):
            run("ip", *command.split())

    @contextmanager
    def entered(self) -> Iterator[Self]:
        """What this thread starts within the block, and its new sockets, are on this host."""
        with _in_namespace(f"/run/netns/{self.namespace}"):
            yield self

    def cut(self) -> None:
        """The router drops what this host sends and what is sent to it, silently."""
        if not self._is_cut:
            self._is_cut = True
            self._route("add")

    def heal(self) -> None:
        if self._is_cut:
            self._is_cut = False
            self._route("del")

    def _route(self, verb: str) -> None:
        router = self._network.router
        # Before the tables that know the address: no packet of this host is forwarded.
        run("ip", "-n", router, "rule", verb, "from", self.address, "blackhole", "priority", "10")
        run("ip", "-n", router, "rule", verb, "to", self.address, "blackhole", "priority", "10")

    def limit(self, megabits: float | None) -> None:
        """The bandwidth of its link, in each direction; None: no limit."""
        for namespace, link in ((self.namespace, "eth0"), (self._network.router, self._link)):
            qdisc = ("tc", "-n", namespace, "qdisc")
            if megabits is None:
                run(*qdisc, "del", "dev", link, "root")
                continue
            rate = f"rate {megabits}mbit burst {max(4, int(megabits * 8))}kb latency 500ms"
            run(*qdisc, "replace", "dev", link, "root", "tbf", *rate.split())


class Network:
    """A context manager: all hosts, and all processes on them, end with it."""

    def __init__(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, __file__, "guard"], stdin=subprocess.PIPE, start_new_session=True
        )
        self.name = f"{NAMES}-{self._guard.pid}"
        self.router = f"{self.name}-router"
        self._hosts: dict[str, Host] = {}
        try:
            run("ip", "netns", "add", self.router)
            rule = ("ip", "-n", self.router, "rule", "add")
            run(*rule, "iif", "delay", "lookup", "main", "priority", "20")
            run(*rule, "lookup", DELAYED, "priority", "30")
            with _in_namespace(f"/run/netns/{self.router}"):
                Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def host(self, name: str) -> Host:
        """The host of this name, which is made if there is none."""
        if name not in self._hosts:
            self._hosts[name] = Host(self, name, len(self._hosts) + 1)
        return self._hosts[name]

    @contextmanager
    def delay(self, seconds: float) -> Iterator[None]:
        """Every packet between two hosts waits for so long in the router."""
        with _in_namespace(f"/run/netns/{self.router}"):
            process = subprocess.Popen(
                [sys.executable, __file__, "delay", str(seconds)], stdout=subprocess.PIPE
            )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            process.kill()  # with its device, and the routes through it
            process.communicate()


# Programs


def guard() -> None:
    """Wait for the end of the input; then end all processes of the network, and remove it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.read()
    remove(f"{NAMES}-{os.getpid()}-")


def remove(prefix: str) -> None:
    namespaces = [each["name"] for each in json.loads(run("ip", "-j", "netns") or "[]")]
    mine = [name for name in namespaces if name.startswith(prefix)]
    while pids := [pid for name in mine for pid in run("ip", "netns", "pids", name).split()]:
        for pid in map(int, pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    for name in mine:
        run("ip", "netns", "del", name)


def delay(seconds: float) -> None:
    """A device to which the router sends all packets, and that sends each one back later."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"delay", _IFF_TUN_NO_PI))
    Path("/proc/sys/net/ipv4/conf/delay/rp_filter").write_text("0")
    run("ip", "link", "set", "dev", "delay", "txqueuelen", "10000", "up")
    run("ip", "route", "add", f"{SUBNET}.0.0/16", "dev", "delay", "table", DELAYED)
    print("ready", flush=True)
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        timeout = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        if select.select([device], [], [], timeout)[0]:
            waiting.append((time.monotonic() + seconds, os.read(device, 1 << 16)))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(device, waiting.popleft()[1])


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        guard()
    else:
        delay(float(sys.argv[2]))
