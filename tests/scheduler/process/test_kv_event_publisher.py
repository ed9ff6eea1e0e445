"""The sockets of KV events: who may connect, and what long answers leave time for."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zmq

from longshore.protocol.arrays import EMPTY_INT32
from longshore.protocol.errors import ConfigError
from longshore.protocol.events import (
    END_OF_REPLAY,
    SNAPSHOT_REQUEST,
    BatchEncoder,
    BlockStored,
    EventBatch,
    KVEvent,
    KVEventsConfig,
    sequence_frame,
)
from longshore.protocol.transport.channel import Endpoint, SocketWatcher, close_context
from longshore.protocol.transport.security import CurveKeys
from longshore.scheduler.process.kv_event_publisher import (
    REPLAY_PART,
    EventPublisher,
    EventSockets,
)
from tests.harness.event_index import EventIndex
from tests.harness.event_sockets import RemoteSubscriber
from tests.harness.kv_groups import kv_cache_config

ANY_PORT = "tcp://127.0.0.1:*"


class Opened:
    """A publisher, and the addresses that its sockets got."""

    def __init__(self, endpoint: Endpoint, replay_endpoint: Endpoint) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets: EventSockets | None = None
        try:
            config = KVEventsConfig(endpoint=endpoint, replay_endpoint=replay_endpoint)
            self.sockets = EventSockets.open(self.context, config)
        except BaseException:
            self.close()
            raise
        self.publisher = EventPublisher(self.sockets, config, kv_cache_config(10))
        self.addresses = [
            socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
            for socket in (self.sockets.events, self.sockets.requests)
        ]

    def close(self) -> None:
        if self.sockets is not None:
            self.sockets.close()
        close_context(self.context)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    publisher = Opened(Endpoint(f"ipc://{tmp_path}/e"), Endpoint(f"ipc://{tmp_path}/r"))
    yield publisher
    publisher.close()


def block(number: int) -> KVEvent:
    return BlockStored(number.to_bytes(4, "big"), None, EMPTY_INT32, 0)


async def converse(
    publisher: EventPublisher,
    asks: Callable[[], Awaitable[None]],
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Serve requests until `asks` has its answers. `watch` is called in each turn of the loop."""

    async def watch_always() -> None:
        while True:
            watch()
            await asyncio.sleep(0)

    watcher = SocketWatcher(publisher.requests, publisher.on_readable)
    tasks = [asyncio.create_task(each) for each in (publisher.serve_requests(), watch_always())]
    try:
        await asyncio.wait_for(asks(), 60)
    finally:
        watcher.close()
        for task in tasks:
            task.cancel()


async def answer(socket: "zmq.Socket[bytes]") -> list[bytes]:
    while not socket.poll(0):
        await asyncio.sleep(0)
    return socket.recv_multipart()


class CountingSocket:
    """A socket that counts the messages sent."""

    def __init__(self, socket: Any, count: Callable[[], None]) -> None:
        self._socket = socket
        self._count = count

    def send_multipart(self, *arguments: Any) -> None:
        self._count()
        self._socket.send_multipart(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


async def test_long_answers_leave_time_for_other_work(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two turns of the loop, only a part of an answer is encoded or sent."""
    for number in range(3000):
        opened.publisher.publish([block(number)])
    done: Counter[str] = Counter()
    most: Counter[str] = Counter()
    encode = BatchEncoder.encode

    def counting(encoder: BatchEncoder, batch: EventBatch) -> bytes:
        done["encoded"] += 1
        return encode(encoder, batch)

    def watch() -> None:
        for name, number in done.items():
            most[name] = max(most[name], number)
        done.clear()

    monkeypatch.setattr(BatchEncoder, "encode", counting)
    opened.publisher.requests = CountingSocket(  # type: ignore[assignment]
        opened.publisher.requests, lambda: done.update(["sent"])
    )
    subscriber = RemoteSubscriber(*opened.addresses)
    index = EventIndex()

    async def asks() -> None:
        subscriber.requests.send_multipart([b"", sequence_frame(1000)])
        for number in count(1000):
            _, _, frame, payload = await answer(subscriber.requests)
            if frame == END_OF_REPLAY:
                assert number == 3001
                break
            assert (frame, bool(payload)) == (sequence_frame(number), True)
        subscriber.requests.send_multipart([b"", SNAPSHOT_REQUEST])
        _, frame, publisher_id, *payloads = await answer(subscriber.requests)
        assert (frame, len(publisher_id)) == (sequence_frame(3000), 16)
        index.restore(3000, payloads)

    try:
        await converse(opened.publisher, asks, watch)
    finally:
        subscriber.close()
    assert len(index.blocks) == 3000
    assert 1 <= most["encoded"] <= 2
    assert 1 <= most["sent"] <= 2 * REPLAY_PART


@pytest.mark.parametrize("place", [0, 1])
def test_tcp_beyond_this_host_needs_keys(place: int, tmp_path: Path) -> None:
    endpoints = [Endpoint(f"ipc://{tmp_path}/a"), Endpoint(f"ipc://{tmp_path}/b")]
    endpoints[place] = Endpoint("tcp://0.0.0.0:*")
    with pytest.raises(ConfigError, match="has no CURVE keys"):
        Opened(*endpoints)


@pytest.mark.parametrize("has_keys", [False, True])
async def test_subscriber_over_tcp_gets_a_snapshot(has_keys: bool, tmp_path: Path) -> None:
    server, client = CurveKeys("", ""), None
    if has_keys:
        ours, theirs = zmq.curve_keypair(), zmq.curve_keypair()
        public, secret = (key.decode() for key in theirs)
        authorized = tmp_path / "authorized"
        authorized.write_text(public)
        server = CurveKeys(ours[0].decode(), ours[1].decode(), authorized=str(authorized))
        client = CurveKeys(public, secret, server=server.public)
    keys = server if has_keys else None
    opened = Opened(Endpoint(ANY_PORT, keys), Endpoint("tcp://127.0.0.2:*", keys))
    subscriber = RemoteSubscriber(*opened.addresses, keys=client)
    opened.publisher.publish([block(1)])
    index = EventIndex()

    async def asks() -> None:
        subscriber.requests.send_multipart([b"", SNAPSHOT_REQUEST])
        _, _, _, *payloads = await answer(subscriber.requests)
        index.restore(1, payloads)
        while not subscriber.messages.poll(0):  # until it is subscribed
            opened.publisher.publish([block(len(index.blocks) + 1)])
            index.blocks[("GPU", None, 0), b"%d" % len(index.blocks)] = None, ()
            await asyncio.sleep(0)

    try:
        await converse(opened.publisher, asks)
    finally:
        subscriber.close()
        opened.close()
    assert (("GPU", None, 0), (1).to_bytes(4, "big")) in index.blocks
