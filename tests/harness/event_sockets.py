"""A subscriber of KV events on real sockets."""

from collections.abc import Iterator

import zmq

from longshore.protocol.events import END_OF_REPLAY, SNAPSHOT_REQUEST, sequence_frame
from longshore.protocol.transport.security import CurveKeys
from tests.harness.event_index import EventIndex

TIMEOUT_MS = 60_000


class RemoteSubscriber:
    """Keeps an `EventIndex` by what it receives, replays and snapshots.

    max_queued: messages that its socket holds before it stops reading.
    publisher_id: of the latest snapshot.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        *,
        topic: str = "kv-events",
        max_queued: int = 1000,
        keys: CurveKeys | None = None,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.messages = self._context.socket(zmq.SUB)
        self.messages.setsockopt(zmq.RCVHWM, max_queued)
        self.messages.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.requests = self._context.socket(zmq.DEALER)
        for each, address in ((self.messages, endpoint), (self.requests, replay_endpoint)):
            if keys is not None and keys.server is not None:
                each.curve_publickey = keys.public.encode()
                each.curve_secretkey = keys.secret.encode()
                each.curve_serverkey = keys.server.encode()
            each.connect(address)
        self._topic = topic.encode()
        self.index = EventIndex()
        self.publisher_id = b""

    def receive(self, timeout_ms: int = TIMEOUT_MS) -> tuple[int, bytes] | None:
        """The next message's number and payload; None after the timeout."""
        if not self.messages.poll(timeout_ms):
            return None
        topic, number, payload = self.messages.recv_multipart()
        assert topic == self._topic
        return int.from_bytes(number, "big"), payload

    def replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        """The answer to a replay request."""
        self.requests.send_multipart([b"", sequence_frame(first)])
        while True:
            empty, topic, number, payload = self._answer()
            assert empty == b""
            if number == END_OF_REPLAY:
                assert (topic, payload) == (b"", b"")
                return
            assert topic == self._topic
            yield int.from_bytes(number, "big"), payload

    def restore(self) -> None:
        """Replace the index by a snapshot."""
        self.requests.send_multipart([b"", SNAPSHOT_REQUEST])
        empty, number, self.publisher_id, *payloads = self._answer()
        assert empty == b""
        self.index.restore(int.from_bytes(number, "big"), payloads)

    def catch_up(self) -> None:
        """Get all batches that are missing, or a snapshot."""
        replayed = list(self.replay(self.index.next_number))
        if not all([self.index.receive(*batch) for batch in replayed]):
            self.restore()

    def _answer(self) -> list[bytes]:
        assert self.requests.poll(TIMEOUT_MS), "no answer"
        return self.requests.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)
