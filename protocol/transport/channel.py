"""Typed channels over ZMQ: one union of messages per direction, bounded; sending never blocks.

A channel is one DEALER socket, or one ROUTER socket for many clients. Invalid messages are counted
by error, logged and skipped; they never stop the process. Messages between a server and its clients
are numbered (`numbering`); plans have numbers of their own. Only private sockets are allowed:
`ipc://` in a 0700 directory, or `tcp://` with CURVE keys. With a secret or keys, only peers that
prove to know them are connected (`security`).
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_address
from itertools import count
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec
import zmq

from longshore.protocol.errors import (
    ConfigError,
    EngineDead,
    MalformedMessage,
    MessagesLost,
    ProtocolError,
    RepeatedMessage,
)
from longshore.protocol.transport.codec import MAX_MESSAGE_BYTES, Decoder, Encoder, Frame
from longshore.protocol.transport.numbering import OVER, PING, PREFIX_BYTES, Numbering
from longshore.protocol.transport.security import (
    CurveKeys,
    stop_authenticator,
    use_keys,
    use_secret,
)

logger = logging.getLogger(__name__)

_POLLOUT: Final = int(zmq.POLLOUT)
_POLLIN: Final = int(zmq.POLLIN)  # arithmetic on an IntFlag costs as much as asking the socket

HEARTBEAT_INTERVAL_MS: Final = 1000
HEARTBEAT_TIMEOUT_MS: Final = 5000
MAX_MESSAGES_PER_TURN: Final = 256
"""Messages that a loop takes from a socket before it does something else. A loop that reports that
it is alive, or that has other peers, must not serve one socket for as long as its peer sends."""

HANDSHAKE_TIMEOUT_MS: Final = 5000
"""A connection that does not prove its key within this time is closed, with what it has sent."""

Out = TypeVar("Out")
In = TypeVar("In")

AnswerBad: TypeAlias = Callable[[bytes, bytes, ProtocolError], bool]
"""Called with the peer, the header of its invalid message, and the error. True: it was answered."""


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address of a channel.

    curve:  keys of this end; `tcp://` needs them.
    secret: known to both ends of an `ipc://` socket, from `security.new_secret`. With neither,
            every process that can open the socket's file is accepted.
    """

    address: str
    curve: CurveKeys | None = None
    secret: str | None = None


def open_socket(
    context: "zmq.Context[zmq.Socket[bytes]]",
    kind: int,
    endpoint: Endpoint,
    *,
    bind: bool,
    max_queued: int = 100_000,
    allow_loopback: bool = False,
    detects_silence: bool = False,
) -> "zmq.Socket[bytes]":
    """Returns a bound or connected socket. Raises ConfigError if the address is not private, or
    cannot be bound.

    max_queued: unsent messages per peer.
    allow_loopback: accept TCP without keys on a loopback address, which every user of this host can
                    connect to.
    detects_silence: disconnect a peer whose host does not answer any more.
    """
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.SNDHWM, max_queued)
    socket.setsockopt(zmq.RCVHWM, 100_000)
    # A last line of defence, per frame and silent; the decoder's limit is lower and is reported.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE_BYTES)
    if bind and endpoint.address.startswith("tcp://"):
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    socket.setsockopt(zmq.IPV6, int(endpoint.address.startswith("tcp://[")))
    if detects_silence:
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        if not (allow_loopback and is_loopback(endpoint)):
            _secure(context, socket, endpoint, bind=bind)
        if bind:
            socket.bind(endpoint.address)
        else:
            socket.connect(endpoint.address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"endpoint {endpoint.address!r} cannot be used: {error}") from error
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


def is_loopback(endpoint: Endpoint) -> bool:
    """Whether this is TCP without keys that other hosts cannot reach."""
    host, _, _ = endpoint.address.removeprefix("tcp://").rpartition(":")
    if endpoint.curve is not None or not endpoint.address.startswith("tcp://"):
        return False
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _secure(
    context: "zmq.Context[zmq.Socket[bytes]]",
    socket: "zmq.Socket[bytes]",
    endpoint: Endpoint,
    *,
    bind: bool,
) -> None:
    is_ipc = endpoint.address.startswith("ipc://")
    if not is_ipc and not endpoint.address.startswith("tcp://"):
        raise ConfigError(f"endpoint {endpoint.address!r} must begin with ipc:// or tcp://")
    if endpoint.curve is not None:
        use_keys(context, socket, endpoint.address, endpoint.curve, bind=bind)
    elif not is_ipc:
        raise ConfigError(
            f"endpoint {endpoint.address!r} has no CURVE keys; anyone on the network could send "
            "requests and read responses. Use ipc:// on one host, or configure keys."
        )
    elif endpoint.secret is not None:
        use_secret(socket, endpoint.secret, bind=bind)


