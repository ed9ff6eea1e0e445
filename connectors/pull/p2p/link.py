"""The two ends of a link, each with a thread that calls the library."""

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from longshore.connectors.pull.p2p.communicator import (
    Communicator,
    CommunicatorError,
    Library,
    Side,
    WaitUntil,
)
from longshore.connectors.pull.p2p.messages import (
    Join,
    Send,
    Share,
    ToOwner,
    ToReader,
    array_bytes,
)
from longshore.connectors.pull.p2p.peer_memory import Mapping
from longshore.connectors.pull.p2p.rendezvous import Rendezvous
from longshore.connectors.pull.p2p.staging import (
    CHUNK_BYTES,
    Chunk,
    StagingPool,
    positions_of,
)
from longshore.connectors.pull.transport import Memory, ReadState, TransportError
from longshore.protocol.arrays import Int64Array

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 2
"""Chunks of a link: while one is transferred, the next is gathered, and the last one scattered."""

MAX_REQUESTS: Final = 16
"""Requests that wait at the owner's end. A reader has no more in progress than MAX_IN_FLIGHT."""

MAPPED_CHUNK_BYTES: Final = 256 << 20
"""Copied at a time from mapped memory; a link that ends waits for the end of this copy."""

ABORT_AFTER_S: Final = 0.5
"""How long the thread of an ended link may take before its communicator is aborted from outside: it
waits in a call of the library that does not return."""

MAX_STUCK: Final = 16
"""Threads of ended links in calls of the library that do not return; with as many, no new link is
begun."""

READY: Final = "ready"
"""Key of the rendezvous: the owner's end begins to connect."""

ItemT = TypeVar("ItemT")
MessageT = TypeVar("MessageT")


class LinkEnded(Exception):
    """On the thread of a link: stop. `Link.failure` says why."""


class _Transfer(NamedTuple):
    """One chunk in the library. chunk: None at the owner."""

    wait: WaitUntil
    deadline_s: float
    chunk: Chunk | None = None


