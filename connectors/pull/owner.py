"""The owner's side of the side channel: who may pull what, and for how long. On a thread of the
owner's first rank."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias, assert_never

import msgspec
import zmq

from longshore.connectors.pull.layout import EngineLayout, LayoutMismatch, check_layouts
from longshore.connectors.pull.leases import Leases, LeaseTable
from longshore.connectors.pull.messages import (
    GREET_FIRST,
    MAX_MESSAGE_BYTES,
    NOT_READY,
    NOT_STORED,
    SIDE_CHANNEL_VERSION,
    Accepted,
    Claim,
    Done,
    Granted,
    Hello,
    KVDescription,
    Offer,
    RankInfo,
    Refused,
    Renew,
    ToOwner,
    ToReader,
)
from longshore.connectors.pull.options import PullOptions
from longshore.connectors.pull.socket_thread import SocketThread
from longshore.connectors.pull.transport import PullStuck
from longshore.protocol.errors import ConfigError
from longshore.protocol.logs.limits import LogLimit
from longshore.protocol.logs.records import fields
from longshore.protocol.transport.security import use_secret

logger = logging.getLogger(__name__)

MAX_READERS: Final = 4096
"""Readers that are remembered; the one that has been silent longest must greet again."""

EARLY_CLAIM_S: Final = 2.0
"""How long a claim may be ahead of its offer, which travels with the engine's next plan."""

MAX_EARLY_CLAIMS: Final = 4096
MAX_MESSAGES_PER_STEP: Final = 64
CLOSE_TIMEOUT_S: Final = 10.0

_decoder: Final = msgspec.msgpack.Decoder(ToOwner)
_encoder: Final = msgspec.msgpack.Encoder()


class Release(NamedTuple):
    """Offer these to no reader from now on."""

    transfer_ids: list[str]


OwnerItem: TypeAlias = tuple[RankInfo, ...] | Offer | Release
"""The ranks of this engine, blocks that it offers, or offers that it takes back."""


class _EarlyClaim(NamedTuple):
    deadline: float
    reader_id: bytes
    claim: Claim


