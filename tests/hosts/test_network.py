"""The network that the tests of this folder run on does what they rely on."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from tests.hosts.network import NAMES, Host, Network, run

pytestmark = pytest.mark.services

MANY: Final = 1 << 20
LIMIT_S: Final = 30.0


@contextmanager
def connected(client: Host, server: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    with server.entered():
        listener = socket.create_server((server.address, 0))
    with client.entered():
        near = socket.create_connection(listener.getsockname(), timeout=LIMIT_S)
    far, _ = listener.accept()
    far.settimeout(LIMIT_S)
    with listener, near, far:
        yield near, far


def seconds_to_send(near: socket.socket, far: socket.socket, num_bytes: int) -> float:
    started = time.monotonic()
    sender = threading.Thread(target=near.sendall, args=(bytes(num_bytes),))
    sender.start()
    while num_bytes:
        num_bytes -= len(far.recv(1 << 16))
    sender.join()
    return time.monotonic() - started


def test_hosts_reach_each_other_and_nothing_else(network: Network) -> None:
    first, second = network.host("first"), network.host("second")
    with connected(first, second) as ends:
        assert ends[1].getpeername()[0] == first.address
        seconds_to_send(*ends, MANY)
    interfaces = run("ip", "-n", first.namespace, "-o", "link").splitlines()
    assert len(interfaces) == 2  # its own, and the loopback


def test_a_cut_is_silent_and_heals(network: Network) -> None:
    first, second, third = map(network.host, ("first", "second", "third"))
    with connected(first, second) as (near, far), connected(first, third) as others:
        second.cut()
        near.sendall(b"lost")
        far.sendall(b"lost")
        for end in (near, far):
            end.settimeout(1.0)
            with pytest.raises(TimeoutError):
                end.recv(1)
        seconds_to_send(*others, MANY)
        second.heal()
        near.settimeout(LIMIT_S)
        far.settimeout(LIMIT_S)
        assert near.recv(4) == far.recv(4) == b"lost"


def test_a_link_can_be_slow(network: Network) -> None:
    first, second = network.host("first"), network.host("second")
    with connected(first, second) as ends:
        second.limit(megabits=8)
        assert seconds_to_send(*ends, MANY) > 0.6
        second.limit(None)
        seconds_to_send(*ends, MANY)


def test_packets_can_be_delayed(network: Network) -> None:
    first, second = network.host("first"), network.host("second")
    with connected(first, second) as (near, far):
        for _ in range(2):
            with network.delay(0.1):
                started = time.monotonic()
                near.sendall(b"ping")
                far.sendall(far.recv(4))
                assert near.recv(4) == b"ping"
                assert time.monotonic() - started >= 0.2
                seconds_to_send(near, far, MANY)


ABANDONED: Final = """
import os, signal, subprocess
from tests.hosts.network import Network
network = Network()
with network.host("only").entered():
    process = subprocess.Popen(["sleep", "1000"])
print(network.name, process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_network_ends_with_the_process_that_made_it() -> None:
    maker = subprocess.run(
        [sys.executable, "-c", ABANDONED], stdout=subprocess.PIPE, text=True, check=False
    )
    assert maker.returncode == -signal.SIGKILL
    name, pid = maker.stdout.split()
    assert name.startswith(NAMES)
    deadline = time.monotonic() + LIMIT_S
    while name in run("ip", "netns") or os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
