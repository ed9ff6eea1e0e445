"""What a record contains, and how it is read.

A record is a ring of files NAME.000000, NAME.000001, ... Each one begins with a header and a
snapshot of the scheduler; its entries, which are the calls of the scheduler since then, follow in
chunks. Every part is a frame: its length, its CRC-32, its bytes.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import msgspec
import numpy as np

import longshore
from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import LongshoreError, ProtocolError
from longshore.protocol.handshake import PROTOCOL_VERSION
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import RowStart, SchedulerOutput
from longshore.protocol.requests import AddRequest
from longshore.protocol.transport.codec import Decoder
from longshore.scheduler.recorder.structure import structure_digest

FORMAT_VERSION: Final = 3
MAGIC: Final = b"longshore record\n"
MAX_FRAME_BYTES: Final = 1 << 30
_FRAME: Final = struct.Struct("<QI")


class RecordError(LongshoreError):
    """A record cannot be read or replayed; the message says why."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first frame of a file.

    run:          identifies the process that wrote it.
    first_entry:  number of its first entry, counted from the start of the process.
    policy:       the scheduling policy; is_outside: it is from another package.
    structure:    of the snapshot; see `structure_digest`.
    """

    run: str
    first_entry: int
    policy: str
    structure: str
    is_outside: bool = False
    format_version: int = FORMAT_VERSION
    protocol_version: int = PROTOCOL_VERSION
    version: str = longshore.__version__


class Event(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """An answer of an object that the scheduler was given, or what that object asked of the
    scheduler in the meantime, such as holding blocks.

    source: kind of object, and its number. answer: if it is of these types; else `graph` has it.
    error:  it raised this instead; the part before ": " is the class.
    """

    source: str
    method: str
    answer: bool | int | bytes | None = None
    graph: bytes = b""
    error: str = ""


Events: TypeAlias = tuple[Event, ...]


class Started(msgspec.Struct, array_like=True, frozen=True):
    """A `RowStart` without what its request contains, such as the prompt. That is recorded when the
    request arrives, and is part of the digest of the plan."""

    row: int
    generation: int
    request_id: str
    num_computed_tokens: int
    last_computed: int
    block_ids: tuple[Int32Array, ...]
    resumed: bool

    @classmethod
    def of(cls, start: RowStart) -> "Started":
        return cls(
            start.row,
            start.generation,
            start.request_id,
            start.num_computed_tokens,
            start.last_computed,
            start.block_ids,
            start.resumed,
        )


class Planned(msgspec.Struct, tag="p", array_like=True, frozen=True):
    """A call of `schedule`. In a file, `started` stands for the plan's `added`, which is empty."""

    now: float
    plan: SchedulerOutput | None
    events: Events = ()
    started: tuple[Started, ...] = ()


class Answered(msgspec.Struct, tag="o", array_like=True, frozen=True):
    """A call of `update_from_output`. events: during this call."""

    output: ModelRunnerOutput
    now: float
    events: Events = ()


class Added(msgspec.Struct, tag="a", array_like=True, frozen=True):
    """A call of `add_request`."""

    message: AddRequest
    client: int
    now: float
    events: Events = ()


class Called(msgspec.Struct, tag="c", array_like=True, frozen=True):
    """A call of any other method, or one that raised.

    arguments: graph of the positional and the named arguments.
    raised:    class of the exception.
    """

    method: str
    arguments: bytes
    events: Events = ()
    raised: str = ""


Entry: TypeAlias = Planned | Answered | Added | Called


class Chunk:
    """Encoded entries, as a msgpack array, which are the bytes of one frame."""

    def __init__(self) -> None:
        self.num_entries = 0
        self.data = bytearray(_ARRAY.pack(0xDD, 0))

    def append(self, entry: Entry) -> None:
        """Append an entry; what it refers to can change afterwards."""
        if type(entry) is Planned and entry.plan is not None and entry.plan.added:
            started = tuple(map(Started.of, entry.plan.added))
            plan = msgspec.structs.replace(entry.plan, added=())
            entry = Planned(entry.now, plan, entry.events, started)
        _encoder.encode_into(entry, self.data, -1)
        self.num_entries += 1

    def end(self) -> bytearray:
        """The bytes; nothing is appended any more."""
        _ARRAY.pack_into(self.data, 0, 0xDD, self.num_entries)
        return self.data


