"""Peers that prove themselves, and others that try to be peers, on real sockets."""

import contextlib
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
import zmq

from longshore.protocol.errors import EngineDead
from longshore.protocol.handshake import ClientHello, Rejected
from longshore.protocol.transport import channel
from longshore.protocol.transport.channel import Endpoint
from longshore.protocol.transport.security import AuthorizedKeys, CurveKeys, new_secret
from tests.harness.sockets import WAIT_S, Sockets

HELLO = ClientHello("a name", "f")
# ZMQ reports one of these for a connection whose handshake failed.
FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
}


def keypair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def last_address(socket: Any) -> str:
    return str(socket.getsockopt(zmq.LAST_ENDPOINT).decode())


def authorize(file: Path, *clients: tuple[str, str]) -> str:
    """Write the list of clients."""
    file.write_text("".join(f"{public} name 2026-01-31\n" for public, _ in clients))
    return str(file)


def curve_client(address: str, keys: tuple[str, str], server: str) -> Endpoint:
    return Endpoint(address, CurveKeys(*keys, server=server))


def test_curve_accepts_only_authorized_clients(sockets: Sockets, tmp_path: Path) -> None:
    server_keys, good_keys, wrong_keys = keypair(), keypair(), keypair()
    allowed = CurveKeys(*server_keys, authorized=authorize(tmp_path / "keys", good_keys))
    server = sockets.server(Endpoint("tcp://127.0.0.1:*", allowed), sockets.new_context())
    address = last_address(server.socket)
    other = sockets.new_context()
    wrong = sockets.client(curve_client(address, wrong_keys, server_keys[0]), other)
    misled = sockets.client(curve_client(address, good_keys, keypair()[0]), other)
    events = wrong.socket.get_monitor_socket()
    wrong.send(ClientHello("wrong key", "f"))
    misled.send(ClientHello("right key, wrong server", "f"))
    good = sockets.client(curve_client(address, good_keys, server_keys[0]), other)
    good.send(ClientHello("good", "f"))
    assert server.socket.poll(WAIT_S * 1000)
    ((peer, message),) = server.drain()
    assert message.name == "good"
    assert server.send(peer, Rejected("only you"))
    assert good.receive(WAIT_S) == Rejected("only you")
    # The wrong key was rejected, not merely slow.
    seen = set()
    while zmq.EVENT_HANDSHAKE_FAILED_AUTH not in seen:
        assert events.poll(WAIT_S * 1000)
        seen.add(int.from_bytes(events.recv_multipart()[0][:2], "little"))
    wrong.socket.disable_monitor()
    events.close(linger=0)
    assert server.receive() is None
    assert wrong.receive() is None
    assert misled.receive() is None


def test_a_host_can_have_an_ipv6_address(sockets: Sockets) -> None:
    server_keys, client_keys = keypair(), keypair()
    allowed = CurveKeys(*server_keys, also_authorized=(client_keys[0],))
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    server = sockets.server(Endpoint("tcp://[::1]:*", allowed), sockets.new_context())
    address = last_address(server.socket)
    client = sockets.client(
        curve_client(address, client_keys, server_keys[0]), sockets.new_context()
    )
    client.send(ClientHello("over IPv6", "f"))
    assert server.socket.poll(WAIT_S * 1000)
    ((_, message),) = server.drain()
    assert message.name == "over IPv6"


