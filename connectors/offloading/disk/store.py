"""One rank's share of the disk tier: KV blocks in slots, which survive restarts and kills.

The scheduler's ledger decides which key goes to which slot. A store writes and reads the bytes, in
the order that keeps its index true: clear the record of a slot, write the data, write the record.
Each block is read back with its checksum, so damage of any kind, and a block that a power loss left
half written, is a miss and never wrong bytes.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from msgspec.structs import asdict

from longshore.connectors.base.checksum import block_checksum
from longshore.connectors.offloading.disk.catalog import (
    identity_directories,
    size_on_disk,
)
from longshore.connectors.offloading.disk.identity import (
    IDENTITY_FILE,
    StoreIdentity,
    read_identity,
)
from longshore.connectors.offloading.disk.index import MAX_KEY_BYTES, Entry
from longshore.connectors.offloading.disk.io import Direction, IoBackend, make_backend
from longshore.connectors.offloading.disk.opening import StoreFiles, open_files
from longshore.connectors.offloading.disk.results import (
    BlockRead,
    BlockWrite,
    DiskStoreStats,
    OtherStore,
    Outcome,
)
from longshore.connectors.offloading.disk.transfers import Block, BlockMover, Chunk

logger = logging.getLogger(__name__)

_CHUNKS_IN_PROGRESS: Final = 3
"""Some are read or written while one is copied or checked."""

_Finish: TypeAlias = Callable[[Sequence[Block], Sequence[OSError | None]], None]


class DiskStore:
    """Thread-safe; `read`, `write` and `delete` block, and belong in a transfer thread. One process
    at a time can open the store of a path, identity and rank. While a slot is read or written, the
    caller gives it to no other write.
    """

    def __init__(
        self, path: Path, identity: StoreIdentity, rank: int, files: StoreFiles, backend: IoBackend
    ) -> None:
        self.identity_digest: Final = identity.rank_digest(rank)
        self._path = path
        self._identity = identity
        self._files = files
        self._index = files.index
        self._segments = files.segments
        self._backend = backend
        self._slot_bytes = files.index.geometry.slot_bytes
        self._mover = BlockMover(backend, files.segments, self._slot_bytes)
        self._lock = threading.Lock()  # of everything below, the index and the segments
        self._segment_users: Counter[int] = Counter()
        self._stats = DiskStoreStats()

    @classmethod
    def open(
        cls,
        path: Path,
        identity: StoreIdentity,
        *,
        slot_bytes: int,
        capacity_bytes: int,
        rank: int = 0,
        io: str | IoBackend = "auto",
    ) -> "DiskStore":
        """Open or create the store of one rank.

        slot_bytes:     size of the largest block; slots are rounded up to pages.
        capacity_bytes: of this rank, including the index. If it is lower than before, the oldest
                        entries are deleted, and blocks in slots that no longer exist are moved.
        io:             "nixl", "threads", or "auto": NIXL if it can be used, else threads.

        Raises ConfigError, StoreInUse or DiskStoreError.
        """
        backend = make_backend(io) if isinstance(io, str) else io
        try:
            files = open_files(path, identity, rank, slot_bytes, capacity_bytes)
            store = cls(path, identity, rank, files, backend)
        except BaseException:
            backend.close()
            raise
        logger.info(
            "disk store %s: %d blocks, room for %d of %d bytes; %s",
            files.directory.path,
            len(store._index),
            store.capacity_slots,
            store._slot_bytes,
            store.io_name,
        )
        return store

    @property
    def io_name(self) -> str:
        """How bytes get to the disk, for people."""
        kind = "direct I/O" if self._segments.direct else "through the page cache"
        return f"{self._backend.name}, {kind}"

    @property
    def capacity_slots(self) -> int:
        """Slots are the numbers below this."""
        return self._index.num_slots

    def entries(self) -> Iterator[tuple[bytes, int]]:
        """(key, slot) of all entries, the least recently stored first. A snapshot."""
        with self._lock:
            return self._index.keys_and_slots()

    def others(self) -> list[OtherStore]:
        """The stores of other identities on the same path, which this one ignores."""
        return [
            OtherStore(_name_of(directory, self._identity), size_on_disk(directory))
            for directory in identity_directories(self._path)
            if directory.name != self._identity.digest
        ]

    def write(self, batch: Sequence[BlockWrite]) -> list[Outcome]:
        """Store blocks: OK or FAILED for each. The OK ones survive a kill from now on. Earlier
        entries of these slots and keys are deleted in any case.

        Raises ValueError if a slot, a key or a size is out of range, or occurs twice.
        """
        return self._write(
            [
                Block(position, key, slot, np.frombuffer(buffer, np.uint8), checksum)
                for position, (key, slot, buffer, checksum) in enumerate(batch)
            ]
        )

    def read(self, batch: Sequence[BlockRead]) -> list[Outcome]:
        """Read blocks into their buffers and verify them.

        Raises ValueError if a buffer has another size than the stored block.
        """
        outcomes = [Outcome.MISSING] * len(batch)
        blocks = []
        with self._lock:
            for position, (key, slot, buffer) in enumerate(batch):
                if self._index.find(key) != slot or (entry := self._index.entry(slot)) is None:
                    self._stats.num_missing += 1
                    continue
                data = np.frombuffer(buffer, np.uint8)
                if len(data) != entry.size_bytes:
                    raise ValueError(
                        f"the buffer for slot {slot} has {len(data)} bytes, and the stored block "
                        f"{entry.size_bytes}"
                    )
                blocks.append(Block(position, key, slot, data, entry.checksum, entry.sequence))
        self._read(blocks, outcomes)
        return outcomes

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete the entries of these keys, if any. Segments that become empty are removed."""
        with self._lock:
            slots = [slot for key in keys if (slot := self._index.find(key)) is not None]
            self._clear(slots)
            for segment in {self._segments.segment_of(slot) for slot in slots}:
                self._remove_if_empty(segment)

    def stats(self) -> DiskStoreStats:
        with self._lock:
            return replace(
                self._stats,
                num_entries=len(self._index),
                capacity_slots=self._index.num_slots,
                used_bytes=len(self._index) * self._slot_bytes,
            )

    def close(self) -> None:
        """Close the files; no operation may be in progress."""
        self._backend.close()
        self._files.close()

    def __enter__(self) -> "DiskStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, blocks: Sequence[Block]) -> list[Outcome]:
        self._validate(blocks)
        outcomes = [Outcome.FAILED] * len(blocks)
        started = time.perf_counter()

        def commit(blocks: Sequence[Block], errors: Sequence[OSError | None]) -> None:
            done = [block for block, error in zip(blocks, errors, strict=True) if error is None]
            with self._lock:
                try:
                    self._index.put(
                        Entry(
                            block.slot, block.key, len(block.data), block.checksum, block.sequence
                        )
                        for block in done
                    )
                except OSError as error:
                    done, errors = [], [error] * len(blocks)
                for block in done:
                    outcomes[block.position] = Outcome.OK
                self._stats.written_bytes += sum(len(block.data) for block in done)
                self._stats.num_failed += len(blocks) - len(done)
            self._report_failures("written", blocks, errors)

        self._move(Direction.WRITE, blocks, commit)
        with self._lock:
            self._stats.write_s += time.perf_counter() - started
        return outcomes

    def _read(self, blocks: Sequence[Block], outcomes: list[Outcome]) -> None:
        started = time.perf_counter()

        def verify(blocks: Sequence[Block], errors: Sequence[OSError | None]) -> None:
            lost = []
            for block, error in zip(blocks, errors, strict=True):
                outcome = Outcome.FAILED
                if error is None:
                    checksum = block_checksum(block.data, self.identity_digest, block.key)
                    outcome = Outcome.OK if checksum == block.checksum else Outcome.CORRUPT
                outcomes[block.position] = outcome
                if outcome is not Outcome.OK:
                    lost.append(block)
            corrupt = [block for block in lost if outcomes[block.position] is Outcome.CORRUPT]
            with self._lock:
                self._stats.read_bytes += sum(len(block.data) for block in blocks)
                self._stats.num_corrupt += len(corrupt)
                self._stats.num_failed += len(lost) - len(corrupt)
                self._clear([block.slot for block in lost if self._is_stored(block)])
            self._report_corrupt(corrupt)
            self._report_failures("read", blocks, errors)

        self._move(Direction.READ, blocks, verify)
        with self._lock:
            self._stats.read_s += time.perf_counter() - started

    def _move(self, direction: Direction, blocks: Sequence[Block], finish: _Finish) -> None:
        """Move all blocks; call `finish` for each part of them when it has been moved."""
        started: deque[Chunk] = deque()
        with self._lock:
            self._stats.queued_blocks += len(blocks)
        try:
            for chunk in self._mover.chunks(blocks):
                self._start(direction, chunk, started, finish)
                if len(started) == _CHUNKS_IN_PROGRESS:
                    self._finish(direction, started.popleft(), finish)
            while started:
                self._finish(direction, started.popleft(), finish)
        finally:
            for left in started:  # after an exception: no buffer may be in use when it propagates
                self._mover.wait(direction, left)
            with self._lock:
                self._stats.queued_blocks -= len(blocks)

    def _start(
        self,
        direction: Direction,
        blocks: Sequence[Block],
        started: deque[Chunk],
        finish: _Finish,
    ) -> None:
        """Submit what can be; finish at once what cannot."""
        is_write = direction is Direction.WRITE
        fds: dict[int, int] = {}
        errors: dict[int, OSError] = {}
        segments = {self._segments.segment_of(block.slot) for block in blocks}
        with self._lock:
            try:
                if is_write:
                    replaced = self._index.in_the_way((block.slot, block.key) for block in blocks)
                    self._index.clear(replaced)
            except OSError as error:  # then the slots must not be overwritten
                errors = dict.fromkeys(segments, error)
            for segment in segments - errors.keys():
                try:
                    fds[segment] = self._segments.fd(segment, create=is_write)
                except OSError as error:
                    errors[segment] = error
            self._segment_users.update(fds.keys())
        if errors:
            lost = [block for block in blocks if self._segments.segment_of(block.slot) in errors]
            finish(lost, [errors[self._segments.segment_of(block.slot)] for block in lost])
            blocks = [block for block in blocks if self._segments.segment_of(block.slot) in fds]
        if blocks:
            started.append(self._mover.submit(direction, blocks, fds))

    def _finish(self, direction: Direction, chunk: Chunk, finish: _Finish) -> None:
        errors = self._mover.wait(direction, chunk)
        with self._lock:
            self._segment_users.subtract(
                {self._segments.segment_of(block.slot) for block in chunk.blocks}
            )
            self._segments.close_idle(+self._segment_users)
        finish(chunk.blocks, errors)

    def _clear(self, slots: Sequence[int]) -> None:
        """Delete entries. If the index cannot be written, they exist again after a restart."""
        try:
            self._index.clear(slots)
        except OSError as error:
            logger.warning("disk store %s: index: %s", self._files.directory.path, error)

    def _is_stored(self, block: Block) -> bool:
        """Whether the entry that was read is still there."""
        entry = self._index.entry(block.slot)
        return entry is not None and entry.sequence == block.sequence

    def _remove_if_empty(self, segment: int) -> None:
        per_segment = self._index.geometry.slots_per_segment
        first = segment * per_segment
        if self._segment_users[segment] or self._index.has_entries(first, first + per_segment):
            return
        try:
            self._segments.remove(segment)
        except OSError as error:
            logger.warning("disk store %s: %s", self._files.directory.path, error)

    def _validate(self, blocks: Sequence[Block]) -> None:
        num_slots, slot_bytes = self._index.num_slots, self._slot_bytes
        for block in blocks:
            if not 0 <= block.slot < num_slots:
                raise ValueError(f"slot {block.slot} is not below {num_slots}")
            if not 0 < len(block.key) <= MAX_KEY_BYTES:
                raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(block.key)}")
            if not 0 < len(block.data) <= slot_bytes:
                raise ValueError(f"a block has 1 to {slot_bytes} bytes, not {len(block.data)}")
        if len({block.slot for block in blocks}) < len(blocks):
            raise ValueError("a batch has the same slot twice")
        if len({block.key for block in blocks}) < len(blocks):
            raise ValueError("a batch has the same key twice")

    def _report_corrupt(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            logger.warning(
                "disk store: block %s in %s (slot %d) does not match its checksum; it is deleted "
                "and will be computed again",
                block.key.hex(),
                self._segments.path(self._segments.segment_of(block.slot)),
                block.slot,
            )

    def _report_failures(
        self, what: str, blocks: Sequence[Block], errors: Sequence[OSError | None]
    ) -> None:
        """One line per file and kind of error, since a full or broken disk fails many blocks."""
        kinds = Counter(
            (self._segments.path(self._segments.segment_of(block.slot)), str(error))
            for block, error in zip(blocks, errors, strict=True)
            if error is not None
        )
        for (path, error), count in kinds.items():
            logger.warning(
                "disk store: %d blocks in %s could not be %s: %s", count, path, what, error
            )


def _name_of(directory: Path, ours: StoreIdentity) -> str:
    """The model, and what differs from our identity."""
    identity = read_identity(directory)
    if identity is None:
        return f"{directory.name} (its {IDENTITY_FILE} is missing or damaged)"
    theirs = asdict(identity)
    differences = [
        name.replace("_", " ")
        for name, value in asdict(ours).items()
        if value != theirs[name] and name != "model_name"
    ]
    return f"{identity.model_name} (other {', '.join(differences)})"
