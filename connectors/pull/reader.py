"""The reader's side: pulls of one rank, on a thread that owns the transport's reads.

A pull goes through four phases: GREETING (the owner's layout and agents), CLAIMING (which blocks of
the owner), READING, and CHECKING: only if the lease still holds after the read do the bytes count.
A read cannot be cancelled: the pull of a request that was aborted ends like any other.
"""

import enum
import heapq
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias, assert_never

import msgspec
import numpy as np
import zmq

from longshore.connectors.pull.layout import (
    EngineLayout,
    LayoutMismatch,
    Piece,
    Routes,
    find_routes,
    plan_pull,
)
from longshore.connectors.pull.messages import (
    GREET_FIRST,
    MAX_MESSAGE_BYTES,
    MAX_TRANSFER_IDS,
    NOT_READY,
    NOT_STORED,
    SIDE_CHANNEL_VERSION,
    Accepted,
    Claim,
    Done,
    Granted,
    Held,
    Hello,
    KVDescription,
    Pull,
    PullOutcome,
    Refused,
    Renew,
    Source,
    ToOwner,
    ToReader,
    block_ids_of,
)
from longshore.connectors.pull.options import PullOptions, url_host
from longshore.connectors.pull.socket_thread import SocketThread
from longshore.connectors.pull.transport import (
    CONFIRM_TIMEOUT_S,
    BlockReads,
    PullStuck,
    Read,
    ReadState,
    Transport,
    TransportError,
)
from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import LongshoreError, shortened
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.protocol.logs.limits import LogLimit
from longshore.protocol.logs.records import fields
from longshore.protocol.transport.security import use_secret

logger = logging.getLogger(__name__)

POLL_SHARE: Final = 0.1
"""A read in progress is polled again after this share of the time that it has taken so far: what
its end waits for a poll is in proportion, and a long read costs little."""

MIN_POLL_S: Final = 50e-6
MAX_POLL_S: Final = 1e-3

ANSWER_TIMEOUT_S: Final = 5.0
"""How long an owner may take to answer a message."""

ANY_ENGINE: Final = "*"
"""As `Source.engine_id`: whatever engine answers at the address."""

GREET_AGAIN_S: Final = 0.05
IDLE_OWNER_S: Final = 600.0
"""After this time without use, an owner is disconnected; it may have been replaced."""

RENEWALS_PER_LEASE: Final = 3
MAX_MESSAGES_PER_STEP: Final = 64

_decoder: Final = msgspec.msgpack.Decoder(ToReader)
_encoder: Final = msgspec.msgpack.Encoder()


class Keep(NamedTuple):
    """Renew the lease of this transfer from now on."""

    source: Source


class Drop(NamedTuple):
    """End the lease of this transfer."""

    source: Source


class Cancel(NamedTuple):
    """The request does not wait any more."""

    request_id: str


ReaderItem: TypeAlias = KVDescription | Keep | Pull | Cancel | Drop
"""A KVDescription is that of this engine, once all its ranks are known; it comes first."""


class EndedPull(NamedTuple):
    """num_blocks, num_bytes, seconds: filled, and how long the reads and the check after them took.
    failed: blocks that were not filled."""

    request_id: str
    failed: list[int]
    num_blocks: int
    num_bytes: int
    seconds: float
    outcome: PullOutcome


class Phase(enum.Enum):
    GREETING = enum.auto()
    CLAIMING = enum.auto()
    READING = enum.auto()
    CHECKING = enum.auto()


@dataclass(eq=False)
class _Connection:
    """The connection to one owner.

    routes, layout: None until it has answered. peers: by rank of the owner.
    greet_at: when the next greeting is due.
    used_at:  when it was last needed.
    done:     transfers that it has not been told to end yet.
    """

    key: tuple[str, int, str]
    socket: "zmq.Socket[bytes]"
    greet_at: float
    used_at: float
    routes: Routes | None = None
    peers: dict[int, str] = field(default_factory=dict)
    layout: EngineLayout | None = None
    done: list[str] = field(default_factory=list)


