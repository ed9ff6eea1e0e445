"""The index of a store: a file with one record of 64 bytes per slot.

The scheduler's ledger decides which key is in which slot, so the index needs no search structure: a
record is written in place when the data of its slot is complete, and cleared before the slot is
overwritten. A kill between any two system calls therefore leaves each entry whole or absent. A
record has a checksum of its own, so a torn or damaged one counts as absent. The file is read once,
when the store is opened; later the index is served from memory.
"""

import errno
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from longshore.connectors.offloading.disk.identity import FORMAT_VERSION
from longshore.protocol.private_files import Folder

MAX_KEY_BYTES: Final = 36
"""A sha256 block hash and the 4 bytes of its group."""

INDEX_FILE: Final = "slots.index"
RECORD_BYTES: Final = 64
HEADER_BYTES: Final = 4096

_MAGIC: Final = b"LSKVSLOT"
_HEADER: Final = struct.Struct("<8sIIQQ")  # magic, version, record bytes, the two of Geometry
_RECORD: Final = struct.Struct(f"<QQIB3x{MAX_KEY_BYTES}s")  # then 4 bytes of check
_KEY_BYTES_AT: Final = 20
_KEY_AT: Final = 24
_CHECK: Final = struct.Struct("<I")
_SEQUENCE: Final = struct.Struct("<Q")
_RECORDS: Final = np.dtype(
    {
        "names": ["sequence", "size_bytes", "key_bytes", "key", "check"],
        "formats": ["<u8", "<u4", "u1", f"V{MAX_KEY_BYTES}", "<u4"],
        "offsets": [0, 16, _KEY_BYTES_AT, _KEY_AT, _RECORD.size],
        "itemsize": RECORD_BYTES,
    }
)
"""The fields of `_RECORD` that are read for all slots at once."""

_MERGED_GAP: Final = 64
"""Changed records at most this far apart are written together: a page is one write anyway."""


class IndexDamaged(Exception):
    """The header of an index is damaged, or it describes another geometry."""


@dataclass(frozen=True)
class Geometry:
    """slot_bytes: bytes from one slot to the next, a multiple of the page size."""

    slot_bytes: int
    slots_per_segment: int


class Entry(NamedTuple):
    """One stored block. `sequence` orders entries by the time they were stored, from 1; 0 in a new
    entry."""

    slot: int
    key: bytes
    size_bytes: int
    checksum: int
    sequence: int = 0