class StartedLinks:
    """The links of a transport whose threads may still run. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: list[Link[Any, Any]] = []

    def add(self, link: "Link[Any, Any]") -> None:
        with self._lock:
            self._links.append(link)

    def check(self) -> None:
        """Raise TransportError if MAX_STUCK threads of ended links have not ended."""
        with self._lock:
            self._links = [link for link in self._links if link.thread.is_alive()]
            num_stuck = sum(link.failure is not None for link in self._links)
        if num_stuck >= MAX_STUCK:
            raise TransportError(
                f"{num_stuck} ended links are still in calls of the library that do not return, so "
                "no new one is begun. Can the hosts reach each other on all ports? With several "
                "networks, set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME on all of them."
            )

    def join(self, timeout_s: float) -> None:
        """Wait for all threads, of which some may be in a call that cannot be ended."""
        deadline_s = time.monotonic() + timeout_s
        for link in self._links:
            link.thread.join(max(deadline_s - time.monotonic(), 0.0))


class Here(NamedTuple):
    """What the links of one rank in one direction share.

    memory:    with the KV blocks.
    timeout_s: after which a transfer, or connecting, has failed.
    """

    library: Library
    memory: Memory
    staging: StagingPool
    started: StartedLinks
    timeout_s: float


class Link(ABC, Generic[ItemT, MessageT]):
    """One end of a link.

    send:   gives a message to the other end, on any thread.
    on_end: called by `end`.

    thread:  calls the library.
    failure: why it has ended; None: it has not.
    late_at: when the call that the thread is in is late; None: it waits for work.
    """

    side: ClassVar[Side]

    def __init__(
        self, here: Here, send: Callable[[MessageT | Share], None], on_end: Callable[[], None]
    ) -> None:
        self._library, self._memory, self._staging, self._started, self._timeout_s = here
        self._send, self._on_end = send, on_end
        self.rendezvous = Rendezvous(lambda key, value: send(Share(key, value)), self._timeout_s)
        self.failure: str | None = None
        self.late_at: float | None = None
        self._copying = threading.Lock()  # while blocks are read or written
        self._items: queue.SimpleQueue[ItemT | None] = queue.SimpleQueue()
        self._communicator: Communicator | None = None
        self._buffers: deque[Tensor] = deque()  # in use, in the order of their transfers
        self._in_flight: deque[_Transfer] = deque()
        self.thread = threading.Thread(
            target=self._run, name=f"p2p-{self.side.name.lower()}", daemon=True
        )

    @abstractmethod
    def _serve(self) -> None:
        """On the thread, with a communicator: handle items until there is a None."""

    @abstractmethod
    def _finished(self, transfer: _Transfer, buffer: Tensor) -> None:
        """The chunk in the buffer has been transferred."""

    def start(self) -> None:
        self.late_at = time.monotonic() + self._timeout_s
        self.thread.start()
        self._started.add(self)

    def put(self, item: ItemT) -> None:
        self._items.put(item)

    def end(self, reason: str) -> None:
        """On any thread, does not block: no copy begins any more. `has_ended` tells when the last
        one is over."""
        if self.failure is not None:
            return
        self.failure = reason
        logger.debug("a link has ended: %s", reason)
        self.rendezvous.end()
        self._items.put(None)
        self._on_end()
        # A thread that is not started yet ends at its first look at the rendezvous.
        if self.thread is not threading.current_thread() and self.thread.is_alive():
            threading.Thread(target=self._abort, name="p2p-abort", daemon=True).start()

    def _abort(self) -> None:
        """A call of the library can block, so only a thread that does nothing else does this."""
        self.thread.join(ABORT_AFTER_S)
        communicator = self._communicator
        if self.thread.is_alive() and communicator is not None:
            communicator.abort()

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Whether this link certainly touches no block any more, now or within this time."""
        if self.failure is None:
            return False
        if not self._copying.acquire(timeout=timeout_s):
            return False
        self._copying.release()
        return True

    # On the thread

    def _run(self) -> None:
        try:
            self._communicator = self._connect()
            self.late_at = None
            self._check()
            self._serve()
        except LinkEnded:
            pass
        except (CommunicatorError, RuntimeError) as error:  # of torch, CUDA and the library
            self.end(str(error))
        except Exception as error:
            logger.exception("a link has failed")
            self.end(str(error))
        self.end("it is not needed any more")
        try:
            self._close()
        except Exception:
            logger.exception("a link could not be closed")

    def _connect(self) -> Communicator | None:
        return self._library.connect(self.side, self.rendezvous, self._timeout_s)

    def _close(self) -> None:
        self._in_flight.clear()
        communicator = self._communicator
        is_unused = communicator is None or communicator.close()
        while self._buffers:
            self._staging.replace(self._buffers.popleft(), is_unused=is_unused)

    def _check(self) -> None:
        if self.failure is not None:
            raise LinkEnded

    def _buffer(self, deadline_s: float) -> Tensor:
        """Room for another chunk. Finishes those in flight as far as that is needed."""
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._finish()
        while True:
            left_s = 0.0 if self._in_flight else max(deadline_s - time.monotonic(), 0.0)
            if (buffer := self._staging.take(left_s)) is not None:
                self._buffers.append(buffer)
                return buffer
            if not self._in_flight:
                raise CommunicatorError("there was no staging memory; other transfers are late")
            self._finish()

    def _finish(self) -> None:
        """The oldest transfer."""
        transfer = self._in_flight[0]
        self.late_at = transfer.deadline_s
        transfer.wait(transfer.deadline_s)
        self._check()
        self._finished(transfer, self._buffers[0])
        self._in_flight.popleft()
        self._staging.release(self._buffers.popleft())
        self.late_at = None

    def _copy(self, targets: Int64Array, sources: Int64Array, lengths: Int64Array) -> None:
        with self._copying:
            self._check()  # within the lock: who has seen it free after `end` is sure
            self._library.copier.copy(targets, sources, lengths)