def test_a_connection_that_proves_nothing_is_closed(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_MS", 200)
    endpoint = Endpoint("tcp://127.0.0.1:*", CurveKeys(*keypair(), also_authorized=(keypair()[0],)))
    server = sockets.server(endpoint, sockets.new_context())
    port = int(last_address(server.socket).rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
        while connection.recv(64):  # its greeting
            pass


def test_two_curve_endpoints_of_one_context_have_separate_lists(
    sockets: Sockets, tmp_path: Path
) -> None:
    context, server_keys = sockets.new_context(), keypair()
    client_keys = {"first": keypair(), "second": keypair()}
    servers = {}
    for number, (name, keys) in enumerate(client_keys.items(), 1):
        allowed = CurveKeys(*server_keys, authorized=authorize(tmp_path / name, keys))
        servers[name] = sockets.server(Endpoint(f"tcp://127.0.0.{number}:*", allowed), context)
    other = sockets.new_context()
    for name, keys in client_keys.items():
        for server in servers.values():
            address = last_address(server.socket)
            client = sockets.client(curve_client(address, keys, server_keys[0]), other)
            client.send(ClientHello(name, "f"))
    for name, server in servers.items():
        assert server.socket.poll(WAIT_S * 1000)
        assert [message.name for _, message in server.drain()] == [name]


def wait_for_failed_handshake(monitor: Any) -> None:
    seen: set[int] = set()
    while not seen & FAILURES:
        assert monitor.poll(WAIT_S * 1000)
        seen.add(int.from_bytes(monitor.recv_multipart()[0][:2], "little"))


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


def test_peers_with_the_same_secret_exchange_messages(sockets: Sockets, address: str) -> None:
    endpoint = Endpoint(address, secret=new_secret())
    server, client = sockets.engine(endpoint), sockets.peer(endpoint)
    client.send(HELLO)
    assert server.receive(WAIT_S) == HELLO
    server.send(Rejected("an answer"))
    assert client.receive(WAIT_S) == Rejected("an answer")


def test_list_of_one_socket_does_not_apply_to_another_with_a_secret(
    sockets: Sockets, tmp_path: Path
) -> None:
    keys = CurveKeys(*keypair(), authorized=authorize(tmp_path / "keys"))
    sockets.server(Endpoint(f"ipc://{tmp_path}/events", keys))
    endpoint = Endpoint(f"ipc://{tmp_path}/s", secret=new_secret())
    server, client = sockets.engine(endpoint), sockets.peer(endpoint)
    client.send(HELLO)
    assert server.receive(WAIT_S) == HELLO


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.ROUTER, zmq.PAIR, zmq.REQ, zmq.SUB, zmq.PULL])
@pytest.mark.parametrize("knows", ["nothing", "another secret"])
def test_peer_without_the_secret_receives_nothing_and_is_not_heard(
    sockets: Sockets, address: str, kind: int, knows: str
) -> None:
    """A DEALER socket would otherwise send it every second message."""
    endpoint = Endpoint(address, secret=new_secret())
    server, client = sockets.engine(endpoint), sockets.peer(endpoint)
    wrong = None if knows == "nothing" else new_secret()
    monitor = server.socket.get_monitor_socket()
    intruder = sockets.open(kind, Endpoint(address, secret=wrong), bind=False)
    if kind == zmq.SUB:
        intruder.subscribe(b"")
    if kind in (zmq.DEALER, zmq.PAIR):
        intruder.send(b"from the intruder")
    wait_for_failed_handshake(monitor)
    client.send(HELLO)
    assert server.receive(WAIT_S) == HELLO
    for number in range(100):
        server.send(Rejected(str(number)))
    assert [client.receive(WAIT_S) for _ in range(100)] == [Rejected(str(n)) for n in range(100)]
    server.socket.disable_monitor()
    monitor.close(linger=0)
    assert not intruder.poll(0)
    assert server.receive() is None
    assert server.num_bad == {}


def test_connecting_end_sends_nothing_to_a_server_without_the_secret(
    sockets: Sockets, address: str
) -> None:
    """Somebody else has replaced the socket's file."""
    server = sockets.server(Endpoint(address))
    monitor = server.socket.get_monitor_socket()
    sockets.client(Endpoint(address, secret=new_secret())).send(HELLO)
    wait_for_failed_handshake(monitor)
    server.socket.disable_monitor()
    monitor.close(linger=0)
    assert server.receive() is None


def test_clients_are_authorized_and_removed_while_the_socket_is_in_use(
    sockets: Sockets, address: str, tmp_path: Path
) -> None:
    server_keys, first, second = keypair(), keypair(), keypair()
    authorized = tmp_path / "authorized"
    keys = CurveKeys(*server_keys, authorized=authorize(authorized, first))
    server = sockets.server(Endpoint(address, keys), sockets.new_context())
    other = sockets.new_context()

    def greet(name: str, keys: tuple[str, str]) -> None:
        client = sockets.client(curve_client(address, keys, server_keys[0]), other)
        client.send(ClientHello(name, "f"))

    def names() -> list[str]:
        assert server.socket.poll(WAIT_S * 1000)
        return [message.name for _, message in server.drain()]

    greet("first", first)
    assert names() == ["first"]
    authorize(authorized, second)
    monitor = server.socket.get_monitor_socket()
    with contextlib.suppress(EngineDead):  # it may have been rejected before it can send
        greet("first again", first)
    wait_for_failed_handshake(monitor)
    server.socket.disable_monitor()
    monitor.close(linger=0)
    greet("second", second)
    assert names() == ["second"]


def test_unknown_key_and_unreadable_list_are_rejected_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (public, _), (other, _) = keypair(), keypair()
    file = tmp_path / "authorized"
    with caplog.at_level(logging.WARNING):
        assert not AuthorizedKeys(str(file)).allow("here", public.encode())
        file.write_bytes(b"\xff\xfe\n\n" + public.encode() + b" name\n")
        keys = AuthorizedKeys(str(file))
        assert keys.allow("here", public.encode())
        assert caplog.text.count("\n") == 1
        assert "cannot be read: No such file" in caplog.text
        for _ in range(1000):
            assert not keys.allow("here", other.encode())
        assert not keys.allow("here", b"")
    assert f"its public key {other} is not in {file}" in caplog.text
    assert len(caplog.records) <= 10


def test_keys_beside_the_list_need_no_file(tmp_path: Path) -> None:
    (public, _), (other, _) = keypair(), keypair()
    for path in (str(tmp_path / "missing"), None):
        keys = AuthorizedKeys(path, [public])
        assert keys.allow("here", public.encode())
        assert not keys.allow("here", other.encode())


def test_list_is_read_up_to_a_limit(tmp_path: Path) -> None:
    public, _ = keypair()
    file = tmp_path / "authorized"
    file.write_bytes(b"x" * (1 << 20) + b"\n" + public.encode())
    assert not AuthorizedKeys(str(file)).allow("here", public.encode())