class SlotIndex:
    """The entries of one rank's store, in memory and in a file. The caller serializes the calls."""

    def __init__(self, fd: int, geometry: Geometry, image: bytearray) -> None:
        self.geometry: Final = geometry
        self._fd = fd
        self._image = image
        self._slot_of: dict[bytes, int] = {}
        self._next_sequence = 1
        # Slots whose record in the file is unknown after a failed write.
        self._unclear: set[int] = set()

    @classmethod
    def create(cls, directory: Folder, geometry: Geometry, num_slots: int) -> "SlotIndex":
        """Make an empty index, which replaces an existing file. Raises OSError; then there is no
        file."""
        fd = directory.create_file(INDEX_FILE)
        try:
            allocate(fd, HEADER_BYTES + num_slots * RECORD_BYTES)
            _write_all(fd, memoryview(_header(geometry)), 0)
        except OSError:
            os.close(fd)
            directory.unlink(INDEX_FILE)
            raise
        return cls(fd, geometry, bytearray(num_slots * RECORD_BYTES))

    @classmethod
    def load(cls, directory: Folder, slot_bytes: int, num_slots: int) -> tuple["SlotIndex", int]:
        """Read an existing index, with at least `num_slots` slots. Damaged records are cleared;
        returns their number too. Of two entries with one key the older is cleared.

        Raises FileNotFoundError, IndexDamaged or OSError.
        """
        fd = directory.open_own_file(INDEX_FILE, os.O_RDWR)
        try:
            geometry, image = read_image(fd)
            if geometry.slot_bytes != slot_bytes:
                raise IndexDamaged(f"its slots have {geometry.slot_bytes} bytes, not {slot_bytes}")
            image.extend(bytes(max(0, num_slots * RECORD_BYTES - len(image))))
            allocate(fd, HEADER_BYTES + len(image))
            index = cls(fd, geometry, image)
            num_damaged = index._scan()
        except BaseException:
            os.close(fd)
            raise
        return index, num_damaged

    @property
    def num_slots(self) -> int:
        return len(self._image) // RECORD_BYTES

    def __len__(self) -> int:
        return len(self._slot_of)

    def find(self, key: bytes) -> int | None:
        """The slot of a key."""
        return self._slot_of.get(key)

    def entry(self, slot: int) -> Entry | None:
        """The entry in a slot."""
        return entry_in(self._image, slot)

    def slots(self) -> NDArray[np.int64]:
        """The slots of all entries, the least recently stored first."""
        return _used_slots(self._image)

    def keys_and_slots(self) -> Iterator[tuple[bytes, int]]:
        """As `entries`, faster."""
        slots = self.slots()
        return zip(_keys(self._image, slots), slots.tolist(), strict=True)

    def entries(self) -> Iterator[Entry]:
        """All entries, the least recently stored first."""
        for slot in self.slots().tolist():
            entry = self.entry(slot)
            assert entry is not None
            yield entry

    def has_entries(self, first: int, end: int) -> bool:
        """Whether there is an entry in a slot from `first` to `end`, exclusive."""
        return bool(_records(self._image)["sequence"][first:end].any())

    def in_the_way(self, blocks: Iterable[tuple[int, bytes]]) -> list[int]:
        """The slots to clear before blocks with these slots and keys are written: those with an
        entry, and those where one of the keys is."""
        image, slot_of, unclear = self._image, self._slot_of, self._unclear
        sequence_at = _SEQUENCE.unpack_from
        slots = []
        for slot, key in blocks:
            if sequence_at(image, slot * RECORD_BYTES)[0] or slot in unclear:
                slots.append(slot)
            if (other := slot_of.get(key, slot)) != slot:
                slots.append(other)
        return slots

    def put(self, entries: Iterable[Entry]) -> None:
        """Write the records of blocks whose data is complete. The slots must be clear, and the keys
        absent. An entry without a sequence becomes the latest.

        Raises OSError; then none of the entries exists.
        """
        slots = []
        for slot, key, size_bytes, checksum, sequence in entries:
            at = slot * RECORD_BYTES
            record = _RECORD.pack(
                sequence or self._next_sequence, checksum, size_bytes, len(key), key
            )
            self._image[at : at + RECORD_BYTES] = record + _CHECK.pack(_check(record, slot))
            self._slot_of[key] = slot
            self._next_sequence += 1
            slots.append(slot)
        try:
            self._write(slots)
        except OSError:
            self._forget(slots)
            self._unclear.update(slots)
            raise

    def clear(self, slots: Sequence[int]) -> None:
        """Remove the entries of these slots, if any. Raises OSError; then the entries are removed
        in memory, but the slots must not be overwritten, because the file may still list them."""
        self._forget(slots)
        self._unclear.update(slots)
        self._write(slots)
        self._unclear.difference_update(slots)

    def resize(self, num_slots: int) -> None:
        """Remove all slots from `num_slots` on, which must be clear. Raises OSError."""
        assert not self.has_entries(num_slots, self.num_slots)
        del self._image[num_slots * RECORD_BYTES :]
        os.ftruncate(self._fd, HEADER_BYTES + len(self._image))

    def close(self) -> None:
        os.close(self._fd)

    def _forget(self, slots: Iterable[int]) -> None:
        image, nothing = self._image, bytes(RECORD_BYTES)
        for slot in slots:
            at = slot * RECORD_BYTES
            if key_bytes := image[at + _KEY_BYTES_AT]:
                del self._slot_of[bytes(image[at + _KEY_AT : at + _KEY_AT + key_bytes])]
                image[at : at + RECORD_BYTES] = nothing

    def _write(self, slots: Sequence[int]) -> None:
        with memoryview(self._image) as image:
            for first, last in _runs(sorted(slots)):
                start, end = first * RECORD_BYTES, (last + 1) * RECORD_BYTES
                _write_all(self._fd, image[start:end], HEADER_BYTES + start)

    def _scan(self) -> int:
        """Fill the map of keys from the records just read; clear those that are damaged."""
        slots, damaged = intact_and_damaged(self._image)
        keys = _keys(self._image, slots)
        self._slot_of = dict(zip(keys, slots.tolist(), strict=True))  # the last, newest one stays
        if len(slots):
            self._next_sequence = int(_records(self._image)["sequence"][slots[-1]]) + 1
        outdated = [
            slot
            for key, slot in zip(keys, slots.tolist(), strict=True)
            if self._slot_of[key] != slot
        ]
        unused = [*damaged.tolist(), *outdated]
        for slot in unused:
            self._image[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = bytes(RECORD_BYTES)
        self._write(unused)
        return len(damaged)


def allocate(fd: int, num_bytes: int) -> None:
    """Make a file at least that long, with space on the disk for all of it. Raises OSError; then it
    is as long as before: a file system can have given it all of its free space by then.

    Where the file system cannot allocate space (EINVAL with direct I/O), only the length is set:
    then writes of blocks find out that the disk is full."""
    before = os.fstat(fd).st_size
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            os.ftruncate(fd, max(num_bytes, before))
            return
        os.ftruncate(fd, before)
        raise


def read_image(fd: int) -> tuple[Geometry, bytearray]:
    """The geometry and the records of an index file. Raises IndexDamaged or OSError."""
    size = os.fstat(fd).st_size
    header = os.pread(fd, HEADER_BYTES, 0)
    if len(header) < HEADER_BYTES:
        raise IndexDamaged("its header is cut off")
    magic, version, record_bytes, slot_bytes, slots_per_segment = _HEADER.unpack_from(header)
    geometry = Geometry(slot_bytes, slots_per_segment)
    if (magic, version, record_bytes) != (_MAGIC, FORMAT_VERSION, RECORD_BYTES):
        raise IndexDamaged("its header is not one of this format and version")
    if header != _header(geometry):
        raise IndexDamaged("its header does not match its checksum")
    image = bytearray((size - HEADER_BYTES) // RECORD_BYTES * RECORD_BYTES)
    filled = 0
    with memoryview(image) as view:
        while count := os.preadv(fd, [view[filled:]], HEADER_BYTES + filled):
            filled += count
    return geometry, image


def entry_in(image: bytearray, slot: int) -> Entry | None:
    """The entry that a record describes; None if it is clear."""
    sequence, checksum, size_bytes, key_bytes, key = _RECORD.unpack_from(image, slot * RECORD_BYTES)
    return Entry(slot, key[:key_bytes], size_bytes, checksum, sequence) if sequence else None


def intact_and_damaged(image: bytearray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The slots whose records match their checksums, the least recently stored first, and those
    whose records do not."""
    slots = _used_slots(image)
    with memoryview(image) as view:
        checks = [
            _check(view[slot * RECORD_BYTES : slot * RECORD_BYTES + _RECORD.size], slot)
            for slot in slots.tolist()
        ]
    intact = _records(image)["check"][slots] == np.array(checks, np.uint32)
    return slots[intact], slots[~intact]


def block_bytes(image: bytearray, slots: NDArray[np.int64]) -> int:
    """Bytes of the blocks in these slots."""
    return int(_records(image)["size_bytes"][slots].sum(dtype=np.int64))


def _used_slots(image: bytearray) -> NDArray[np.int64]:
    sequences = _records(image)["sequence"]
    slots = np.flatnonzero(sequences)
    return slots[np.argsort(sequences[slots], kind="stable")]


def _keys(image: bytearray, slots: NDArray[np.int64]) -> list[bytes]:
    records = _records(image)
    sizes = records["key_bytes"][slots].tolist()
    return [key[:size] for key, size in zip(records["key"][slots].tolist(), sizes, strict=True)]


def _check(record: bytes | memoryview, slot: int) -> int:
    """The checksum of a record, which also covers its slot."""
    return xxh3_64_intdigest(record, slot) & 0xFFFF_FFFF


def _header(geometry: Geometry) -> bytes:
    fields = _HEADER.pack(
        _MAGIC, FORMAT_VERSION, RECORD_BYTES, geometry.slot_bytes, geometry.slots_per_segment
    )
    return (fields + xxh3_64_intdigest(fields).to_bytes(8, "little")).ljust(HEADER_BYTES, b"\0")


def _records(image: bytearray) -> NDArray[np.void]:
    """(num_slots,) a view: the image cannot be resized while it exists."""
    return np.frombuffer(image, _RECORDS)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last slot of the ranges to write. `slots` is sorted."""
    first = 0
    for position, slot in enumerate(slots):
        if position + 1 == len(slots) or slots[position + 1] - slot > _MERGED_GAP:
            yield slots[first], slot
            first = position + 1


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