class SendingLink(Link[Send, ToReader]):
    """The owner's end."""

    side = Side.OWNER

    def put(self, item: Send) -> None:
        if self._items.qsize() < MAX_REQUESTS:
            super().put(item)
        else:
            self.end("its reader asks for more than it receives")

    def _connect(self) -> Communicator | None:
        self.rendezvous.set(READY, b"")
        return super()._connect()

    def _serve(self) -> None:
        while True:
            try:
                request = self._items.get(block=not self._in_flight)
            except queue.Empty:
                self._finish()
                continue
            self._check()
            assert request is not None
            self._begin(request)

    def _begin(self, request: Send) -> None:
        offsets, lengths = self._runs_of(request)
        deadline_s = time.monotonic() + self._timeout_s
        buffer = self._buffer(deadline_s)
        sources = self._memory.address + offsets
        self._copy(buffer.data_ptr() + positions_of(lengths), sources, lengths)
        assert self._communicator is not None
        self.late_at = deadline_s
        wait = self._communicator.send(buffer[: int(lengths.sum())], request.number)
        self._in_flight.append(_Transfer(wait, deadline_s))

    def _runs_of(self, request: Send) -> tuple[Int64Array, Int64Array]:
        """Raises CommunicatorError for what is not in the memory of this rank."""
        offsets, lengths = (
            np.frombuffer(each, "<i8").astype(np.int64) if len(each) % 8 == 0 else None
            for each in (request.offsets, request.lengths)
        )
        size = self._memory.num_bytes
        if (
            offsets is None
            or lengths is None
            or not 0 < len(offsets) == len(lengths)
            or lengths.min() <= 0
            or lengths.max() > CHUNK_BYTES
            or lengths.sum() > CHUNK_BYTES
            or offsets.min() < 0
            or (offsets > size - lengths).any()
        ):
            raise CommunicatorError("the reader has asked for bytes outside the owner's memory")
        return offsets, lengths

    def _finished(self, transfer: _Transfer, buffer: Tensor) -> None:
        pass


class MappedLink(SendingLink):
    """The owner's end, if the reader copies from its memory."""

    def _connect(self) -> Communicator | None:
        self.rendezvous.set(READY, b"")
        return None

    def _begin(self, request: Send) -> None:
        raise CommunicatorError("the reader copies by itself")


class P2PRead:
    """A read in progress; as `Read`. chunks_of: divides it into chunks of at most so many bytes."""

    def __init__(
        self,
        link: "ReceivingLink",
        chunks_of: Callable[[int], Iterator[Chunk]],
        deadline_s: float,
    ) -> None:
        self._link, self.chunks_of, self.deadline_s = link, chunks_of, deadline_s
        self.state = ReadState.IN_PROGRESS

    def poll(self) -> ReadState:
        if self.state is ReadState.IN_PROGRESS and self._link.has_ended():
            return ReadState.FAILED
        return self.state


class ReceivingLink(Link[P2PRead, ToOwner]):
    """The reader's end. session: of the owner. join_message: begins the link."""

    side = Side.READER

    def __init__(
        self,
        session: bytes,
        here: Here,
        send: Callable[[ToOwner], None],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(here, send, on_end)
        self.join_message = Join(session, here.library.name)
        self._number = 0

    def _connect(self) -> Communicator | None:
        self.rendezvous.get(READY)
        return super()._connect()

    def _serve(self) -> None:
        while True:
            read = self._items.get()
            self._check()
            assert read is not None
            if read.deadline_s <= time.monotonic():  # others took all the time
                read.state = ReadState.FAILED
                continue
            self._read(read)
            read.state = ReadState.DONE

    def _read(self, read: P2PRead) -> None:
        for chunk in read.chunks_of(CHUNK_BYTES):
            self._request(chunk, read.deadline_s)
        while self._in_flight:
            self._finish()

    def _request(self, chunk: Chunk, deadline_s: float) -> None:
        assert self._communicator is not None
        buffer = self._buffer(deadline_s)
        self.late_at = deadline_s
        number, self._number = self._number, self._number + 1
        self._send(Send(number, array_bytes(chunk.owner_offsets), array_bytes(chunk.lengths)))
        wait = self._communicator.receive(buffer[: chunk.num_bytes], number)
        self._in_flight.append(_Transfer(wait, deadline_s, chunk))

    def _finished(self, transfer: _Transfer, buffer: Tensor) -> None:
        assert transfer.chunk is not None
        _, offsets, lengths = transfer.chunk
        sources = buffer.data_ptr() + positions_of(lengths)
        self._copy(self._memory.address + offsets, sources, lengths)


class MappingLink(ReceivingLink):
    """The reader's end, if it copies from the owner's memory."""

    def __init__(
        self,
        mapping: Mapping,
        session: bytes,
        here: Here,
        send: Callable[[ToOwner], None],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(session, here, send, on_end)
        self.join_message = Join(session, "mapped")
        self._mapping = mapping

    def _connect(self) -> Communicator | None:
        self.rendezvous.get(READY)
        return None

    def _read(self, read: P2PRead) -> None:
        for owner, reader, lengths in read.chunks_of(MAPPED_CHUNK_BYTES):
            self._copy(self._memory.address + reader, self._mapping.address + owner, lengths)

    def _close(self) -> None:
        super()._close()
        try:
            self._mapping.close()
        except RuntimeError as error:
            logger.warning("the memory of an owner is still mapped: %s", error)