@dataclass(eq=False)
class _Pull:
    """tables: of the reader, by group. targets: the blocks that it is to fill.

    deadline:  of its phase.
    posted:    when its reads began.
    is_broken: a read has failed.
    check:     number of the `Renew` that asked, after the read, whether the lease still held. The
               answer to an earlier one proves nothing.
    """

    command: Pull
    owner: _Connection
    deadline: float
    tables: tuple[Int32Array, ...]
    targets: set[int]
    phase: Phase = Phase.GREETING
    reads: list[Read] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    num_bytes: int = 0
    posted: float | None = None
    is_broken: bool = False
    check: int = 0


class Reader:
    """on_end: called on the thread with each pull that has ended. answer_timeout_s: None:
    ANSWER_TIMEOUT_S.

    resetting_since: when the thread began to close all connections by force; None: it is not.
    """

    def __init__(
        self,
        transport: Transport,
        options: PullOptions,
        engine_id: str,
        rank: int,
        on_end: Callable[[EndedPull], None],
        answer_timeout_s: float | None = None,
    ) -> None:
        self._answer_timeout_s = ANSWER_TIMEOUT_S if answer_timeout_s is None else answer_timeout_s
        self._transport, self._options = transport, options
        self._engine_id, self._rank, self._on_end = engine_id, rank, on_end
        self._kv: KVDescription | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._owners: dict[tuple[str, int, str], _Connection] = {}
        self._pulls: dict[str, _Pull] = {}
        self._pulls_of: dict[str, list[_Pull]] = {}  # by transfer
        self._kept: dict[str, tuple[Source, float]] = {}  # with the next renewal, by transfer
        self._renewals: list[tuple[float, str]] = []  # a heap; an entry may be out of date
        self._num_uses: Counter[str] = Counter()  # owners by peer: two can be one engine
        self._warnings = LogLimit(logger)
        self._numbers = itertools.count(1)
        self.resetting_since: float | None = None
        self._thread: SocketThread[ReaderItem] = SocketThread("pull-reader", self._step)

    def start(self) -> None:
        self._thread.start()

    def put(self, item: ReaderItem) -> None:
        self._thread.put(item)

    @property
    def failure(self) -> Exception | None:
        return self._thread.failure

    def close(self) -> None:
        """End all pulls, and the transport. Raises PullStuck if a read may still write."""
        about = "so a read may still write to blocks of this rank"
        since = self.resetting_since  # waiting once is enough
        passed_s = 0.0 if since is None else time.monotonic() - since
        if not self._thread.close(timeout_s=max(CONFIRM_TIMEOUT_S - passed_s, 0.0)):
            raise PullStuck(
                f"the thread of reads did not end within {CONFIRM_TIMEOUT_S:g} s, {about}"
            )
        if self.failure is not None:
            raise PullStuck(f"the thread of reads has failed, {about}: {self.failure}")
        try:
            self._transport.close()
        except Exception as error:
            raise PullStuck(f"the transport cannot be closed, {about}: {error}") from error
        self._context.destroy(linger=0)

    # On the thread

    def _step(self, items: Sequence[ReaderItem]) -> float | None:
        now = time.monotonic()
        for item in items:
            self._take(item, now)
        has_more = [self._receive(owner) for owner in list(self._owners.values())]
        self._poll_reads()
        now = time.monotonic()
        self._greet(now)
        self._renew(now)
        self._expire(now)
        if any(has_more):
            return 0.0
        times = [pull.deadline for pull in self._pulls.values()]
        times += [renew_at for renew_at, _ in self._renewals[:1]]
        if self._kv is not None:
            times += [each.greet_at for each in self._owners.values() if each.routes is None]
        times += [each.used_at + IDLE_OWNER_S for each in self._owners.values()]
        times += [
            now + poll_interval_s(now - pull.posted)
            for pull in self._pulls.values()
            if pull.phase is Phase.READING and pull.posted is not None
        ]
        return min(times, default=None)

    def _take(self, item: ReaderItem, now: float) -> None:
        match item:
            case KVDescription():
                self._kv = item
            case Keep(source=source):
                self._keep(source, now)
            case Drop(source=source):
                self._kept.pop(source.transfer_id, None)
                owner = self._owner_of(source, now)  # again, if a read has failed
                owner.done.append(source.transfer_id)
                self._send_done(owner)
            case Pull():
                self._begin(item, now)
            case Cancel(request_id=request_id):
                pull = self._pulls.get(request_id)
                if pull is not None and pull.phase in (Phase.GREETING, Phase.CLAIMING):
                    self._fail(pull, PullOutcome.CANCELLED, "its request does not wait any more")
            case _:
                assert_never(item)

    def _begin(self, command: Pull, now: float) -> None:
        assert self._kv is not None
        owner = self._owner_of(command.source, now)
        tables = block_ids_of(command.tables)
        targets: set[int] = set()
        for table, group in zip(tables, self._kv.ranks[self._rank].groups, strict=True):
            size = group.spec.block_size
            targets.update(
                table[command.first_token // size : -(-command.num_tokens // size)].tolist()
            )
        targets.discard(NULL_BLOCK)
        pull = _Pull(command, owner, now + self._answer_timeout_s, tables, targets)
        self._pulls[command.request_id] = pull
        self._pulls_of.setdefault(command.source.transfer_id, []).append(pull)
        if owner.routes is not None:
            self._claim(pull)

    # Owners

    def _owner_of(self, source: Source, now: float) -> _Connection:
        key = _key(source)
        owner = self._owners.get(key)
        if owner is None:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.IPV6, int(":" in source.host))
            if self._options.secret is not None:
                use_secret(socket, self._options.secret, bind=False)
            socket.connect(f"tcp://{url_host(source.host)}:{source.port}")
            self._thread.poller.register(socket, zmq.POLLIN)
            owner = self._owners[key] = _Connection(key, socket, now, now)
        owner.used_at = now
        return owner

    def _greet(self, now: float) -> None:
        for owner in self._owners.values():
            if owner.routes is None and owner.greet_at <= now and self._kv is not None:
                hello = Hello(SIDE_CHANNEL_VERSION, self._engine_id, self._kv)
                self._send(owner, hello)
                owner.greet_at = now + self._answer_timeout_s

    def _disconnect(
        self,
        owner: _Connection,
        reason: str,
        outcome: PullOutcome = PullOutcome.FAILED,
        *,
        ends_leases: bool = False,
    ) -> None:
        """End the connection; pulls from the owner that do not read have failed. The next renewal
        of a lease connects again, unless the owner has none of them any more (`ends_leases`)."""
        if ends_leases:
            for transfer_id, (source, _) in list(self._kept.items()):
                if _key(source) == owner.key:
                    del self._kept[transfer_id]
        for pull in [each for each in self._pulls.values() if each.owner is owner]:
            if pull.phase is not Phase.READING:
                self._fail(pull, outcome, reason)
        if any(pull.owner is owner for pull in self._pulls.values()):
            return  # until its reads have ended
        self._thread.poller.unregister(owner.socket)
        owner.socket.close()
        del self._owners[owner.key]
        for peer in owner.peers.values():
            self._num_uses[peer] -= 1
            if not self._num_uses[peer]:
                del self._num_uses[peer]
                self._transport.disconnect(peer)
        owner.peers.clear()

    def _send(self, owner: _Connection, message: ToOwner) -> None:
        try:
            owner.socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("%s cannot be reached: %s", owner.key, error)

    def _send_done(self, owner: _Connection) -> None:
        if owner.routes is not None and owner.done:
            self._send(owner, Done(tuple(owner.done[:MAX_TRANSFER_IDS])))
            owner.done.clear()  # what has no room expires

    def _receive(self, owner: _Connection) -> bool:
        """Handle messages of an owner; returns whether there may be more."""
        for _ in range(MAX_MESSAGES_PER_STEP):
            if self._owners.get(owner.key) is not owner:
                return False
            try:
                frames = owner.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                (data,) = frames
                self._handle(owner, _decoder.decode(data))
            except (ValueError, RecursionError) as error:  # of msgspec, too
                about = f"its owner sent an invalid message: {error}"
                self._disconnect(owner, about, ends_leases=True)
        return True

    def _handle(self, owner: _Connection, message: ToReader) -> None:
        match message:
            case Accepted():
                self._connect(owner, message)
            case Refused(transfer_id="", reason=reason):
                if reason == NOT_READY:
                    owner.greet_at = time.monotonic() + GREET_AGAIN_S
                else:
                    about = f"its owner refuses this engine: {reason}"
                    self._disconnect(owner, about, PullOutcome.REFUSED, ends_leases=True)
            case Refused(reason=reason) if reason == GREET_FIRST:
                about = "its owner was restarted, or the connection was interrupted"
                self._disconnect(owner, about, PullOutcome.REFUSED)
            case Refused(transfer_id=transfer_id, reason=reason):
                why = reason if reason == NOT_STORED else f"its owner refuses it: {reason}"
                for pull in self._of_transfer(owner, transfer_id, Phase.CLAIMING):
                    self._fail(pull, PullOutcome.REFUSED, why)
            case Granted():
                for pull in self._of_transfer(owner, message.transfer_id, Phase.CLAIMING):
                    self._read(pull, message)
            case Held():
                for transfer_id in message.transfer_ids:
                    for pull in self._of_transfer(owner, transfer_id, Phase.CHECKING):
                        if pull.check <= message.number:
                            is_whole = not pull.failed
                            self._end(
                                pull, PullOutcome.COMPLETE if is_whole else PullOutcome.PARTIAL
                            )
                for transfer_id in message.ended:
                    self._kept.pop(transfer_id, None)
                    for pull in self._of_transfer(owner, transfer_id, Phase.CHECKING):
                        about = "its lease ended during the read"
                        self._fail(pull, PullOutcome.LEASE_ENDED, about)
            case _:
                assert_never(message)

    def _of_transfer(self, owner: _Connection, transfer_id: str, phase: Phase) -> list[_Pull]:
        return [
            pull
            for pull in self._pulls_of.get(transfer_id, ())
            if pull.owner is owner and pull.phase is phase
        ]

    def _connect(self, owner: _Connection, accepted: Accepted) -> None:
        assert self._kv is not None
        if owner.routes is not None:
            return
        try:
            reason = self._kv.difference(accepted.kv)
            if owner.key[2] not in (ANY_ENGINE, accepted.engine_id):
                reason = f"it is {accepted.engine_id} now, not {owner.key[2]}: it was restarted"
            if reason is not None or len(accepted.agents) != len(accepted.kv.ranks):
                raise LayoutMismatch(reason or "it has not as many agents as ranks")
            if len(set(accepted.agents)) != len(accepted.agents):
                raise LayoutMismatch("two of its ranks have the same agent")
            layout = EngineLayout(accepted.kv.ranks)
            routes = find_routes(EngineLayout(self._kv.ranks), self._rank, layout)
            for rank in sorted({route.owner_rank for route in routes}):
                peer = self._transport.connect(accepted.agents[rank])
                owner.peers[rank] = peer
                self._num_uses[peer] += 1
        except LongshoreError as error:
            about = f"it cannot be pulled from its owner: {error}"
            self._disconnect(owner, about, PullOutcome.REFUSED, ends_leases=True)
            return
        owner.routes, owner.layout = routes, layout
        logger.info("connected to %s at %s:%d", accepted.engine_id, *owner.key[:2])
        self._send_done(owner)
        now = time.monotonic()
        for source, _ in list(self._kept.values()):
            if _key(source) == owner.key:
                self._keep(source, now)
        for pull in list(self._pulls.values()):
            if pull.owner is owner:
                self._claim(pull)

    # Leases

    def _keep(self, source: Source, renew_at: float) -> None:
        self._kept[source.transfer_id] = source, renew_at
        heapq.heappush(self._renewals, (renew_at, source.transfer_id))

    def _renew(self, now: float) -> None:
        due: dict[tuple[str, int, str], list[str]] = {}
        while self._renewals and self._renewals[0][0] <= now:
            renew_at, transfer_id = heapq.heappop(self._renewals)
            source, next_at = self._kept.get(transfer_id, (None, 0.0))
            if source is None or next_at != renew_at:
                continue
            owner = self._owner_of(source, now)  # again, if it was disconnected
            self._keep(source, now + source.lease_s / RENEWALS_PER_LEASE)
            if owner.routes is not None:  # else as soon as it is connected
                due.setdefault(owner.key, []).append(transfer_id)
        for key, transfer_ids in due.items():
            for first in range(0, len(transfer_ids), MAX_TRANSFER_IDS):
                some = tuple(transfer_ids[first : first + MAX_TRANSFER_IDS])
                self._send(self._owners[key], Renew(some, next(self._numbers)))

    # Pulls

    def _claim(self, pull: _Pull) -> None:
        source = pull.command.source
        self._enter(pull, Phase.CLAIMING, self._answer_timeout_s)
        self._send(
            pull.owner,
            Claim(
                source.transfer_id,
                source.engine_id,
                source.request_id,
                source.token_digest,
                source.blocks_digest,
            ),
        )

    def _read(self, pull: _Pull, granted: Granted) -> None:
        owner, command = pull.owner, pull.command
        assert owner.routes is not None
        assert owner.layout is not None
        try:
            owner_tables = block_ids_of(granted.tables)
            _check_tables(owner_tables, owner.layout)
            plan = plan_pull(
                owner.routes,
                owner_tables,
                pull.tables,
                first_token=command.first_token,
                num_tokens=min(command.num_tokens, granted.num_tokens),
                num_owner_tokens=granted.num_tokens,
            )
            if command.num_tokens > granted.num_tokens:
                raise TransportError(f"the owner has only {granted.num_tokens} tokens")
            pull.failed.update(plan.missing)
            if plan.missing:
                logger.info(
                    "the owner has freed what %d blocks of a pull need; their tokens are computed",
                    len(plan.missing),
                    extra=fields(request_id=command.request_id),
                )
            pull.posted = time.monotonic()
            self._post(pull, plan.pieces)
        except (ValueError, TransportError) as error:
            if not pull.reads:
                self._fail(pull, PullOutcome.FAILED, str(error))
                self._disconnect(owner, "another read from its owner failed")
                return
            pull.is_broken = True
        self._enter(pull, Phase.READING, self._options.read_timeout_s)
        self._poll_reads()

    def _enter(self, pull: _Pull, phase: Phase, timeout_s: float) -> None:
        pull.phase, pull.deadline = phase, time.monotonic() + timeout_s

    def _post(self, pull: _Pull, pieces: Sequence[Piece]) -> None:
        by_rank: dict[int, list[BlockReads]] = {}
        for rank, pattern, owner_blocks, reader_blocks in pieces:
            by_rank.setdefault(rank, []).append(BlockReads(pattern, owner_blocks, reader_blocks))
            pull.num_bytes += len(owner_blocks) * int(np.sum(pattern.lengths))
        for rank, reads in by_rank.items():
            pull.reads += self._transport.post(pull.owner.peers[rank], reads)

    def _poll_reads(self) -> None:
        for pull in [each for each in self._pulls.values() if each.phase is Phase.READING]:
            states = [(read, read.poll()) for read in pull.reads]
            ended = ReadState.DONE, ReadState.FAILED
            pull.reads = [read for read, state in states if state not in ended]
            failed = ReadState.FAILED, ReadState.UNCONFIRMED
            pull.is_broken |= any(state in failed for _, state in states)
            if any(state is ReadState.UNCONFIRMED for _, state in states):
                pull.deadline = 0.0  # end it by force at once
            if pull.reads:
                continue
            if pull.is_broken:
                self._fail(pull, PullOutcome.FAILED, "reading from its owner failed")
                self._disconnect(pull.owner, "another read from its owner failed")
                continue
            self._enter(pull, Phase.CHECKING, self._answer_timeout_s)
            pull.check = next(self._numbers)
            self._send(pull.owner, Renew((pull.command.source.transfer_id,), pull.check))

    def _expire(self, now: float) -> None:
        late = [pull for pull in self._pulls.values() if pull.deadline <= now]
        if any(pull.phase is Phase.READING for pull in late):
            self._reset(now)
            return
        for pull in late:
            if pull.command.request_id in self._pulls:  # did not fail with its owner
                about = f"its owner did not answer within {self._answer_timeout_s:g} s"
                self._fail(pull, PullOutcome.UNREACHABLE, about)
                self._disconnect(pull.owner, "its owner does not answer", PullOutcome.UNREACHABLE)
        in_use = {pull.owner for pull in self._pulls.values()}
        for owner in list(self._owners.values()):
            if owner in in_use:
                owner.used_at = now
            elif owner.used_at + IDLE_OWNER_S <= now:
                self._disconnect(owner, "")

    def _reset(self, now: float) -> None:
        """End the reads that are late, or may go on after an error. They cannot be ended one by
        one, so all others fail too."""
        logger.warning("a read must be ended: closing the connections to all owners by force")
        self.resetting_since = time.monotonic()
        self._transport.reset()
        self.resetting_since = None
        for pull in [each for each in self._pulls.values() if each.phase is Phase.READING]:
            if pull.is_broken:
                self._fail(pull, PullOutcome.FAILED, "reading from its owner failed")
            elif pull.deadline <= now:
                timeout_s = self._options.read_timeout_s
                self._fail(pull, PullOutcome.LATE, f"its read took longer than {timeout_s:g} s")
            else:
                self._fail(pull, PullOutcome.FAILED, "another read was ended by force")
        self._num_uses.clear()
        for owner in list(self._owners.values()):
            owner.peers.clear()  # the transport has disconnected them
            self._disconnect(owner, "the connections to all owners were closed by force")

    def _fail(self, pull: _Pull, outcome: PullOutcome, reason: str) -> None:
        """None of its reads is in progress."""
        request_id, owner_id = pull.command.request_id, _name(pull.owner)
        if outcome is PullOutcome.CANCELLED or reason == NOT_STORED:
            about = fields(request_id=request_id)
            logger.debug("a pull from %s was cancelled: %s", owner_id, reason, extra=about)
        else:
            self._warnings.warning(
                "a pull from %s failed: %s",
                owner_id,
                shortened(reason),
                request_id=request_id,
                outcome=outcome.value,
            )
        pull.failed |= pull.targets
        self._end(pull, outcome)

    def _end(self, pull: _Pull, outcome: PullOutcome) -> None:
        del self._pulls[pull.command.request_id]
        transfer_id = pull.command.source.transfer_id
        self._pulls_of[transfer_id].remove(pull)
        if not self._pulls_of[transfer_id]:
            del self._pulls_of[transfer_id]
        failed = sorted(pull.failed)
        num_blocks = len(pull.targets) - len(failed)
        num_bytes = pull.num_bytes if num_blocks else 0
        seconds = 0.0 if pull.posted is None else time.monotonic() - pull.posted
        request_id = pull.command.request_id
        self._on_end(EndedPull(request_id, failed, num_blocks, num_bytes, seconds, outcome))


def poll_interval_s(taken_s: float) -> float:
    """When to poll a read again that has taken so long."""
    return min(max(taken_s * POLL_SHARE, MIN_POLL_S), MAX_POLL_S)


def _name(owner: _Connection) -> str:
    host, port, engine_id = owner.key
    return f"{host}:{port}" if engine_id == ANY_ENGINE else engine_id


def _key(source: Source) -> tuple[str, int, str]:
    return source.host, source.port, source.engine_id


def _check_tables(tables: Sequence[Int32Array], layout: EngineLayout) -> None:
    """Raise ValueError for block ids that the owner cannot have."""
    num_blocks = layout.ranks[0].num_blocks
    if len(tables) != len(layout.ranks[0].groups):
        raise ValueError(f"the owner sent {len(tables)} block tables")
    for table in tables:
        if len(table) and not 0 <= table.min() <= table.max() < num_blocks:
            raise ValueError("the owner sent a block id that it does not have")