_ARRAY: Final = struct.Struct(">BI")  # of msgpack, with a length of 32 bits

_WIRE_TYPES: Final = {np.dtype(name): name for name in ("<i4", "<f4", "|u1")}


def _encode_array(array: Any) -> tuple[str, bytes | memoryview]:
    """As `codec.Encoder` does, but always in the header: the entry contains all its arrays."""
    data = array.data
    return _WIRE_TYPES[array.dtype], data if data.contiguous else array.tobytes()


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def frame(data: bytes | bytearray) -> bytes:
    """The beginning of the frame of `data`, which follows."""
    return _FRAME.pack(len(data), zlib.crc32(data))


def segment_files(path: Path) -> list[Path]:
    """The files of a record, oldest first. `path`: its name without a number, or one file."""
    if path.is_file():
        return [path]
    names = (
        (path.parent / each) for each in _names_in(path.parent) if each.startswith(path.name + ".")
    )
    return sorted(each for each in names if number_of(each) is not None)


def _names_in(folder: Path) -> list[str]:
    try:
        return [each.name for each in folder.iterdir()]
    except OSError:
        return []


def number_of(path: Path) -> int | None:
    """The number of a file of a record."""
    suffix = path.name.rpartition(".")[2]
    return int(suffix) if len(suffix) == 6 and suffix.isascii() and suffix.isdigit() else None


class Segment:
    """One file of a record, which is read as it is needed. Raises RecordError.

    is_cut: it ends within a frame, as after the end of a process that was killed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_cut = False
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise RecordError(f"{path} is not a record of a scheduler")
            self.header = self._read_header(file)
            self.snapshot = self._read_frame(file) or b""
            if not self.snapshot:
                raise RecordError(f"{path} ends before its snapshot, so it cannot be replayed")
            self._start = file.tell()

    def _read_header(self, file: BinaryIO) -> Header:
        data = self._read_frame(file)
        try:
            versions = msgspec.msgpack.decode(data or b"", type=_Versions)
            ours = _Versions(
                FORMAT_VERSION, PROTOCOL_VERSION, longshore.__version__, structure_digest()
            )
            if versions == ours:
                return msgspec.msgpack.decode(data or b"", type=Header)
        except msgspec.MsgspecError as error:
            raise RecordError(f"{self._path}: the header is damaged: {error}") from error
        raise RecordError(
            f"{self._path} was recorded by {versions}; this is {ours}. Replay it with the version "
            "that recorded it, because another one may plan otherwise."
        )

    def entries(self) -> Iterator[Entry]:
        """All whole entries."""
        decoder: Decoder[Entry] = Decoder(Entry, max_message_bytes=MAX_FRAME_BYTES)
        with self._path.open("rb") as file:
            file.seek(self._start)
            while (chunk := self._read_frame(file)) is not None:
                try:
                    for data in msgspec.msgpack.decode(chunk, type=list[msgspec.Raw]):
                        yield decoder.decode([memoryview(data)])
                except (msgspec.MsgspecError, ProtocolError) as error:
                    raise RecordError(f"{self._path}: an entry is damaged: {error}") from error

    def _read_frame(self, file: BinaryIO) -> bytes | None:
        """None at the end of the file, and if it ends within the frame."""
        start, head = file.tell(), file.read(_FRAME.size)
        if len(head) < _FRAME.size:
            self.is_cut |= len(head) > 0
            return None
        size, checksum = _FRAME.unpack(head)
        if size > MAX_FRAME_BYTES:
            raise RecordError(f"{self._path} is damaged at byte {start}: a part has {size} bytes")
        left = self._path.stat().st_size - file.tell()
        if size > left:
            self.is_cut = True
            return None
        data = file.read(size)
        if zlib.crc32(data) != checksum:
            raise RecordError(f"{self._path} is damaged at byte {start}: the checksum is wrong")
        return data


class _Versions(msgspec.Struct, frozen=True):
    """structure: format 2 has none."""

    format_version: int
    protocol_version: int
    version: str
    structure: str = "unknown"

    def __str__(self) -> str:
        return (
            f"Longshore {self.version} (record format {self.format_version}, protocol "
            f"{self.protocol_version}, structure of the state {self.structure})"
        )