class Owner:
    """engine_id: with its epoch. kv: without ranks. on_end: called on the thread with the leases
    that have ended, and with those that have expired. leases: None: those of
    `Leases`. early_claim_s: see EARLY_CLAIM_S."""

    def __init__(
        self,
        options: PullOptions,
        engine_id: str,
        kv: KVDescription,
        on_end: Callable[[list[Offer], list[Offer]], None],
        leases: LeaseTable | None = None,
        early_claim_s: float = EARLY_CLAIM_S,
    ) -> None:
        """Raises ConfigError if the address cannot be bound."""
        self._engine_id, self._kv, self._on_end = engine_id, kv, on_end
        self._ranks: tuple[RankInfo, ...] = ()
        self._leases: LeaseTable = leases or Leases(engine_id, options.lease_s)
        self._early_claim_s = early_claim_s
        self._early: list[_EarlyClaim] = []
        self._readers: OrderedDict[bytes, str] = OrderedDict()  # engine id by routing id
        self._warnings = LogLimit(logger, max_per_second=1)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        self._socket.setsockopt(zmq.IPV6, int(":" in options.host))
        if options.secret is not None:
            use_secret(self._socket, options.secret, bind=True)
        try:
            if options.port:
                self._socket.bind(f"tcp://{options.address}:{options.port}")
                self.port = options.port
            else:
                self.port = self._socket.bind_to_random_port(f"tcp://{options.address}")
        except zmq.ZMQError as error:
            self._context.destroy()
            raise ConfigError(
                f"--kv-connector-config: readers cannot connect to host {options.host!r}, port "
                f"{options.port}: {error}. Give an address of this machine and a free port, or "
                "port 0 for any."
            ) from error
        self._thread: SocketThread[OwnerItem] = SocketThread("pull-owner", self._step)
        self._thread.poller.register(self._socket, zmq.POLLIN)

    def start(self) -> None:
        self._thread.start()

    def put(self, item: OwnerItem) -> None:
        self._thread.put(item)

    @property
    def failure(self) -> Exception | None:
        return self._thread.failure

    def close(self) -> None:
        """Raises PullStuck if readers may still be told that leases hold."""
        if not self._thread.close(timeout_s=CLOSE_TIMEOUT_S):
            raise PullStuck(
                f"the thread that answers readers did not end within {CLOSE_TIMEOUT_S:g} s, so "
                "they may still read blocks of this engine"
            )
        self._context.destroy()

    # On the thread

    def _step(self, items: list[OwnerItem]) -> float | None:
        for item in items:
            match item:
                case Offer():
                    self._leases.offer(item, time.monotonic())
                case Release(transfer_ids=transfer_ids):
                    if ended := self._leases.release(transfer_ids):
                        self._on_end(ended, [])
                case _:
                    self._ranks = item
        num_received = 0
        while num_received < MAX_MESSAGES_PER_STEP:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._receive(frames)
            num_received += 1
        now = time.monotonic()
        self._answer_early(now)
        expired = self._leases.expire(now)
        if expired:
            logger.warning(
                "%d leases were not renewed and have ended; the first is of this request",
                len(expired),
                extra=fields(request_id=expired[0].request_id),
            )
            self._on_end([], expired)
        if num_received == MAX_MESSAGES_PER_STEP:
            return 0.0  # there may be more
        times = [each.deadline for each in self._early]
        if self._leases.next_deadline is not None:
            times.append(self._leases.next_deadline)
        return min(times, default=None)

    def _receive(self, frames: list[bytes]) -> None:
        reader_id, *rest = frames
        try:
            (data,) = rest
            message = _decoder.decode(data)
        except (ValueError, RecursionError) as error:  # of msgspec, too
            self._warnings.warning("a message of a reader was not valid: %s", error)
            return
        if isinstance(message, Hello):
            self._greet(reader_id, message)
            return
        reader = self._readers.get(reader_id)
        if reader is None:
            self._send(reader_id, Refused(getattr(message, "transfer_id", ""), GREET_FIRST))
            return
        self._readers.move_to_end(reader_id)
        now = time.monotonic()
        match message:
            case Claim():
                is_early = message.transfer_id not in self._leases
                if is_early and len(self._early) < MAX_EARLY_CLAIMS:
                    self._early.append(_EarlyClaim(now + self._early_claim_s, reader_id, message))
                else:
                    self._claim(reader_id, reader, message, now)
            case Renew():
                self._send(reader_id, self._leases.renew(message, reader, now))
            case Done():
                ended = self._leases.end(message.transfer_ids, reader)
                if ended:
                    self._on_end(ended, [])
            case _:
                assert_never(message)

    def _claim(self, reader_id: bytes, reader: str, claim: Claim, now: float) -> None:
        answer = self._leases.claim(claim, reader, now)
        if not isinstance(answer, Granted) and answer.reason != NOT_STORED:
            self._warnings.warning(
                "a pull by %s was refused: %s", reader, answer.reason, request_id=claim.request_id
            )
        self._send(reader_id, answer)

    def _answer_early(self, now: float) -> None:
        """Answer claims whose offer has come, or does not come."""
        early, self._early = self._early, []
        for each in early:
            reader = self._readers.get(each.reader_id)
            if reader is None:
                continue
            if each.deadline > now and each.claim.transfer_id not in self._leases:
                self._early.append(each)
            else:
                self._claim(each.reader_id, reader, each.claim, now)

    def _greet(self, reader_id: bytes, hello: Hello) -> None:
        reason = self._objection(hello)
        if reason is not None:
            self._warnings.warning("the reader %s was refused: %s", hello.engine_id, reason)
            self._send(reader_id, Refused("", reason))
            return
        self._readers[reader_id] = hello.engine_id
        self._readers.move_to_end(reader_id)
        if len(self._readers) > MAX_READERS:
            self._readers.popitem(last=False)
        agents = tuple(info.agent for info in self._ranks)
        self._send(reader_id, Accepted(self._engine_id, self._full_kv, agents))

    @cached_property
    def _full_kv(self) -> KVDescription:
        return msgspec.structs.replace(self._kv, ranks=tuple(info.layout for info in self._ranks))

    def _objection(self, hello: Hello) -> str | None:
        if hello.version != SIDE_CHANNEL_VERSION:
            return (
                f"the reader has version {hello.version} of the side channel, the owner has "
                f"{SIDE_CHANNEL_VERSION}; run the same version of Longshore on both"
            )
        if not self._ranks:
            return NOT_READY
        difference = hello.kv.difference(self._full_kv)
        if difference is not None:
            return f"{difference}; start both engines with the same model and settings"
        try:
            check_layouts(EngineLayout(hello.kv.ranks), EngineLayout(self._full_kv.ranks))
        except LayoutMismatch as error:
            return str(error)
        return None

    def _send(self, reader_id: bytes, message: ToReader) -> None:
        try:
            self._socket.send_multipart([reader_id, _encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._warnings.warning("a reader could not be answered: %s", error)
