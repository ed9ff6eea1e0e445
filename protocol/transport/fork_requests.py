"""What the supervisor and its fork server (`worker/process/fork_server.py`) say to each other.

Each message is one datagram on a socket pair without a name, so no other process can connect. A
request has the descriptors that the new process inherits, and first of all the socket on which this
process answers: when nobody can answer any more, the supervisor reads its end.
"""

import array
import os
import socket
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

MAX_MESSAGE_BYTES: Final = 1 << 16
MAX_DESCRIPTORS: Final = 64


class ForkRequest(msgspec.Struct, tag="fork", frozen=True, forbid_unknown_fields=True):
    """Become the process that this command would start.

    command:     its arguments, with `-m`, the name of a module and what this one gets at their end.
    environment: variables to set, in addition to those of the fork server.
    numbers:     of the descriptors that it inherits, which are sent in this order after ANSWER_FD,
                 the current directory and its output.
    affinity:    processors that it may run on.
    limits:      soft and hard limit by RLIMIT_*, in this order.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    numbers: tuple[int, ...]
    affinity: tuple[int, ...]
    limits: tuple[tuple[int, int, int], ...] = ()


class Forked(msgspec.Struct, tag="forked", frozen=True, forbid_unknown_fields=True):
    """The new process runs: it sends this itself."""

    pid: int


class NotForked(msgspec.Struct, tag="not_forked", frozen=True, forbid_unknown_fields=True):
    """There is no new process.

    is_final: the fork server will refuse every request.
    """

    reason: str
    is_final: bool = False


class ForkServerReady(msgspec.Struct, tag="ready", frozen=True, forbid_unknown_fields=True):
    """The fork server has imported everything. Sent once, on its own socket."""


ForkAnswer: TypeAlias = Forked | NotForked

_encoder = msgspec.json.Encoder()
_request_decoder = msgspec.json.Decoder(ForkRequest)
_answer_decoder: msgspec.json.Decoder[ForkAnswer] = msgspec.json.Decoder(ForkAnswer)
_INT_BYTES: Final = array.array("i").itemsize


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets for these messages; a message arrives whole or not at all."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_request(to: socket.socket, request: ForkRequest, descriptors: Sequence[int]) -> None:
    """Send a request and its descriptors, of which the receiver gets copies. Never blocks. Raises
    OSError, also if the fork server does not read, and ValueError if the request is too large."""
    data = _encoder.encode(request)
    if len(data) > MAX_MESSAGE_BYTES or len(descriptors) > MAX_DESCRIPTORS:
        raise ValueError(f"{len(data)} bytes and {len(descriptors)} descriptors are too much")
    socket.send_fds(to, [data], [*descriptors], socket.MSG_DONTWAIT)


def receive_request(of: socket.socket) -> tuple[ForkRequest, list[int]] | None:
    """Wait for the next request; None if the supervisor has ended. The caller owns the descriptors.
    Raises msgspec.MsgspecError if it is not a request, and ValueError if it is too large."""
    size = socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT_BYTES)
    try:
        data, ancillary, flags, _ = of.recvmsg(MAX_MESSAGE_BYTES, size, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    received = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(content[: len(content) - len(content) % _INT_BYTES])
    descriptors = received.tolist()
    if not data:
        close_all(descriptors)
        return None
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("a request to the fork server is too large")
        request = _request_decoder.decode(data)
        if len(descriptors) != len(request.numbers) + 3:
            raise ValueError(f"{len(descriptors)} descriptors for {len(request.numbers)} numbers")
    except (ValueError, msgspec.MsgspecError):
        close_all(descriptors)
        raise
    return request, descriptors


def send_answer(to: socket.socket, answer: ForkAnswer | ForkServerReady) -> None:
    """Send an answer, without blocking. Raises OSError."""
    to.send(_encoder.encode(answer), socket.MSG_DONTWAIT)


def receive_answer(of: socket.socket) -> ForkAnswer | None:
    """The answer to a request; None if nobody can answer any more. Raises BlockingIOError if there
    is none yet and the socket does not block, and msgspec.MsgspecError if it is invalid."""
    try:
        data = of.recv(MAX_MESSAGE_BYTES)
    except ConnectionError:
        return None
    return _answer_decoder.decode(data) if data else None


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
