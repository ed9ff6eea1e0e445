"""Publishes KV events on a PUB socket, and answers replay and snapshot requests on a ROUTER socket.

Nothing here waits for a subscriber. ZMQ drops messages for one that reads too slowly, and it sees
the gap in the sequence numbers. Long answers are sent in parts, with other work in between.
"""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import zmq

from longshore.protocol.errors import MalformedMessage
from longshore.protocol.events import (
    END_OF_REPLAY,
    SEQUENCE_BYTES,
    SNAPSHOT_REQUEST,
    AllBlocksCleared,
    KVEvent,
    KVEventsConfig,
    readable_event,
    sequence_frame,
)
from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.protocol.transport.channel import count_bad, open_socket, receive_frames
from longshore.scheduler.kv_events.stream import EventStream

logger = logging.getLogger(__name__)

# Unsent messages per subscriber. One that has missed some gets them from the replay buffer.
MAX_QUEUED: Final = 1000
# Messages of a replay that are sent at once.
REPLAY_PART: Final = 64


@dataclass(frozen=True)
class EventSockets:
    """events: PUB. requests: ROUTER."""

    events: "zmq.Socket[bytes]"
    requests: "zmq.Socket[bytes]"

    @classmethod
    def open(
        cls, context: "zmq.Context[zmq.Socket[bytes]]", config: KVEventsConfig
    ) -> "EventSockets":
        """Raises ConfigError if an endpoint is not private or cannot be bound."""
        events = open_socket(
            context,
            zmq.PUB,
            config.endpoint,
            bind=True,
            max_queued=MAX_QUEUED,
            allow_loopback=True,
        )
        try:
            requests = open_socket(
                context, zmq.ROUTER, config.replay_endpoint, bind=True, allow_loopback=True
            )
        except BaseException:
            events.close()
            raise
        logger.info(
            "KV events at %s, replays and snapshots at %s",
            config.endpoint.address,
            config.replay_endpoint.address,
        )
        return cls(events, requests)

    def close(self) -> None:
        """Messages that are queued are still sent, for the time that the sockets linger."""
        self.events.close()
        self.requests.close()


class EventPublisher:
    """Owns the event stream. Not thread-safe.

    requests: the ROUTER socket; `on_readable` must be called when it may have messages.
    num_bad:  counts malformed requests by error name.
    """

    def __init__(
        self,
        sockets: EventSockets,
        config: KVEventsConfig,
        kv_cache: KVCacheConfig,
        *,
        context_parallel_size: int = 1,
    ) -> None:
        self._events, self.requests = sockets.events, sockets.requests
        self._topic = config.kv_events_topic.encode()
        self._engine_number = config.engine_number
        self._stream = EventStream(
            config,
            kv_cache,
            publisher_id=uuid.uuid4().bytes,
            context_parallel_size=context_parallel_size,
        )
        self._readable = asyncio.Event()
        self.num_bad: Counter[str] = Counter()
        self.publish([AllBlocksCleared()])  # an engine that starts has nothing

    def publish(self, events: Iterable[KVEvent]) -> None:
        """Send events that have not been sent before."""
        for number, payload in self._stream.append(events, time.time()):
            frames = (self._topic, sequence_frame(number), payload)
            self._events.send_multipart(frames, zmq.DONTWAIT)

    def on_readable(self) -> None:
        """A request may have arrived."""
        self._readable.set()

    async def serve_requests(self) -> None:
        """Answer requests, one after the other, until cancelled."""
        while True:
            request = self._receive()
            if request is None:
                self._readable.clear()
                await self._readable.wait()
                continue
            peer, content = request
            answer = self._snapshot() if content == SNAPSHOT_REQUEST else self._replay(content)
            try:
                for messages in answer:
                    for message in messages:
                        self.requests.send_multipart([peer, b"", *message], zmq.DONTWAIT)
                    await asyncio.sleep(0)
            except zmq.ZMQError as error:  # the peer is gone, or does not read
                logger.warning("an answer to a subscriber of KV events was not sent: %s", error)

    def snapshot_lines(self) -> Iterator[list[dict[str, Any]]]:
        """The whole index for an operator, in parts: one object that says what the snapshot is of,
        then one per event, with hashes in hexadecimal."""
        number, batches = self._stream.snapshot_events()
        head = {
            "engine": self._engine_number,
            "snapshot_after": number,
            "publisher_id": self._stream.publisher_id.hex(),
        }
        yield [head]
        for events in batches:
            yield [readable_event(event) for event in events]

    def _receive(self) -> tuple[bytes, bytes] | None:
        """The next valid request and its sender."""
        while (frames := receive_frames(self.requests, 0)) is not None:
            if len(frames) == 3 and len(frames[1]) == 0 and len(frames[2]) == SEQUENCE_BYTES:
                return bytes(frames[0]), bytes(frames[2])
            error = MalformedMessage(
                "a request for KV events needs an empty frame and one of 8 bytes: a sequence "
                "number, or 'snapshot'"
            )
            count_bad(self.num_bad, error)
        return None

    def _replay(self, first: bytes) -> Iterator[list[tuple[bytes, ...]]]:
        """The messages as they were published, then the end marker; in parts."""
        batches = iter(self._stream.replay(int.from_bytes(first, "big")))
        while part := list(islice(batches, REPLAY_PART)):
            yield [(self._topic, sequence_frame(number), payload) for number, payload in part]
        yield [(b"", END_OF_REPLAY, b"")]

    def _snapshot(self) -> Iterator[list[tuple[bytes, ...]]]:
        """One message, after one part without messages per payload: the number of the last batch,
        the publisher's id, and the payloads."""
        number, parts = self._stream.snapshot(time.time())
        payloads = []
        for payload in parts:
            payloads.append(payload)
            yield []
        yield [(sequence_frame(number), self._stream.publisher_id, *payloads)]
