"""The clients of an engine, by number: which are accepted, and how they are reached."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import zmq

from longshore.protocol.errors import MessagesLost, ProtocolError
from longshore.protocol.handshake import (
    PROTOCOL_VERSION,
    ClientHello,
    Rejected,
    ToClient,
    ToEngine,
)
from longshore.protocol.requests import Malformed, read_malformed
from longshore.protocol.transport.channel import ServerChannel

logger = logging.getLogger(__name__)

RejectRequest: TypeAlias = Callable[[int, Malformed, str], None]


class Clients:
    """Clients that have introduced themselves. They are numbered in this order, and known to the
    scheduler by their numbers.

    model_fingerprint: of the engine's model, which clients must know.
    """

    def __init__(
        self, channel: ServerChannel[ToClient, ToEngine], *, model_fingerprint: str
    ) -> None:
        self._channel = channel
        self._fingerprint = model_fingerprint
        self._index_of_peer: dict[bytes, int] = {}
        self._peer_of_index: dict[int, bytes] = {}
        self._num_accepted = 0

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        return self._channel.socket

    @property
    def num_bad(self) -> int:
        """Messages that could not be decoded."""
        return self._channel.num_bad.total()

    def __iter__(self) -> Iterator[int]:
        """The clients that are connected, some of which may be forgotten meanwhile."""
        return iter(list(self._peer_of_index))

    def __contains__(self, index: int) -> bool:
        return index in self._peer_of_index

    def drain(
        self, reject_request: RejectRequest, max_messages: int
    ) -> Iterator[tuple[int, ToEngine | MessagesLost]]:
        """What clients have sent, at most so many messages, each with its number; the first message
        is its hello. Others are told why they are not accepted.

        reject_request: gets requests of which only the handle could be decoded, and the reason.
        """
        answer_bad = partial(self._reject_malformed, reject_request)
        for peer, message in self._channel.drain(answer_bad, max_messages):
            index = self._index_of_peer.get(peer)
            if isinstance(message, ClientHello):
                reason = self._mismatch(message)
                if reason is None:
                    yield self._accept(peer, message), message
                else:
                    self._reject(peer, reason)
            elif index is not None:
                yield index, message
            elif not isinstance(message, MessagesLost):
                self._reject(peer, "the first message must be ClientHello")

    def send(self, index: int, message: ToClient) -> bool:
        """False if the client is gone, or has stopped reading."""
        return self._channel.send(self._peer_of_index[index], message)

    def forget(self, index: int) -> None:
        """The client is gone."""
        del self._index_of_peer[self._peer_of_index.pop(index)]

    def _accept(self, peer: bytes, hello: ClientHello) -> int:
        if peer not in self._index_of_peer:
            self._index_of_peer[peer] = self._num_accepted
            self._peer_of_index[self._num_accepted] = peer
            logger.debug("client %d (%s) connected", self._num_accepted, hello.name)
            self._num_accepted += 1
        return self._index_of_peer[peer]

    def _mismatch(self, hello: ClientHello) -> str | None:
        if hello.protocol_version != PROTOCOL_VERSION:
            return (
                f"client {hello.name!r} uses protocol_version={hello.protocol_version}, but this "
                f"engine uses {PROTOCOL_VERSION}; run the same version of both"
            )
        if hello.model_fingerprint != self._fingerprint:
            return (
                f"client {hello.name!r} has model_fingerprint={hello.model_fingerprint!r}, but "
                f"this engine has {self._fingerprint!r}; use the same model, because token ids "
                "depend on it"
            )
        return None

    def _reject(self, peer: bytes, reason: str) -> None:
        self._channel.send(peer, Rejected(reason))
        self._channel.disconnect(peer)

    def _reject_malformed(
        self, reject_request: RejectRequest, peer: bytes, header: bytes, error: ProtocolError
    ) -> bool:
        """Every request of a client is answered. False if this is none."""
        index, malformed = self._index_of_peer.get(peer), read_malformed(header)
        if index is None or malformed is None:
            return False
        reject_request(index, malformed, str(error))
        return True
