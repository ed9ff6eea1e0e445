"""Connects the index of a gateway to the KV events of its engines, on an asyncio loop."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from longshore.deploy.gateway.router.block_index import BlockIndex
from longshore.deploy.gateway.router.event_follower import EventFollower
from longshore.protocol.events import EventSource
from longshore.protocol.transport.channel import SocketWatcher, has_input, open_socket

CHECK_EVERY_S: Final = 1.0
MESSAGES_PER_CALL: Final = 64
HASHES_PER_CALL: Final = 1000


class EventSubscriber:
    """Follows one engine. Create it inside a running loop. is_followed: the engine is ready."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        source: EventSource,
        index: BlockIndex,
        engine: int,
    ) -> None:
        self._source = source
        self._index = index
        self._loop = asyncio.get_running_loop()
        self._context = context
        self.is_followed = False
        self._is_scheduled = False
        self.follower = EventFollower(index, engine, self._send)
        self._connect()
        self._next_check = self._loop.call_later(CHECK_EVERY_S, self._check)

    def follow(self, is_ready: bool) -> None:
        """The engine is ready, or lost."""
        if is_ready and not self.is_followed:
            self.follower.begin(self._loop.time())
        elif self.is_followed and not is_ready:
            self.follower.end()
            self.work_soon()
        self.is_followed = is_ready

    def close(self) -> None:
        self._next_check.cancel()
        self._disconnect()

    def _connect(self) -> None:
        source = self._source
        self._events = open_socket(
            self._context, zmq.SUB, source.endpoint, bind=False, allow_loopback=True
        )
        self._events.subscribe(source.topic)
        self._requests = open_socket(
            self._context, zmq.DEALER, source.replay_endpoint, bind=False, allow_loopback=True
        )
        self._watchers = (
            SocketWatcher(self._events, self._receive),
            SocketWatcher(self._requests, self._receive_answers),
        )

    def _disconnect(self) -> None:
        for watcher in self._watchers:
            watcher.close()
        self._events.close(linger=0)
        self._requests.close(linger=0)

    def _send(self, content: bytes) -> None:
        self._requests.send_multipart([b"", content], zmq.DONTWAIT)
        self._watchers[1].check()

    def _receive(self) -> None:
        self._receive_from(self._events, self.follower.receive)

    def _receive_answers(self) -> None:
        self._receive_from(self._requests, self.follower.receive_answer)

    def _receive_from(
        self, socket: "zmq.Socket[bytes]", take: Callable[[Sequence[bytes], float], None]
    ) -> None:
        now_s = self._loop.time()
        for _ in range(MESSAGES_PER_CALL):
            if not has_input(socket):
                break
            take(socket.recv_multipart(zmq.DONTWAIT), now_s)
        self.work_soon()

    def work_soon(self) -> None:
        """Apply what has arrived and collect what the index does not need, in parts."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._work)

    def _work(self) -> None:
        self._is_scheduled = False
        if self._events.closed:
            return
        self.follower.work(self._loop.time())
        self._index.collect(HASHES_PER_CALL)
        if self.follower.has_work or self._index.has_garbage:
            self.work_soon()

    def _check(self) -> None:
        self._next_check = self._loop.call_later(CHECK_EVERY_S, self._check)
        if self.is_followed and not self.follower.check(self._loop.time()):
            self._disconnect()
            self._connect()
            self.follower.begin(self._loop.time())