def close_context(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """Terminate a context whose sockets are closed; waits until queued messages are sent."""
    stop_authenticator(context)
    context.term()


class _TypedSocket(Generic[Out, In]):
    """Not thread-safe. `num_bad` counts dropped messages by error name."""

    def __init__(self, socket: "zmq.Socket[bytes]", receives: Any) -> None:
        self.socket = socket
        self.num_bad: Counter[str] = Counter()
        self._encoder: Encoder[Out] = Encoder()
        self._decoder: Decoder[In] = Decoder(receives)

    def _arrived(self, max_messages: int | None) -> Iterator[list[Frame]]:
        """The frames of each message that has arrived, for at most `max_messages`."""
        for number in count() if max_messages is None else range(max_messages):
            if number and not has_input(self.socket):
                return
            frames = receive_frames(self.socket, 0)
            if frames is None:
                return
            yield frames

    def close(self) -> None:
        self.socket.close()


class Channel(_TypedSocket[Out, In]):
    """Channel to one peer."""

    def send(self, message: Out) -> None:
        """Pass the message to ZMQ without blocking. Raises EngineDead if no peer is connected to a
        bound socket, or if the queue is full because the peer has stopped reading."""
        self._send(self._encoder.encode(message))

    def _send(self, frames: Sequence[Frame]) -> None:
        try:
            if len(frames) == 1:
                self.socket.send(frames[0], zmq.DONTWAIT)
            else:
                self.socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            raise EngineDead("the peer is gone, or has stopped reading its messages") from None

    def receive(self, timeout_s: float | None = 0.0) -> In | None:
        """The next valid message, or None after `timeout_s`; `timeout_s=None` waits forever."""
        timeout_ms = -1 if timeout_s is None else int(timeout_s * 1000)
        while (frames := receive_frames(self.socket, timeout_ms)) is not None:
            if (message := self._decode(frames)) is not None:
                return message
        return None

    def _decode(self, frames: list[Frame]) -> In | None:
        """None if there is no message, or an invalid one, which is counted."""
        try:
            if (contents := self._contents(frames)) is not None:
                return self._decoder.decode(contents)
        except ProtocolError as error:
            count_bad(self.num_bad, error)
        return None

    def _contents(self, frames: list[Frame]) -> list[Frame] | None:
        """The frames that have a message, if any."""
        return frames

    @property
    def has_peer(self) -> bool:
        """Whether a peer of a bound socket is connected and reads. Once it is False, every message
        of the former peer has arrived."""
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & _POLLOUT)

    def drain(self, max_messages: int | None = MAX_MESSAGES_PER_TURN) -> Iterator[In]:
        """The messages that have arrived, but not more than `max_messages`: a loop that serves
        other sockets, too, leaves the rest for its next turn. None: all of them, until the peer has
        sent no more. Call it when the socket is readable."""
        for frames in self._arrived(max_messages):
            if (message := self._decode(frames)) is not None:
                yield message


