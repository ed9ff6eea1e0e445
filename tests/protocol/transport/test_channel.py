"""Typed channels over real sockets."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from longshore.protocol.errors import (
    ConfigError,
    EngineDead,
    MalformedMessage,
    MessagesLost,
    ProtocolError,
)
from longshore.protocol.handshake import ClientHello, Rejected
from longshore.protocol.outputs import EngineFailed
from longshore.protocol.requests import AbortRequests, StopFound
from longshore.protocol.transport.channel import (
    MAX_MESSAGES_PER_TURN,
    Channel,
    ClientChannel,
    Endpoint,
    ServerChannel,
    SocketWatcher,
    count_bad,
)
from longshore.protocol.transport.security import CurveKeys
from tests.harness.sockets import WAIT_S, Sockets, sending


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    return Endpoint(f"ipc://{tmp_path}/s")


Pair = tuple[Channel[Any, Any], Channel[Any, Any]]


@pytest.fixture
def pair(sockets: Sockets, endpoint: Endpoint) -> Pair:
    """Both ends of a channel without numbers."""
    return sockets.engine(endpoint), sockets.peer(endpoint)


def test_messages_arrive_in_order_in_both_directions(pair: Pair) -> None:
    server, client = pair
    for number in range(50):
        client.send(StopFound(number, 1))
    assert [server.receive(WAIT_S) for _ in range(50)] == [StopFound(n, 1) for n in range(50)]
    for number in range(50):
        server.send(Rejected(str(number)))
    assert [client.receive(WAIT_S) for _ in range(50)] == [Rejected(str(n)) for n in range(50)]
    assert server.receive() is None


def test_large_arrays_arrive_whole(pair: Pair) -> None:
    server, client = pair
    handles = np.arange(100_000, dtype=np.int32)
    client.send(AbortRequests(handles))
    message = server.receive(None)
    np.testing.assert_array_equal(message.handles, handles)


def test_invalid_messages_are_counted_by_error_and_the_next_valid_one_arrives(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = pair
    caplog.set_level(logging.WARNING)
    for frames in ([b"junk"], [b""], [b"\x81\xa4type\xa4plan"], [b"", b"", b""]):
        client.socket.send_multipart(frames)
    client.socket.send_multipart([b"\x80"] + [b""] * 16_384)
    client.send(StopFound(1, 2))
    assert server.receive(WAIT_S) == StopFound(1, 2)
    assert server.num_bad == {"MalformedMessage": 3, "UnknownMessage": 1, "MessageTooLarge": 1}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3  # once per error
    assert "unknown message 'plan'" in caplog.text


def test_only_every_thousandth_bad_message_of_a_kind_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counter: Counter[str] = Counter()
    for _ in range(2500):
        count_bad(counter, MalformedMessage("bad"))
    assert counter["MalformedMessage"] == 2500
    assert len(caplog.records) == 3


def test_sending_to_a_peer_that_never_reads_raises_instead_of_blocking(
    sockets: Sockets, endpoint: Endpoint
) -> None:
    channel = sockets.engine(endpoint)
    with pytest.raises(EngineDead, match="has stopped reading its messages"):
        channel.send(Rejected("nobody is connected"))


def test_a_server_distinguishes_its_clients_and_drops_messages_to_one_that_is_gone(
    sockets: Sockets, endpoint: Endpoint
) -> None:
    server = sockets.server(endpoint)
    clients = [sockets.client(endpoint) for _ in range(2)]
    for number, client in enumerate(clients):
        client.socket.send_multipart([b"junk"])
        client.send(msgspec.Raw(b"\xc1"))
        client.send(ClientHello(f"client {number}", "f"))
    names = {}
    while len(names) < 2:
        server.socket.poll(WAIT_S * 1000)
        names |= {message.name: peer for peer, message in server.drain()}
    assert server.num_bad == {"MalformedMessage": 4}
    for number, client in enumerate(clients):
        assert server.send(names[f"client {number}"], Rejected(f"you are {number}"))
        assert client.receive(WAIT_S) == Rejected(f"you are {number}")
    assert server.send(b"nobody", Rejected("hello?")) is False
    assert server.receive() is None


@pytest.mark.parametrize("is_valid", [True, False])
def test_a_turn_takes_a_limited_number_of_messages_and_leaves_the_rest(
    sockets: Sockets, endpoint: Endpoint, is_valid: bool
) -> None:
    """Invalid ones count, too: otherwise a peer that sends them would never let go of a loop."""
    server, client = sockets.server(endpoint), sockets.client(endpoint)
    message = ClientHello("a client", "f") if is_valid else msgspec.Raw(b"\xc1")
    for _ in range(20):
        client.send(message)
    num_taken = 0
    while num_taken < 20:
        assert server.socket.poll(WAIT_S * 1000)
        num_bad = server.num_bad.total()
        taken = len(list(server.drain(max_messages=4))) + server.num_bad.total() - num_bad
        assert 0 < taken <= 4
        num_taken += taken
    assert server.num_bad.total() == (0 if is_valid else 20)


def test_a_turn_of_a_channel_to_one_peer_is_limited_unless_it_is_to_read_everything(
    pair: Pair,
) -> None:
    server, client = pair
    for number in range(3 * MAX_MESSAGES_PER_TURN):
        client.send(StopFound(number, 1))
    handles: list[int] = []
    while len(handles) < MAX_MESSAGES_PER_TURN:
        assert server.socket.poll(WAIT_S * 1000)
        taken = [message.handle for message in server.drain()]
        assert len(taken) <= MAX_MESSAGES_PER_TURN
        handles += taken
    while len(handles) < 3 * MAX_MESSAGES_PER_TURN:
        assert server.socket.poll(WAIT_S * 1000)
        handles += [message.handle for message in server.drain(max_messages=None)]
    assert handles == list(range(3 * MAX_MESSAGES_PER_TURN))


Clients = tuple[ServerChannel[Any, Any], bytes, ClientChannel[Any, Any]]


@pytest.fixture
def connected(sockets: Sockets, endpoint: Endpoint) -> Clients:
    """A server, and a client whose hello it has received."""
    server, client = sockets.server(endpoint), sockets.client(endpoint)
    client.send(ClientHello("a client", "f"))
    assert server.socket.poll(WAIT_S * 1000)
    ((peer, _),) = server.drain()
    return server, peer, client


def next_of(server: ServerChannel[Any, Any]) -> Any:
    """The next message that the server receives."""
    assert server.socket.poll(WAIT_S * 1000)
    received = server.receive()
    assert received is not None
    return received[1]


def test_a_server_that_lost_a_message_of_a_client_ends_the_connection(connected: Clients) -> None:
    server, peer, client = connected
    with sending(client, times=0):
        client.send(StopFound(1, 1))
    client.send(StopFound(2, 1))
    assert "message 2 arrived instead of 1" in str(next_of(server))
    with pytest.raises(MessagesLost):
        client.receive(WAIT_S)
    assert server.send(peer, Rejected("too late")) is False
    client.send(StopFound(3, 1))
    assert isinstance(next_of(server), MessagesLost)


def test_a_client_that_lost_a_message_of_its_server_cannot_go_on(connected: Clients) -> None:
    server, peer, client = connected
    assert server.send(peer, Rejected("first"))
    with sending(server, times=0):
        server.send(peer, Rejected("lost"))
    assert server.send(peer, Rejected("third"))
    assert client.receive(WAIT_S) == Rejected("first")
    with pytest.raises(MessagesLost, match="message 2 arrived instead of 1"):
        client.receive(WAIT_S)


@pytest.mark.parametrize("toward", ["the server", "the client"])
def test_a_ping_finds_out_that_the_last_message_was_lost(connected: Clients, toward: str) -> None:
    server, peer, client = connected
    if toward == "the server":
        with sending(client, times=0):
            client.send(StopFound(1, 1))
    else:
        with sending(server, times=0):
            server.send(peer, Rejected("lost"))
    client.ping()
    assert server.socket.poll(WAIT_S * 1000)
    for _ in server.drain():
        continue
    with pytest.raises(MessagesLost):
        client.receive(WAIT_S)


def test_a_ping_is_answered_and_no_message(connected: Clients) -> None:
    server, peer, client = connected
    client.ping()
    assert server.socket.poll(WAIT_S * 1000)
    assert server.receive() is None
    assert client.socket.poll(WAIT_S * 1000)
    assert client.receive() is None
    assert server.send(peer, Rejected("after the ping"))
    assert client.receive(WAIT_S) == Rejected("after the ping")


def test_repeated_messages_are_counted_and_ignored(connected: Clients) -> None:
    server, _, client = connected
    with sending(client, times=2):
        client.send(StopFound(1, 1))
    client.send(StopFound(2, 1))
    answered: list[bytes] = []

    def answer_bad(peer: bytes, header: bytes, error: ProtocolError) -> bool:
        answered.append(header)
        return True

    received: list[Any] = []
    while len(received) < 2:
        assert server.socket.poll(WAIT_S * 1000)
        received += [message for _, message in server.drain(answer_bad)]
    assert received == [StopFound(1, 1), StopFound(2, 1)]
    assert server.num_bad == {"RepeatedMessage": 1}
    assert not answered


def test_a_peer_that_was_disconnected_learns_it_and_can_send_nothing(connected: Clients) -> None:
    server, peer, client = connected
    server.send(peer, Rejected("go away"))
    server.disconnect(peer)
    assert client.receive(WAIT_S) == Rejected("go away")
    with pytest.raises(MessagesLost):
        client.receive(WAIT_S)
    server.disconnect(b"nobody")
    client.send(StopFound(1, 1))
    assert isinstance(next_of(server), MessagesLost)


@pytest.mark.parametrize(
    ("address", "keys", "message"),
    [
        ("tcp://127.0.0.1:*", None, r"tcp://127\.0\.0\.1:\*' has no CURVE keys.*Use ipc://"),
        ("inproc://here", None, "must begin with ipc:// or tcp://"),
        ("udp://127.0.0.1:1", None, "must begin with ipc:// or tcp://"),
        ("tcp://127.0.0.1:*", CurveKeys("p" * 40, "s" * 40), "allows no client keys"),
    ],
)
def test_an_address_that_is_not_private_is_rejected(
    sockets: Sockets, address: str, keys: CurveKeys | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sockets.server(Endpoint(address, keys))


def test_a_connecting_end_needs_the_servers_key(sockets: Sockets) -> None:
    endpoint = Endpoint("tcp://127.0.0.1:1", CurveKeys("p" * 40, "s" * 40))
    with pytest.raises(ConfigError, match="needs the server's public key"):
        sockets.client(endpoint)


# The watcher


async def storm(server: Channel[Any, Any], client: Channel[Any, Any], num_messages: int) -> None:
    """Two ends that answer each other on one loop, with sends between receives."""
    received: list[int] = []
    echoed: list[str] = []
    done = asyncio.Event()

    def on_server() -> None:
        for message in server.drain():
            received.append(message.handle)
            server.send(Rejected(str(message.handle)))
            if message.handle % 3 == 0:
                server.send(EngineFailed("between"))

    def on_client() -> None:
        # One message per call: the watcher must call again for the others by itself.
        message = client.receive()
        if isinstance(message, Rejected):
            echoed.append(message.reason)
            if len(echoed) == num_messages:
                done.set()

    watchers = [SocketWatcher(server.socket, on_server), SocketWatcher(client.socket, on_client)]
    for number in range(num_messages):
        client.send(StopFound(number, 1))
        watchers[1].check()
        if number % 7 == 0:
            await asyncio.sleep(0)
    await asyncio.wait_for(done.wait(), WAIT_S)
    assert received == list(range(num_messages))
    assert echoed == [str(number) for number in range(num_messages)]
    for watcher in watchers:
        watcher.close()


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_watcher_misses_nothing_in_a_storm_of_sends_and_receives(
    pair: Pair, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(storm(*pair, 3000))


def test_the_watcher_reports_messages_from_before_it_started_and_none_after_it_closed(
    pair: Pair,
) -> None:
    server, client = pair

    async def watch() -> list[Any]:
        seen: list[Any] = []
        first = asyncio.Event()

        def on_ready() -> None:
            seen.extend(server.drain())
            first.set()

        client.send(StopFound(1, 1))
        assert server.socket.poll(WAIT_S * 1000)
        watcher = SocketWatcher(server.socket, on_ready)
        await asyncio.wait_for(first.wait(), WAIT_S)
        watcher.close()
        watcher.close()
        client.send(StopFound(2, 1))
        assert server.socket.poll(WAIT_S * 1000)
        watcher.check()
        await asyncio.sleep(0)
        return seen

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(watch()) == [StopFound(1, 1)]
    assert server.receive() == StopFound(2, 1)
