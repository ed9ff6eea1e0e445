"""The side channel of the links of one rank, and the watch over them, on one thread.

A rank listens for the readers of its blocks, and connects to the owners of those that it reads;
each link has a connection of its own. With a secret it is encrypted, and who does not know it
cannot connect. Both ends of a link show at intervals that they live. A link ends if the other end
is silent, because it was stopped or its host is gone, and if a call of the library is late.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias, assert_never

import msgspec
import zmq

from longshore.connectors.pull.options import PullOptions, url_host
from longshore.connectors.pull.p2p.link import Link, ReceivingLink, SendingLink
from longshore.connectors.pull.p2p.messages import (
    MAX_RUNS,
    Alive,
    Broken,
    Join,
    Leave,
    Send,
    Share,
    ToOwner,
    ToReader,
)
from longshore.connectors.pull.socket_thread import SocketThread
from longshore.connectors.pull.transport import TransportError
from longshore.protocol.errors import ConfigError, shortened
from longshore.protocol.logs.limits import LogLimit
from longshore.protocol.transport.security import use_secret

logger = logging.getLogger(__name__)

MAX_SENDING: Final = 1024
"""Links to readers; further ones are refused."""

MAX_MESSAGE_BYTES: Final = 2 * 8 * MAX_RUNS + (64 << 10)
MAX_MESSAGES_PER_STEP: Final = 64
CHECKS_PER_SILENCE: Final = 4
HANDSHAKE_MS: Final = 5000
LINGER_MS: Final = 100
"""How long the last message of a link may take to leave."""

_to_owner: Final = msgspec.msgpack.Decoder(ToOwner)
_to_reader: Final = msgspec.msgpack.Decoder(ToReader)
_encoder: Final = msgspec.msgpack.Encoder()


class _ToReader(NamedTuple):
    reader_id: bytes
    message: ToReader


class _ToOwner(NamedTuple):
    link: ReceivingLink
    message: ToOwner


class _Open(NamedTuple):
    link: ReceivingLink
    host: str
    port: int


class _SendingEnded(NamedTuple):
    reader_id: bytes
    link: SendingLink


class _ReceivingEnded(NamedTuple):
    link: ReceivingLink


_Item: TypeAlias = _ToReader | _ToOwner | _Open | _SendingEnded | _ReceivingEnded

MakeSending: TypeAlias = Callable[
    [Join, Callable[[ToReader], None], Callable[[], None]], SendingLink
]


class Channel:
    """make_sending: makes the owner's end for a reader that joins, from its message, what sends
        messages to it, and what is to be called at the end. Raises TransportError.
    silence_s: after which an end that has not been heard is gone.
    """

    def __init__(self, options: PullOptions, make_sending: MakeSending, silence_s: float) -> None:
        """Raises ConfigError if it cannot listen on the host."""
        self._options, self._make_sending = options, make_sending
        self._silence_s = silence_s
        self._warnings = LogLimit(logger, max_per_second=1)
        self._sending: dict[bytes, SendingLink] = {}  # by routing id of the reader
        self._receiving: dict[ReceivingLink, zmq.Socket[bytes]] = {}
        self._heard_at: dict[Link[Any, Any], float] = {}
        self._check_at = 0.0
        self._closing = threading.Lock()
        self._is_closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._new_socket(zmq.ROUTER, options.host)
        if options.secret is not None:
            use_secret(self._socket, options.secret, bind=True)
        try:
            self.port = self._socket.bind_to_random_port(f"tcp://{options.address}")
        except zmq.ZMQError as error:
            self._context.destroy()
            raise ConfigError(
                f"--kv-connector-config: readers cannot connect to host {options.host!r}: {error}. "
                "Give an address of this machine."
            ) from error
        self._thread: SocketThread[_Item] = SocketThread("p2p-channel", self._step)
        self._thread.poller.register(self._socket, zmq.POLLIN)
        self._thread.start()

    def _new_socket(self, kind: int, host: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        return socket

    @property
    def failure(self) -> Exception | None:
        return self._thread.failure

    def open(
        self,
        make: Callable[[Callable[[ToOwner], None], Callable[[], None]], ReceivingLink],
        host: str,
        port: int,
    ) -> ReceivingLink:
        """Begin a link to an owner. make: makes the reader's end from what sends its messages, and
        what is to be called at its end."""
        link = make(
            lambda message: self._put(_ToOwner(link, message)),
            lambda: self._put(_ReceivingEnded(link)),
        )
        self._put(_Open(link, host, port))
        link.start()
        return link

    def close(self, timeout_s: float) -> list[SendingLink] | None:
        """Tell all other ends that their links end; returns the links to readers, which the caller
        ends. None if the thread has not ended within this time."""
        with self._closing:
            self._is_closed = True
        if not self._thread.close(timeout_s):
            return None
        for reader_id in self._sending:
            self._send_to_reader(reader_id, Broken("the owner is shutting down"))
        for socket in self._receiving.values():
            self._send_to_owner(socket, Leave())
        self._context.destroy(linger=LINGER_MS)
        return list(self._sending.values())

    def _put(self, item: _Item) -> None:
        with self._closing:
            if not self._is_closed:  # else a late thread of a link has ended
                self._thread.put(item)

    # On the thread

    def _step(self, items: list[_Item]) -> float | None:
        now = time.monotonic()
        for item in items:
            self._take(item, now)
        has_more = self._receive_from_readers(now)
        for link, socket in list(self._receiving.items()):
            has_more |= self._receive_from_owner(link, socket, now)
        if now >= self._check_at:
            self._check(now)
            self._check_at = now + self._silence_s / CHECKS_PER_SILENCE
        if has_more:
            return 0.0
        return self._check_at if self._heard_at else None

    def _take(self, item: _Item, now: float) -> None:
        match item:
            case _ToReader(reader_id=reader_id, message=message):
                self._send_to_reader(reader_id, message)
            case _ToOwner(link=link, message=message):
                if (socket := self._receiving.get(link)) is not None:
                    self._send_to_owner(socket, message)
            case _Open(link=link, host=host, port=port):
                socket = self._new_socket(zmq.DEALER, host)
                if self._options.secret is not None:
                    use_secret(socket, self._options.secret, bind=False)
                socket.connect(f"tcp://{url_host(host)}:{port}")
                self._thread.poller.register(socket, zmq.POLLIN)
                self._send_to_owner(socket, link.join_message)
                self._receiving[link] = socket
                self._heard_at[link] = now
            case _SendingEnded(reader_id=reader_id, link=link):
                if self._sending.get(reader_id) is link:
                    del self._sending[reader_id]
                self._heard_at.pop(link, None)
                self._send_to_reader(reader_id, Broken(shortened(link.failure or "")))
            case _ReceivingEnded(link=link):
                self._heard_at.pop(link, None)
                if (socket := self._receiving.pop(link, None)) is not None:
                    self._send_to_owner(socket, Leave())
                    self._thread.poller.unregister(socket)
                    socket.close()
            case _:
                assert_never(item)

    def _check(self, now: float) -> None:
        for link, heard_at in self._heard_at.items():
            if link.late_at is not None and link.late_at < now:
                link.end("a call of the library is late")
            elif heard_at + self._silence_s < now:
                link.end(f"the other end has been silent for {self._silence_s:g} s")
        for socket in self._receiving.values():
            self._send_to_owner(socket, Alive())

    def _send_to_reader(self, reader_id: bytes, message: ToReader) -> None:
        try:
            self._socket.send_multipart([reader_id, _encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._warnings.warning("a reader could not be answered: %s", error)

    def _send_to_owner(self, socket: "zmq.Socket[bytes]", message: ToOwner) -> None:
        try:
            socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("an owner cannot be reached: %s", error)

    def _receive_from_readers(self, now: float) -> bool:
        """Returns whether there may be more."""
        for _ in range(MAX_MESSAGES_PER_STEP):
            try:
                reader_id, *rest = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                (data,) = rest
                message = _to_owner.decode(data)
            except (ValueError, RecursionError) as error:  # of msgspec, too
                self._warnings.warning("a message of a reader was not valid: %s", error)
                continue
            self._handle_reader(reader_id, message, now)
        return True

    def _handle_reader(self, reader_id: bytes, message: ToOwner, now: float) -> None:
        link = self._sending.get(reader_id)
        if isinstance(message, Join):
            if link is None:
                self._join(reader_id, message, now)
            return
        if link is None:
            if not isinstance(message, Leave):
                self._send_to_reader(reader_id, Broken("the owner has no such link"))
            return
        self._heard_at[link] = now
        match message:
            case Send():
                link.put(message)
            case Share(key=key, value=value):
                link.rendezvous.deliver(key, value)
            case Leave():
                link.end("its reader has left")
            case Alive():
                self._send_to_reader(reader_id, message)
            case _:
                assert_never(message)

    def _join(self, reader_id: bytes, message: Join, now: float) -> None:
        try:
            if len(self._sending) >= MAX_SENDING:
                raise TransportError(f"the owner has {MAX_SENDING} links already")
            link = self._make_sending(
                message,
                lambda answer: self._put(_ToReader(reader_id, answer)),
                lambda: self._put(_SendingEnded(reader_id, link)),
            )
        except TransportError as error:
            self._warnings.warning("a link was refused: %s", error)
            self._send_to_reader(reader_id, Broken(str(error)))
            return
        self._sending[reader_id] = link
        self._heard_at[link] = now
        link.start()

    def _receive_from_owner(
        self, link: ReceivingLink, socket: "zmq.Socket[bytes]", now: float
    ) -> bool:
        """Returns whether there may be more."""
        for _ in range(MAX_MESSAGES_PER_STEP):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                (data,) = frames
                message = _to_reader.decode(data)
            except (ValueError, RecursionError) as error:  # of msgspec, too
                link.end(f"its owner sent an invalid message: {shortened(str(error))}")
                return False
            self._heard_at[link] = now
            match message:
                case Share(key=key, value=value):
                    link.rendezvous.deliver(key, value)
                case Broken(reason=reason):
                    link.end(f"its owner has ended it: {shortened(reason)}")
                case Alive():
                    pass
                case _:
                    assert_never(message)
        return True