class ClientChannel(Channel[Out, In]):
    """A client's end of a `ServerChannel`.

    `receive` and `drain` raise MessagesLost if a message of either end was lost. The channel cannot
    be used any more then.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", receives: Any) -> None:
        super().__init__(socket, receives)
        self._numbering = Numbering()

    def ping(self) -> None:
        """Find out soon whether messages were lost. Raises as `send` does."""
        self._send(PING)

    def _send(self, frames: Sequence[Frame]) -> None:
        super()._send(self._numbering.add(frames))

    def _contents(self, frames: list[Frame]) -> list[Frame] | None:
        return self._numbering.check(frames)


class ServerChannel(_TypedSocket[Out, In]):
    """Channel to many `ClientChannel`s on one ROUTER socket; ZMQ's identity of a connection is the
    peer."""

    def __init__(self, socket: "zmq.Socket[bytes]", receives: Any) -> None:
        super().__init__(socket, receives)
        self._numberings: dict[bytes, Numbering] = {}

    def send(self, peer: bytes, message: Out) -> bool:
        """Returns False, and drops the message, if the peer is gone or has stopped reading. Its
        connection is over then."""
        return self._send(peer, self._encoder.encode(message))

    def _send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        numbering = self._numberings.get(peer)
        if numbering is None:
            return False
        try:
            self.socket.send_multipart([peer, *numbering.add(frames)], zmq.DONTWAIT)
        except (zmq.Again, zmq.ZMQError):
            del self._numberings[peer]
            return False
        return True

    def disconnect(self, peer: bytes) -> None:
        """End the connection: everything that the peer sends from now on is lost."""
        self._numberings.pop(peer, None)
        with contextlib.suppress(zmq.ZMQError):  # it is gone
            self.socket.send_multipart([peer, OVER], zmq.DONTWAIT)

    def receive(
        self, answer_bad: AnswerBad | None = None
    ) -> tuple[bytes, In | MessagesLost] | None:
        """The sender and the next valid message, or why the sender was disconnected; None if no
        message is waiting.

        answer_bad: called for each invalid message. It returns whether it has answered the message,
                    which is then counted but not logged.
        """
        while (frames := receive_frames(self.socket, 0)) is not None:
            if (received := self._decode(frames, answer_bad)) is not None:
                return received
        return None

    def _decode(
        self, frames: list[Frame], answer_bad: AnswerBad | None
    ) -> tuple[bytes, In | MessagesLost] | None:
        """None if there is no message, or an invalid one, which is counted."""
        peer = bytes(frames[0])
        try:
            if len(frames) < 2:
                raise MalformedMessage("a message has no frames; it needs at least its header")
            if (numbering := self._numberings.get(peer)) is None:
                numbering = self._numberings[peer] = Numbering()
            contents = numbering.check(frames[1:])
            if contents is not None:
                return peer, self._decoder.decode(contents)
            self._send(peer, PING)
        except MessagesLost as lost:
            self.disconnect(peer)
            return peer, lost
        except RepeatedMessage as error:
            count_bad(self.num_bad, error)
        except ProtocolError as error:
            header = bytes(frames[1])[PREFIX_BYTES:] if len(frames) > 1 else b""
            if answer_bad is not None and answer_bad(peer, header, error):
                self.num_bad[type(error).__name__] += 1
            else:
                count_bad(self.num_bad, error)
        return None

    def drain(
        self, answer_bad: AnswerBad | None = None, max_messages: int = MAX_MESSAGES_PER_TURN
    ) -> Iterator[tuple[bytes, In | MessagesLost]]:
        """The messages that have arrived, but not more than `max_messages`, as `Channel.drain`; see
        `receive`."""
        for frames in self._arrived(max_messages):
            if (received := self._decode(frames, answer_bad)) is not None:
                yield received


def has_input(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message is waiting. A receive that finds no message costs three times as much."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def receive_frames(socket: "zmq.Socket[bytes]", timeout_ms: int) -> list[Frame] | None:
    """All frames of one message: the small header copied, the others mapped; None on timeout."""
    try:
        if timeout_ms == 0:
            header = socket.recv(zmq.DONTWAIT)
        else:
            if not socket.poll(timeout_ms if timeout_ms > 0 else None):
                return None
            header = socket.recv()
    except zmq.Again:
        return None
    frames: list[Frame] = [header]
    while socket.getsockopt(zmq.RCVMORE):
        frames.append(socket.recv(copy=False).buffer)
    return frames


def count_bad(counter: "Counter[str]", error: ProtocolError) -> None:
    """Count a dropped message by error name; log the first one and then every 1,000th."""
    name = type(error).__name__
    counter[name] += 1
    if counter[name] % 1000 == 1:
        logger.warning("dropped a message (%s, %d so far): %s", name, counter[name], error)


class SocketWatcher:
    """Calls `on_ready()` from an asyncio loop whenever a socket may have messages.

    ZMQ's file descriptor is edge-triggered, and a send can consume the edge. So the socket is
    checked again after each `on_ready()`, and `check()` must be called after sending on it.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", on_ready: Callable[[], None]) -> None:
        self._socket = socket
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._closed = False
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._wake)
        self.check()

    def _wake(self) -> None:
        """Handle the descriptor's edge at once, not in the loop's next iteration."""
        if not self._scheduled and has_input(self._socket):
            self._fire()

    def check(self) -> None:
        """Schedule `on_ready` if a message is waiting."""
        if self._closed or self._scheduled:
            return
        if has_input(self._socket):
            self._scheduled = True
            self._loop.call_soon(self._fire)

    def _fire(self) -> None:
        self._scheduled = False
        if not self._closed:
            self._on_ready()
            self.check()

    def close(self) -> None:
        """Stop watching; the socket itself stays open."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
